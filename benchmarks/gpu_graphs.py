"""Short work on a GPU, timed as a CUDA graph with cold caches: without what Python and launches take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# More than any L2 cache holds, and long enough that the graph behind it is launched before it has ended.
FLUSH_BYTES = 512 << 20
WARM_UPS = 3


class GraphTimer:
    """Records work once, and times one replay after another."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def record(self, work: Callable[[], Any]) -> Callable[[], float]:
        """Record what some work does on the device; returns what runs it again, and says how many seconds it took."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def seconds() -> float:
            self._flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        for _ in range(WARM_UPS):
            seconds()
        return seconds

    def milliseconds(self, work: Callable[[], Any], samples: int) -> float:
        """Median time of some work."""
        seconds = self.record(work)
        return sorted(seconds() for _ in range(samples))[samples // 2] * 1e3
