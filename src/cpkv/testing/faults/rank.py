"""A prefill rank without a model: it fills pages from seeds, and sends them as the engine's ranks do."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from cpkv.engine.commands import ConnectDecode, NewsAre, PoisonPages, ReadNews, SendPages, StopPages, WorkerReady
from cpkv.engine.rank_transfers import RankTransfers
from cpkv.errors import PlanError
from cpkv.layout.placement import PagePlacement
from cpkv.pool.page_pool import PagePool
from cpkv.protocol.messages import Done, Hello, SenderDescription
from cpkv.testing.faults.commands import FillPages, ReadState, StartSeededRank, StateIs
from cpkv.testing.faults.contents import fill_page, seeded_description, seeded_geometry
from cpkv.transfer.backend import TransferBackend

LOG = logging.getLogger(__name__)
# Between writes: mostly none, often some milliseconds, seldom so long that much happens meanwhile.
PAUSES_S = ((0.8, 0.0, 0.0), (0.15, 0.001, 0.005), (0.05, 0.02, 0.15))


def with_pauses(backend: TransferBackend, draws: random.Random) -> TransferBackend:
    """A back end that is slow now and then, so that faults find writes under way; a few pages take no time else."""
    honest = backend._contact
    go_on_at = 0.0

    def contact(session_id: str, since: float) -> bool:
        nonlocal go_on_at
        if time.monotonic() < go_on_at or not honest(session_id, since):
            return False
        ((_, low, high),) = draws.choices(PAUSES_S, [share for share, _, _ in PAUSES_S])
        go_on_at = time.monotonic() + draws.uniform(low, high)
        return True

    backend._contact = contact  # type: ignore[method-assign]
    return backend


class SeededRank:
    """A rank after `StartSeededRank`.

    Args:
        start: who to be.
        make_backend: makes the transfer engine.
    """

    def __init__(self, start: StartSeededRank, make_backend: Callable[[], TransferBackend]) -> None:
        settings = start.settings
        self._settings = settings
        self._rank = start.rank
        self._placement = PagePlacement(settings.page_size, settings.cp_size)
        local_pages = settings.num_pages // settings.cp_size
        self._pool = PagePool(seeded_geometry(settings.page_size), local_pages, poison=True)
        self._transfers = RankTransfers(
            start.rank,
            lambda: with_pauses(make_backend(), random.Random(start.pause_seed)),
            secret=start.secret,
            timeout_s=settings.transfer_timeout_s,
            digest_pages=settings.verify_transfer,
        )

    def ready(self) -> WorkerReady:
        """Its pool is there."""
        return WorkerReady({})

    def handle(self, command: Any) -> Any:
        """Act on a command and return the reply.

        Raises:
            CpkvError: whatever went wrong.
        """
        handlers: dict[type, Callable[[Any], Any]] = {
            ConnectDecode: self._connect,
            FillPages: self._fill,
            SendPages: self._send,
            StopPages: self._stop,
            ReadNews: self._news,
            PoisonPages: self._poison,
            ReadState: self._state,
        }
        if type(command) not in handlers:
            raise PlanError(f"rank {self._rank} cannot act on {type(command).__name__}")
        return handlers[type(command)](command)

    def close(self) -> None:
        """End the sender and its engine."""
        self._transfers.close()

    def _connect(self, command: ConnectDecode) -> Done:
        settings = self._settings
        sender = SenderDescription(
            rank=self._rank, cp_size=settings.cp_size, strategy=settings.cp_strategy, instance=command.instance
        )
        hello = Hello(seeded_description(settings.page_size, settings.transfer), sender)
        self._transfers.connect(command, hello, self._pool, self._placement)
        LOG.info("rank %d of %s", self._rank, command.instance)
        return Done()

    def _fill(self, command: FillPages) -> Done:
        for fill in command.fills:
            own = [
                (position, page)
                for position, page in zip(fill.positions, fill.pages, strict=True)
                if self._placement.owner(page) == self._rank
            ]
            for position, page in own:
                fill_page(self._pool, self._placement.local_page(page), fill.content_seed, position)
            LOG.info("request %s: computed positions %s", fill.request_id, [position for position, _ in own])
        return Done()

    def _send(self, command: SendPages) -> Done:
        LOG.info("request %s attempt %d: sending positions %s", command.request_id, command.attempt, command.positions)
        return self._transfers.send(command)

    def _stop(self, command: StopPages) -> Done:
        LOG.info("request %s attempt %d: stopping", command.request_id, command.attempt)
        return self._transfers.stop(command)

    def _news(self, command: ReadNews) -> NewsAre:
        reply = self._transfers.news(command)
        for news in reply.news:
            what = f"failed: {news.failed.message}" if news.failed else "drained" if news.drained else ""
            LOG.info("request %s attempt %d: %s", news.request_id, news.attempt, what or f"taken {news.positions}")
        return reply

    def _poison(self, command: PoisonPages) -> Done:
        own = [self._placement.local_page(page) for page in command.pages if self._placement.owner(page) == self._rank]
        self._pool.poison(own)
        return Done()

    def _state(self, command: ReadState) -> StateIs:
        return StateIs(threading.active_count(), len(os.listdir("/proc/self/fd")))
