"""Runs of one transfer that wait to be handed to the engine, write by write: one run, a part of one, or several."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from cpkv.transfer.runs import Run, Runs


class WaitingRuns:
    """Takes runs off in order.

    Args:
        runs: all of them.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs.as_list()
        # Bytes of all runs up to the end of each.
        self._ends = np.cumsum(runs.lengths).tolist()
        self._next = 0

    def __len__(self) -> int:
        return len(self._runs) - self._next

    def first(self, count: int) -> list[Run]:
        """The next runs, at most `count`, which stay."""
        return self._runs[self._next : self._next + count]

    def take_write(self, max_runs: int, max_bytes: int) -> list[Run]:
        """Take what the next write carries: one run, a part of one, or several short ones."""
        first = self._next
        source, target, length = self._runs[first]
        if length > max_bytes:
            self._runs[first] = Run(source + max_bytes, target + max_bytes, length - max_bytes)
            return [Run(source, target, max_bytes)]
        fit = self._ends[first] - length + max_bytes
        self._next = bisect_right(self._ends, fit, first + 1, min(first + max_runs, len(self._ends)))
        return self._runs[first : self._next]

    def clear(self) -> None:
        """Drop them all."""
        self._next = len(self._runs)
