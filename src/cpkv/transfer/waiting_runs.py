"""Runs of one transfer that wait to be handed to the engine, write by write.

columns of all runs -> the next thousand as runs -> writes: one run, a part of one, or several short ones
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from cpkv.transfer.runs import Run, Runs

# Runs that are made of columns at a time.
_BLOCK = 1024


class WaitingRuns:
    """Takes runs off in order.

    Args:
        runs: all of them.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._made = 0
        self._next: deque[Run] = deque()

    def __len__(self) -> int:
        return len(self._next) + len(self._runs) - self._made

    def first(self, count: int) -> list[Run]:
        """The next runs, at most `count`, which stay."""
        self._fill(count)
        return list(islice(self._next, count))

    def take_write(self, max_runs: int, max_bytes: int) -> list[Run]:
        """Take what the next write carries: one run, a part of one, or several short ones."""
        self._fill(max_runs)
        source, target, length = first = self._next.popleft()
        if length > max_bytes:
            self._next.appendleft(Run(source + max_bytes, target + max_bytes, length - max_bytes))
            return [Run(source, target, max_bytes)]
        write = [first]
        room = max_bytes - length
        while self._next and len(write) < max_runs and self._next[0].length <= room:
            write.append(self._next.popleft())
            room -= write[-1].length
        return write

    def clear(self) -> None:
        """Drop them all."""
        self._next.clear()
        self._made = len(self._runs)

    def _fill(self, count: int) -> None:
        """Have `count` runs at hand, or all that are left."""
        while len(self._next) < count and self._made < len(self._runs):
            last = min(self._made + _BLOCK, len(self._runs))
            self._next += self._runs.part(self._made, last)
            self._made = last
