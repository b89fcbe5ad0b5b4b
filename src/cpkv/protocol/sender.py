"""The prefill side of transfers as a state machine: what happened and the time in, what to do out. No I/O.

opening -> sending -> finishing -> ended                       pages free
   |          |           `-> closing (decode refused)
   `----------`-------------> closing -> drained               pages in quarantine until no rank reads them

    TransferSender              the scheduler's book of all transfers
      AskDecode(message)          -> answered(message, answer) | refused(message, error) | decode_lost(cause)
      SendPositions(rank, ...)    -> taken(rank, ...) | rank_failed(rank, ...)
      StopSending(rank, ...)      -> drained(rank, ...)
      FreePages, QuarantinePages, EndRequest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cpkv.errors import BusyError, CpkvError, ProtocolError, TransferError
from cpkv.protocol import messages as m


@dataclass(frozen=True)
class AskDecode:
    """Ask the decode worker, one question at a time and in this order."""

    message: Any


@dataclass(frozen=True)
class SendPositions:
    """Let a rank send these logical page positions of a request."""

    rank: int
    request_id: str
    attempt: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class StopSending:
    """Let a rank submit no more of an attempt, and say when nothing of it is under way."""

    rank: int
    request_id: str
    attempt: int


@dataclass(frozen=True)
class FreePages:
    """Nobody reads the request's pages any more."""

    request_id: str


@dataclass(frozen=True)
class QuarantinePages:
    """The request is over, and its pages may still be read; `FreePages` follows."""

    request_id: str


@dataclass(frozen=True)
class EndRequest:
    """Tell the client: handed over (no error), or the first cause."""

    request_id: str
    error: CpkvError | None


Action = AskDecode | SendPositions | StopSending | FreePages | QuarantinePages | EndRequest


