"""A page sender in a thread of its own, so that pages of one chunk leave while the next is computed.

rank's command loop --order, stop--> | queue | --> thread: PageSender.step, heartbeats
                    <------- news -- | queue | <--
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from cpkv.errors import TransferError
from cpkv.transfer.page_sender import News, PageSender, SendOrder

LOG = logging.getLogger(__name__)
BUSY_PAUSE_S = 0.5e-3
# Orders wait so long at most while the engine writes.
WRITE_WAIT_S = 5e-3
# Heartbeats within one lease: two may get lost.
BEATS_PER_LEASE = 3


class SenderThread:
    """Owns a page sender. One thread calls its methods.

    Args:
        sender: not called by anybody else from now on.
        lease_s: the decode worker takes a prefill that says nothing for so long for dead.
    """

    def __init__(self, sender: PageSender, lease_s: float) -> None:
        self._sender = sender
        self._beat_s = lease_s / BEATS_PER_LEASE
        self._calls: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._broken = ""
        self._reusable = True
        self._thread = threading.Thread(target=self._run, name="page sender", daemon=True)
        self._thread.start()

    def order(self, order: SendOrder) -> None:
        """Begin to send pages."""
        self._call(lambda: self._sender.order(order))

    def stop(self, request_id: str, attempt: int) -> None:
        """Submit no more of an attempt."""
        self._call(lambda: self._sender.stop(request_id, attempt))

    def news(self, wait_s: float) -> tuple[News, ...]:
        """What happened since the last call; waits up to `wait_s` seconds for the first piece.

        Raises:
            TransferError: the thread has ended by an error.
        """
        news = []
        try:
            news.append(self._news.get(wait_s > 0, wait_s or None))
            while True:
                news.append(self._news.get_nowait())
        except queue.Empty:
            if not news:
                self._refuse_broken()
        return tuple(news)

    def close(self, drain_s: float) -> bool:
        """End the thread; see `PageSender.close`."""

        def close() -> bool:
            self._reusable = self._sender.close(drain_s)
            return True

        self._calls.put(close)
        self._thread.join()
        return self._reusable

    def _call(self, function: Callable[[], None]) -> None:
        self._refuse_broken()

        def call() -> bool:
            function()
            return False

        self._calls.put(call)

    def _refuse_broken(self) -> None:
        if self._broken:
            raise TransferError(f"the page sender has ended: {self._broken}")

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whoever asks next must learn of it
            LOG.exception("the page sender failed")
            self._broken = f"{type(error).__name__}: {error}"
            self._reusable = self._sender.close(0.0)

    def _serve(self) -> None:
        beat_at = time.monotonic() + self._beat_s
        moved = False
        while True:
            idle_s = max(0.0, beat_at - time.monotonic())
            if moved or self._sender.wait(min(WRITE_WAIT_S, idle_s)):
                pause_s = 0.0
            else:
                pause_s = min(BUSY_PAUSE_S, idle_s) if self._sender.busy else idle_s
            try:
                if self._calls.get(pause_s > 0, pause_s or None)():
                    return
            except queue.Empty:
                pass
            moved = self._sender.step()
            for news in self._sender.take_news():
                self._news.put(news)
            if time.monotonic() >= beat_at:
                self._sender.heartbeat()
                beat_at = time.monotonic() + self._beat_s
