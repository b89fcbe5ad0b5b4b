"""The scheduler's driver of transfers: carries out what the state machine says, and tells it what came of it.

TransferSender --actions--> ask the decode worker | order ranks to send or stop | free pages | end requests
               <--events--- answers, refusals     | news of the ranks           |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cpkv.errors import CpkvError, TransferError, WorkerDiedError
from cpkv.protocol.messages import OpenTransfer, TransferOpened
from cpkv.protocol.sender import (
    AskDecode,
    EndRequest,
    FreePages,
    QuarantinePages,
    SendPositions,
    StopSending,
    TransferSender,
)
from cpkv.transfer.page_sender import DrainedNews, FailedNews, News, TakenNews

# Between two attempts to say what a decode worker that cannot be reached must know.
ASK_AGAIN_S = 1.0


class DecodeSide(Protocol):
    """How questions reach the decode worker."""

    def ask(self, question: Any) -> Any:
        """Its answer, or the error that it reported, or that the connection broke; then `lost` is true."""

    @property
    def lost(self) -> bool:
        """Whether there is no connection."""


class SendingRanks(Protocol):
    """The ranks of the prefill group."""

    def send(self, order: SendPositions, opened: TransferOpened) -> None:
        """Let a rank begin to send."""

    def stop(self, order: StopSending) -> None:
        """Let a rank submit no more of an attempt."""

    def news(self, wait_s: float) -> Sequence[tuple[int, News]]:
        """What happened at the ranks, waiting up to `wait_s` seconds for something."""


class Handover:
    """Every transfer of one prefill scheduler.

    Args:
        sender: the state machine.
        decode: the decode worker.
        ranks: the ranks.
        on_end: told once per request, with the first cause or None.
        on_free: nobody reads a request's pages any more.
        on_quarantine: a request is over while its pages may still be read; `on_free` follows.
        on_taken: pages of a rank have arrived: the rank, how many, and their bytes.
    """

    def __init__(
        self,
        sender: TransferSender,
        decode: DecodeSide,
        ranks: SendingRanks,
        *,
        on_end: Callable[[str, CpkvError | None], None],
        on_free: Callable[[str], None],
        on_quarantine: Callable[[str], object],
        on_taken: Callable[[int, int, int], None] = lambda rank, pages, num_bytes: None,
    ) -> None:
        self._sender = sender
        self._decode = decode
        self._ranks = ranks
        self._on_end = on_end
        self._on_free = on_free
        self._on_quarantine = on_quarantine
        self._on_taken = on_taken
        self._opened: dict[tuple[str, int], TransferOpened] = {}
        self._ask_again_at: float | None = None

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return self._sender.open_requests

    @property
    def closing_requests(self) -> tuple[str, ...]:
        """Requests that have ended and are still cleaned up after."""
        return self._sender.closing_requests

    def begin(self, announcement: OpenTransfer) -> None:
        """Announce a request to the decode worker; its pages can be sent as they are computed."""
        self._sender.begin(announcement, time.monotonic())
        self._act()

    def computed(self, request_id: str, positions: int) -> None:
        """The first `positions` pages of a request are complete on every rank."""
        self._sender.computed(request_id, positions, time.monotonic())
        self._act()

    def sampled(self, request_id: str, first_token: int) -> None:
        """A prompt is computed to its end."""
        self._sender.sampled(request_id, first_token, time.monotonic())
        self._act()

    def cancel(self, request_id: str, error: CpkvError) -> None:
        """Give a request up."""
        self._sender.cancel(request_id, error)
        self._act()

    def abandon(self, error: CpkvError, num_ranks: int) -> None:
        """The prefill group is about to end: tell the decode worker what it need not wait for. Nothing else is done.

        Args:
            error: why.
            num_ranks: of the group.
        """
        for rank in range(num_ranks):
            self._sender.rank_lost(rank, error)
        for name in self._sender.open_requests:
            self._sender.cancel(name, error)
        for action in self._sender.take_actions():
            if isinstance(action, AskDecode):
                with contextlib.suppress(CpkvError):
                    self._decode.ask(action.message)

    def pump(self, wait_s: float = 0.0) -> None:
        """Take what happened, waiting up to `wait_s` seconds for news of the ranks, and go on from there.

        Raises:
            WorkerDiedError: a rank or the decode worker has ended.
        """
        for rank, news in self._ranks.news(wait_s):
            self._tell(rank, news)
        now = time.monotonic()
        if self._ask_again_at is not None and now >= self._ask_again_at:
            self._ask_again_at = None
            self._sender.decode_back()
        self._sender.tick(now)
        self._act()

    def _tell(self, rank: int, news: News) -> None:
        if isinstance(news, TakenNews):
            self._on_taken(rank, len(news.positions), news.num_bytes)
            self._sender.taken(rank, news.request_id, news.attempt, news.positions, time.monotonic())
        elif isinstance(news, FailedNews):
            self._sender.rank_failed(rank, news.request_id, news.attempt, news.error)
        elif isinstance(news, DrainedNews):
            self._sender.drained(rank, news.request_id, news.attempt, writes_may_land=news.writes_may_land)

    def _act(self) -> None:
        while actions := self._sender.take_actions():
            lost = False
            for action in actions:
                if isinstance(action, AskDecode):
                    # After a loss the rest is said again once there is a connection; each try would cost its time.
                    lost = lost or not self._ask(action.message)
                elif isinstance(action, SendPositions):
                    self._ranks.send(action, self._opened[action.request_id, action.attempt])
                elif isinstance(action, StopSending):
                    self._ranks.stop(action)
                elif isinstance(action, FreePages):
                    self._on_free(action.request_id)
                elif isinstance(action, QuarantinePages):
                    self._on_quarantine(action.request_id)
                elif isinstance(action, EndRequest):
                    self._forget(action.request_id)
                    self._on_end(action.request_id, action.error)

    def _ask(self, question: Any) -> bool:
        """Ask and pass the answer on; False when the connection broke."""
        try:
            answer = self._decode.ask(question)
        except WorkerDiedError:
            raise
        except CpkvError as error:
            if self._decode.lost and isinstance(error, TransferError):
                self._ask_again_at = time.monotonic() + ASK_AGAIN_S
                self._sender.decode_lost(error)
                return False
            self._sender.refused(question, error, time.monotonic())
            return True
        if isinstance(answer, TransferOpened):
            self._opened[answer.request_id, answer.attempt] = answer
        self._sender.answered(question, answer, time.monotonic())
        return True

    def _forget(self, request_id: str) -> None:
        for key in [key for key in self._opened if key[0] == request_id]:
            del self._opened[key]