@dataclass(eq=False)
class Outgoing:
    """One attempt.

    Attributes:
        announcement: what was or will be asked.
        began_at: when the request came to its first attempt.
        progress_at: when what is waited for now was asked for, or last moved on.
        opened: the decode worker's answer.
        computed: positions below this lie complete in the pool.
        told: positions that ranks were told to send.
        taken: positions that have arrived.
        busy: ranks of which a read may be under way.
        lost: ranks whose last writes may still land: they died while busy, or the engine failed.
        owed: cleaning up that the decode worker has not acknowledged yet, in order.
    """

    announcement: m.OpenTransfer
    began_at: float
    progress_at: float
    state: Literal["opening", "waiting", "sending", "finishing", "closing"] = "opening"
    opened: m.TransferOpened | None = None
    computed: int = 0
    first_token: int | None = None
    told: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    owed: list[Any] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The request."""
        return self.announcement.request_id

    @property
    def attempt(self) -> int:
        """Its number."""
        return self.announcement.attempt


class TransferSender:
    """Every transfer of one prefill scheduler.

    Args:
        wait_s: how long a request waits for pages at the decode worker.
        progress_s: a transfer that does not move on for so long is given up.
        retry_s: pause before a decode worker without free pages is asked again.
    """

    def __init__(self, *, wait_s: float, progress_s: float, retry_s: float = 0.1) -> None:
        self._wait_s = wait_s
        self._progress_s = progress_s
        self._retry_s = retry_s
        self._attempts = 0
        self._outgoing: dict[str, Outgoing] = {}
        self._actions: list[Action] = []
        self._is_decode_lost = False

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return tuple(name for name, outgoing in self._outgoing.items() if outgoing.state != "closing")

    @property
    def closing_requests(self) -> tuple[str, ...]:
        """Requests that have ended and are still cleaned up after."""
        return tuple(name for name, outgoing in self._outgoing.items() if outgoing.state == "closing")

    def take_actions(self) -> tuple[Action, ...]:
        """What to do now, in this order; each is given once."""
        actions = tuple(self._actions)
        self._actions.clear()
        return actions

    def begin(self, announcement: m.OpenTransfer, now: float) -> None:
        """Announce a request; its `attempt` is filled in here.

        Raises:
            ProtocolError: the id is in use, or an earlier request of this id is still cleaned up after.
        """
        name = announcement.request_id
        if name in self._outgoing:
            raise ProtocolError(f"request {name} is {self._outgoing[name].state}; use an id once")
        self._outgoing[name] = self._announce(announcement, now, now)

    def _announce(self, announcement: m.OpenTransfer, began_at: float, now: float) -> Outgoing:
        self._attempts += 1
        message = m.OpenTransfer(
            announcement.request_id,
            self._attempts,
            announcement.prompt_tokens,
            announcement.max_new_tokens,
            announcement.senders,
            announcement.sampling,
        )
        self._actions.append(AskDecode(message))
        return Outgoing(message, began_at, now)

    def computed(self, request_id: str, positions: int, now: float) -> None:
        """The forward pass that wrote the first `positions` pages has completed: they may be sent."""
        outgoing = self._live(request_id)
        if outgoing is not None and positions > outgoing.computed:
            outgoing.computed = positions
            self._advance(outgoing, now)

    def sampled(self, request_id: str, first_token: int, now: float) -> None:
        """The whole prompt is computed, and this is the first token."""
        if (outgoing := self._live(request_id)) is not None:
            outgoing.first_token = first_token
            outgoing.computed = len(outgoing.announcement.senders)
            self._advance(outgoing, now)

    def answered(self, message: Any, answer: Any, now: float) -> None:
        """The decode worker's answer to what `AskDecode` said."""
        self.decode_back()
        outgoing = self._outgoing.get(message.request_id)
        if outgoing is None or outgoing.attempt != message.attempt:
            return
        if isinstance(message, m.AbortTransfer | m.WritesDrained):
            self._acknowledged(outgoing, message)
        elif isinstance(message, m.OpenTransfer) and outgoing.state == "opening":
            self._opened(outgoing, answer, now)
        elif isinstance(message, m.FinishTransfer) and outgoing.state == "finishing":
            complete = m.TransferComplete(outgoing.request_id, outgoing.attempt)
            cause = f"request {outgoing.request_id}: the decode worker completed something else: {answer}"
            self._end(outgoing, None if answer == complete else ProtocolError(cause))

    def refused(self, message: Any, error: CpkvError, now: float) -> None:
        """The decode worker's error to what `AskDecode` said."""
        self.decode_back()
        outgoing = self._outgoing.get(message.request_id)
        if outgoing is None or outgoing.attempt != message.attempt:
            return
        if isinstance(message, m.AbortTransfer | m.WritesDrained):
            # It knows of no such attempt, so nothing is owed.
            self._acknowledged(outgoing, message)
        elif isinstance(message, m.OpenTransfer) and isinstance(error, BusyError) and outgoing.state == "opening":
            if now - outgoing.began_at > self._wait_s:
                self._end(outgoing, error)
            else:
                outgoing.state = "waiting"
                outgoing.progress_at = now
        elif outgoing.state != "closing":
            self._end(outgoing, error)

    def decode_lost(self, error: CpkvError) -> None:
        """The connection broke: every transfer fails, and what is owed is said again once it is back.

        Questions that were not asked yet are void; whoever asks them all the same does no harm.
        """
        self._is_decode_lost = True
        for outgoing in list(self._outgoing.values()):
            if outgoing.state != "closing":
                self._end(outgoing, error)
        self._actions = [action for action in self._actions if not isinstance(action, AskDecode)]

    def decode_back(self) -> None:
        """There is a connection again, or one is to be tried; an answer says so too."""
        if self._is_decode_lost:
            self._is_decode_lost = False
            for outgoing in self._outgoing.values():
                self._ask_owed(outgoing)

    def _ask_owed(self, outgoing: Outgoing) -> None:
        """Say what is owed next; while there is no connection it waits for `decode_back`."""
        if outgoing.owed and not self._is_decode_lost:
            self._actions.append(AskDecode(outgoing.owed[0]))

    def taken(self, rank: int, request_id: str, attempt: int, positions: Sequence[int], now: float) -> None:
        """A rank's pages have arrived, and no write of them is under way."""
        outgoing = self._attempt(request_id, attempt)
        if outgoing is None or outgoing.state == "closing":
            return
        outgoing.taken.update(positions)
        outgoing.progress_at = now
        if not any(outgoing.announcement.senders[position] == rank for position in outgoing.told - outgoing.taken):
            outgoing.busy.discard(rank)
        self._advance(outgoing, now)

    def rank_failed(self, rank: int, request_id: str, attempt: int, error: CpkvError) -> None:
        """A rank could not send; it may still have writes under way."""
        outgoing = self._attempt(request_id, attempt)
        if outgoing is not None and outgoing.state != "closing":
            self._end(outgoing, error)

    def drained(self, rank: int, request_id: str, attempt: int, *, writes_may_land: bool) -> None:
        """A rank reads no page of an attempt any more; writes that failed at its engine may still land."""
        outgoing = self._attempt(request_id, attempt)
        if outgoing is not None and outgoing.state == "closing" and rank in outgoing.busy:
            outgoing.busy.discard(rank)
            if writes_may_land:
                outgoing.lost.add(rank)
            self._closed(outgoing)

    def rank_lost(self, rank: int, error: CpkvError) -> None:
        """A rank's process is gone. It reads no page any more; what it sent last may still land."""
        for outgoing in list(self._outgoing.values()):
            if outgoing.state != "closing" and rank in outgoing.announcement.senders:
                self._end(outgoing, error)
            if rank in outgoing.busy:
                outgoing.busy.discard(rank)
                outgoing.lost.add(rank)
                self._closed(outgoing)

    def cancel(self, request_id: str, error: CpkvError) -> None:
        """The client does not want it any more, or its time is over."""
        if (outgoing := self._live(request_id)) is not None:
            self._end(outgoing, error)

    def tick(self, now: float) -> None:
        """Ask again for pages, and give up what does not move on."""
        for name, outgoing in list(self._outgoing.items()):
            idle = now - outgoing.progress_at
            if outgoing.state == "waiting" and idle >= self._retry_s:
                again = self._announce(outgoing.announcement, outgoing.began_at, now)
                again.computed, again.first_token = outgoing.computed, outgoing.first_token
                self._outgoing[name] = again
            elif outgoing.state in ("sending", "finishing", "opening") and idle > self._progress_s:
                pending = outgoing.told - outgoing.taken
                # Between chunks of a long prompt nothing is pending, and nothing is late.
                if pending or outgoing.state != "sending":
                    self._end(outgoing, self._stalled(outgoing, pending, idle))

    def _stalled(self, outgoing: Outgoing, pending: set[int], idle: float) -> TransferError:
        senders = outgoing.announcement.senders
        where = f"{len(pending)} pages of ranks {sorted({senders[position] for position in pending})}"
        what = where if pending else f"the answer of the decode worker while {outgoing.state}"
        return TransferError(f"request {outgoing.request_id}: {what} did not come within {idle:.0f} s")

    def _opened(self, outgoing: Outgoing, opened: Any, now: float) -> None:
        if not self._fits(outgoing, opened):
            cause = f"request {outgoing.request_id}: the decode worker opened something else: {opened}"
            self._end(outgoing, ProtocolError(cause))
            return
        outgoing.opened = opened
        outgoing.state = "sending"
        outgoing.progress_at = now
        self._advance(outgoing, now)

    @staticmethod
    def _fits(outgoing: Outgoing, opened: Any) -> bool:
        if not isinstance(opened, m.TransferOpened):
            return False
        positions, pages = opened.positions, opened.pages
        return (
            (opened.request_id, opened.attempt) == (outgoing.request_id, outgoing.attempt)
            and list(positions) == sorted(set(positions))
            and all(0 <= position < len(outgoing.announcement.senders) for position in positions)
            and len(pages) == len(positions)
            and len(set(pages)) == len(pages)
            and all(page >= 0 for page in pages)
            and bool(opened.targets)
        )

    def _advance(self, outgoing: Outgoing, now: float) -> None:
        """Let ranks send what is computed and wanted; finish once everything has arrived."""
        if outgoing.state != "sending" or outgoing.opened is None:
            return
        senders = outgoing.announcement.senders
        ready = [position for position in outgoing.opened.positions if position < outgoing.computed]
        fresh = [position for position in ready if position not in outgoing.told]
        by_rank: dict[int, list[int]] = {}
        for position in fresh:
            by_rank.setdefault(senders[position], []).append(position)
        for rank, positions in by_rank.items():
            outgoing.busy.add(rank)
            self._actions.append(SendPositions(rank, outgoing.request_id, outgoing.attempt, tuple(positions)))
        if fresh and outgoing.told == outgoing.taken:
            # Only now does anything have to arrive; a new chunk does not excuse pages of an earlier one that do not.
            outgoing.progress_at = now
        outgoing.told.update(fresh)
        if outgoing.first_token is not None and outgoing.taken >= set(outgoing.opened.positions):
            outgoing.state = "finishing"
            outgoing.progress_at = now
            finish = m.FinishTransfer(outgoing.request_id, outgoing.attempt, outgoing.first_token)
            self._actions.append(AskDecode(finish))

    def _end(self, outgoing: Outgoing, error: CpkvError | None) -> None:
        name, attempt = outgoing.request_id, outgoing.attempt
        if error is None:
            del self._outgoing[name]
            self._actions += [EndRequest(name, None), FreePages(name)]
            return
        was_opened = outgoing.state != "waiting"
        outgoing.state = "closing"
        self._actions.append(EndRequest(name, error))
        for rank in sorted(outgoing.busy):
            self._actions.append(StopSending(rank, name, attempt))
        if was_opened:
            abort = m.AbortTransfer(name, attempt, str(error), writes_may_land=bool(outgoing.busy))
            outgoing.owed.append(abort)
            self._ask_owed(outgoing)
        self._actions.append(QuarantinePages(name) if outgoing.busy else FreePages(name))
        self._forget(outgoing)

    def _closed(self, outgoing: Outgoing) -> None:
        """A rank has drained: when it was the last, the pages are free here, and soon there."""
        if outgoing.busy:
            return
        self._actions.append(FreePages(outgoing.request_id))
        if not outgoing.lost:
            # Otherwise the pages there stay in quarantine until the decode worker closes its engine.
            drained = m.WritesDrained(outgoing.request_id, outgoing.attempt)
            outgoing.owed.append(drained)
            if outgoing.owed[0] is drained:
                self._ask_owed(outgoing)
        self._forget(outgoing)

    def _acknowledged(self, outgoing: Outgoing, message: Any) -> None:
        if outgoing.owed and outgoing.owed[0] == message:
            outgoing.owed.pop(0)
            self._ask_owed(outgoing)
        self._forget(outgoing)

    def _forget(self, outgoing: Outgoing) -> None:
        if outgoing.state == "closing" and not outgoing.busy and not outgoing.owed:
            self._outgoing.pop(outgoing.request_id, None)

    def _attempt(self, request_id: str, attempt: int) -> Outgoing | None:
        outgoing = self._outgoing.get(request_id)
        return outgoing if outgoing is not None and outgoing.attempt == attempt else None

    def _live(self, request_id: str) -> Outgoing | None:
        outgoing = self._outgoing.get(request_id)
        return outgoing if outgoing is not None and outgoing.state != "closing" else None
