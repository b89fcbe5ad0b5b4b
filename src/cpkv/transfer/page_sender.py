"""One prefill rank's side of a transfer: the pages that it owns, each to its place at the decode worker.

rank 2 owns positions 0 and 4 of a request      position 0: local page 1 -> decode page 7
                                                position 4: local page 2 -> decode page 3
per page two runs: latent bytes, index bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cpkv.errors import TransferError
from cpkv.layout.transfer_map import PageMove
from cpkv.pool.page_pool import PagePool
from cpkv.protocol.messages import Done, PagesSent
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.runs import Peer, Region, Run

DRAIN_TIMEOUT_S = 5.0


class SendReport(NamedTuple):
    """What a rank sent for one request."""

    pages: int
    num_bytes: int


class PageSender:
    """Sends pages of one pool to one decode worker.

    Args:
        rank: this rank.
        backend: moves bytes; the pool's allocations are registered with it here.
        pool: where the pages lie.
        link: to the decode worker.
        digest_pages: send a digest of each page along, for diagnostics.
    """

    def __init__(
        self, rank: int, backend: TransferBackend, pool: PagePool, link: DecodeLink, *, digest_pages: bool = False
    ) -> None:
        self._rank = rank
        self._backend = backend
        self._pool = pool
        self._link = link
        self._digest_pages = digest_pages
        welcome = link.welcome
        self._target_bases = tuple(region.address for region in welcome.regions)
        self._peer = Peer(
            welcome.session_id, tuple(Region(region.address, region.length) for region in welcome.regions)
        )
        self._regions = tuple(Region(span.address, span.length) for span in pool.regions())
        for region in self._regions:
            backend.register(region)

    def send(self, request_id: str, attempt: int, moves: Sequence[PageMove], *, timeout_s: float = 60.0) -> SendReport:
        """Send pages and tell the decode worker, once every write is complete.

        Until this returns or raises with the engine drained, the pages must not be freed.

        Raises:
            TransferError: the engine failed, naming the rank and the first cause; or the decode worker refused.
        """
        if not moves:
            return SendReport(0, 0)
        # Region by region, so that neighbouring pages can be merged into one write.
        runs = [run for by_region in zip(*map(self._runs, moves), strict=True) for run in by_region]
        transfer_id = self._backend.submit(self._peer, runs)
        status = self._backend.wait(transfer_id, timeout_s)
        if status.state != "done":
            cause = status.cause or f"the {self._backend.name} engine was not done after {timeout_s:.0f} s"
            raise TransferError(f"rank {self._rank} could not send {len(moves)} pages of request {request_id}: {cause}")
        digests = tuple(self._pool.page_digest(move.source) for move in moves) if self._digest_pages else ()
        positions = tuple(move.position for move in moves)
        self._link.ask(PagesSent(request_id, attempt, self._rank, positions, digests), Done)
        return SendReport(len(moves), sum(run.length for run in runs))

    def _runs(self, move: PageMove) -> list[Run]:
        return [
            Run(span.address, base + move.target * span.length, span.length)
            for span, base in zip(self._pool.page_spans(move.source), self._target_bases, strict=True)
        ]

    def drain(self, timeout_s: float) -> bool:
        """True when no write of ours can still read the pool."""
        return self._backend.drain(timeout_s)

    def close(self) -> bool:
        """Take the pool's memory back from the engine; close the engine when a write never ends.

        Returns:
            Whether the engine can still be used.
        """
        if not self._backend.drain(DRAIN_TIMEOUT_S):
            self._backend.close()
            return False
        for region in self._regions:
            self._backend.unregister(region)
        return True
