"""A cluster of threads with diagnostics on, whose fabric and decode allocator tests can look at and hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from cpkv.cache.allocator import PageAllocator
from cpkv.config.settings import EngineSettings
from cpkv.engine.cluster import Cluster
from cpkv.engine.prefill import PrefillScheduler
from cpkv.engine.request import Request
from cpkv.protocol.messages import Done, ReleaseRequest
from cpkv.transfer.backend import TransferStatus
from cpkv.transfer.inprocess import InProcessFabric
from cpkv.transfer.runs import Run

RANKS = 3
PAGE = 16
SETTINGS = EngineSettings(
    num_pages=48,
    enable_cp_shared_kv=True,
    cp_size=RANKS,
    page_size=PAGE,
    chunk_size=70,
    transfer="inprocess",
    transfer_timeout_s=20.0,
    debug=True,
)


class SelectiveFabric(InProcessFabric):
    """A fabric that holds the writes that it sees while `holding`, for good, until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.holding = False
        self.held: set[Run] = set()

    def copy(self, session_id: str, run: Run) -> TransferStatus:
        if self.holding:
            self.held.add(run)
        if run in self.held:
            return TransferStatus("pending")
        return super().copy(session_id, run)

    def release(self) -> None:
        self.holding = False
        self.held.clear()
        super().release()


@dataclasses.dataclass
class Group:
    """A running cluster and what is inside of it: the fabric, and the decode worker's allocator."""

    cluster: Cluster
    fabric: SelectiveFabric
    decode_allocator: PageAllocator
    decode_log: list[Any]

    def scheduler(self, shared: bool = True) -> PrefillScheduler:
        self.cluster.open_pool(shared)
        return PrefillScheduler(self.cluster, shared=shared)

    def release(self, *names: str) -> None:
        """End requests at the decode worker."""
        for name in names:
            self.cluster.ask_decode(ReleaseRequest(name), Done)


def requests_of(*lengths: int) -> list[Request]:
    """Requests a, b, c ... of these lengths."""
    return [
        Request("abcdefg"[number], tuple((7 * number + 3 * i) % 500 for i in range(length)), 4)
        for number, length in enumerate(lengths)
    ]


def check_whole(allocator: PageAllocator, quarantined: int = 0) -> None:
    """No page is lost, held or freed twice."""
    allocator.check()
    assert allocator.quarantined_pages == quarantined
    assert allocator.free_pages == allocator.capacity_pages - quarantined
    assert not allocator.request_ids
