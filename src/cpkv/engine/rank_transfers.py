"""The transfers of one prefill rank, as commands order them: an engine for the rank's life, a sender for each pool.

ConnectDecode -> SenderThread over the open pool -> SendPages, StopPages, ReadNews -> disconnect, before the pool goes
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cpkv.engine.commands import ConnectDecode, NewsAre, PagesNews, ReadNews, SendPages, StopPages
from cpkv.errors import PlanError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.transfer_map import page_moves
from cpkv.pool.host_pages import HostPages
from cpkv.pool.page_pool import PagePool
from cpkv.protocol.failures import failure_of
from cpkv.protocol.messages import Done, Hello
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.page_sender import FailedNews, News, PageSender, SendOrder, TakenNews
from cpkv.transfer.report_link import DecodeReportLink
from cpkv.transfer.sender_thread import SenderThread

LOG = logging.getLogger(__name__)
DRAIN_TIMEOUT_S = 5.0


class RankTransfers:
    """What a rank sends.

    Args:
        rank: this rank.
        make_backend: makes the transfer engine; called when it is first needed, and after one had to be closed.
        secret: shared by the workers.
        timeout_s: for the handshake with the decode worker.
        digest_pages: send a digest of each page along.
    """

    def __init__(
        self,
        rank: int,
        make_backend: Callable[[], TransferBackend],
        *,
        secret: str,
        timeout_s: float,
        digest_pages: bool,
    ) -> None:
        self._rank = rank
        self._make_backend = make_backend
        self._secret = secret
        self._timeout_s = timeout_s
        self._digest_pages = digest_pages
        self._backend: TransferBackend | None = None
        self._placement = PagePlacement(1, 1)
        self._thread: SenderThread | None = None
        self._source: PagePool | HostPages | None = None

    def connect(self, command: ConnectDecode, hello: Hello, pool: PagePool, placement: PagePlacement) -> None:
        """Make a sender for a pool.

        Raises:
            TransferError: the engine does not start, or the memory cannot be registered.
        """
        if self._backend is None:
            self._backend = self._make_backend()
        self._placement = placement
        self._source = HostPages(pool) if pool.device.type == "cuda" else pool
        sender = PageSender(
            self._rank,
            self._backend,
            self._source,
            lambda: DecodeReportLink(
                DecodeLink(command.host, command.port, hello, secret=self._secret, timeout_s=self._timeout_s)
            ),
            digest_pages=self._digest_pages,
        )
        self._thread = SenderThread(sender, command.lease_s)

    def send(self, command: SendPages) -> Done:
        """Begin to send pages."""
        thread = self._connected()
        target_placement = PagePlacement(self._placement.page_size, len(command.targets))
        moves = page_moves(
            command.positions, command.pages, command.target_pages, self._placement, target_placement, self._rank
        )
        assert self._source is not None
        self._source.stage([move.source for move in moves])
        LOG.info("request %s: attempt %d: sends %d pages", command.request_id, command.attempt, len(moves))
        thread.order(SendOrder(command.request_id, command.attempt, moves, command.targets))
        return Done()

    def stop(self, command: StopPages) -> Done:
        """Submit no more of an attempt."""
        self._connected().stop(command.request_id, command.attempt)
        return Done()

    def news(self, command: ReadNews) -> NewsAre:
        """What became of pages."""
        return NewsAre(tuple(self._as_message(news) for news in self._connected().news(command.wait_s)))

    def disconnect(self) -> None:
        """End the sender; an engine with a write that does not end was closed, and another is made when needed."""
        if self._thread is not None:
            if not self._thread.close(DRAIN_TIMEOUT_S):
                self._backend = None
            self._thread = self._source = None

    def close(self) -> None:
        """End the sender and the engine."""
        self.disconnect()
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def _connected(self) -> SenderThread:
        if self._thread is None:
            raise PlanError(f"rank {self._rank} was asked to send before its pool was opened and connected")
        return self._thread

    def _as_message(self, news: News) -> PagesNews:
        if isinstance(news, TakenNews):
            return PagesNews(news.request_id, news.attempt, positions=news.positions, num_bytes=news.num_bytes)
        if isinstance(news, FailedNews):
            return PagesNews(news.request_id, news.attempt, failed=failure_of(news.error, f"prefill rank {self._rank}"))
        return PagesNews(news.request_id, news.attempt, drained=True, writes_may_land=news.writes_may_land)
