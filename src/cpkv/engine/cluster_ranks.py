"""The ranks of a cluster as transfers see them: orders go out as commands, news come back when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpkv.engine.cluster import Cluster
from cpkv.engine.commands import NewsAre, PagesNews, ReadNews, SendPages, StopPages
from cpkv.engine.worker import WorkerHandle
from cpkv.protocol.failures import error_of
from cpkv.protocol.messages import TransferOpened
from cpkv.protocol.sender import SendPositions, StopSending
from cpkv.transfer.page_sender import DrainedNews, FailedNews, News, TakenNews


class ClusterRanks:
    """Carries orders to ranks.

    Args:
        cluster: the workers.
        pages_of: the prefill's pages of a request, by logical page position.
    """

    def __init__(self, cluster: Cluster, pages_of: Callable[[str], Sequence[int]]) -> None:
        self._cluster = cluster
        self._pages_of = pages_of

    def send(self, order: SendPositions, opened: TransferOpened) -> None:
        """Let a rank begin to send."""
        pages = self._pages_of(order.request_id)
        target_of = dict(zip(opened.positions, opened.pages, strict=True))
        command = SendPages(
            order.request_id,
            order.attempt,
            order.positions,
            tuple(pages[position] for position in order.positions),
            tuple(target_of[position] for position in order.positions),
            opened.targets,
        )
        self._cluster.workers.call({self._cluster.ranks[order.rank]: command})

    def stop(self, order: StopSending) -> None:
        """Let a rank submit no more of an attempt."""
        command = StopPages(order.request_id, order.attempt)
        self._cluster.workers.call({self._cluster.ranks[order.rank]: command})

    def news(self, wait_s: float) -> Sequence[tuple[int, News]]:
        """What happened at the ranks; all of them wait at once."""
        replies: dict[WorkerHandle, NewsAre] = self._cluster.call_ranks(ReadNews(wait_s))
        ranks = enumerate(self._cluster.ranks)
        return [(rank, _news(message)) for rank, worker in ranks for message in replies[worker].news]


def _news(message: PagesNews) -> News:
    if message.failed is not None:
        return FailedNews(message.request_id, message.attempt, error_of(message.failed))
    if message.drained:
        return DrainedNews(message.request_id, message.attempt, message.writes_may_land)
    return TakenNews(message.request_id, message.attempt, message.positions, message.num_bytes)
