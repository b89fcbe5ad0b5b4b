"""A thread that does things later, while the scheduler is busy or blocked, and that notices when nothing goes on."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

WATCH_S = 0.25


class FaultClock:
    """Calls functions at their time, and `on_stall` once when `keep_going` was not called for `stall_s`.

    Args:
        stall_s: patience.
        on_stall: what then.
    """

    def __init__(self, stall_s: float, on_stall: Callable[[], None]) -> None:
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._progress_at = time.monotonic()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fault clock", daemon=True)
        self._thread.start()

    def after(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call `function` in the clock's thread."""
        with self._changed:
            self._count += 1
            heapq.heappush(self._due, (time.monotonic() + delay_s, self._count, function))
            self._changed.notify()

    def keep_going(self) -> None:
        """Something has moved on."""
        self._progress_at = time.monotonic()

    def close(self) -> None:
        """Do what is still due, now, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for _, _, function in sorted(self._due):
            function()

    def _run(self) -> None:
        is_stalled = False
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                function = None
                if self._due and self._due[0][0] <= now:
                    function = heapq.heappop(self._due)[2]
                elif not is_stalled and now - self._progress_at > self._stall_s:
                    is_stalled, function = True, self._on_stall
                else:
                    self._changed.wait(min(WATCH_S, self._due[0][0] - now) if self._due else WATCH_S)
            if function is not None:
                function()
