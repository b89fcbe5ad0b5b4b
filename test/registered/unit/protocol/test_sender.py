"""The prefill side of transfers, by plain examples: what the scheduler is told to do, and when pages are free."""

from __future__ import annotations

from typing import Any

import pytest

from cpkv.errors import BusyError, CapacityError, CpkvError, ProtocolError, TransferError, WorkerDiedError
from cpkv.protocol import messages as m
from cpkv.protocol.sender import (
    AskDecode,
    EndRequest,
    FreePages,
    QuarantinePages,
    SendPositions,
    StopSending,
    TransferSender,
)
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")

TARGETS = (m.TransferTarget("decode-1", (m.MemoryRegion(0, 64), m.MemoryRegion(64, 64))),)
SENDERS = (0, 1, 0)
GONE = TransferError("the client has gone")
BROKE = TransferError("the connection broke")


class Scheduler:
    """A sender with the clock and the questions that it asked."""

    def __init__(self) -> None:
        self.sender = TransferSender(wait_s=10.0, progress_s=3.0, retry_s=0.5)
        self.now = 0.0

    def actions(self) -> list[Any]:
        return list(self.sender.take_actions())

    def begin(self, name: str = "a") -> m.OpenTransfer:
        self.sender.begin(m.OpenTransfer(name, 0, 5, 2, SENDERS, m.Sampling()), self.now)
        (action,) = self.actions()
        assert isinstance(action, AskDecode) and isinstance(action.message, m.OpenTransfer)
        return action.message

    def answer(self, message: Any, answer: Any = m.Done()) -> list[Any]:  # noqa: B008
        self.sender.answered(message, answer, self.now)
        return self.actions()

    def open(self, name: str = "a", positions: tuple[int, ...] = (0, 1, 2)) -> m.OpenTransfer:
        announcement = self.begin(name)
        assert self.answer(announcement, opened(announcement, positions)) == []
        return announcement

    def taken(self, rank: int, attempt: int, positions: tuple[int, ...], name: str = "a") -> list[Any]:
        self.sender.taken(rank, name, attempt, positions, self.now)
        return self.actions()

    def drained(self, rank: int, attempt: int, *, may_land: bool = False, name: str = "a") -> list[Any]:
        self.sender.drained(rank, name, attempt, writes_may_land=may_land)
        return self.actions()

    def cancel(self, name: str = "a", error: CpkvError = GONE) -> list[Any]:
        self.sender.cancel(name, error)
        return self.actions()

    def sending(self) -> int:
        """A request of which both ranks send; its attempt."""
        attempt = self.open().attempt
        self.sender.sampled("a", 7, self.now)
        assert self.actions() == [SendPositions(0, "a", attempt, (0, 2)), SendPositions(1, "a", attempt, (1,))]
        return attempt


def opened(announcement: m.OpenTransfer, positions: tuple[int, ...] = (0, 1, 2)) -> m.TransferOpened:
    pages = tuple(range(5, 5 + len(positions)))
    return m.TransferOpened(announcement.request_id, announcement.attempt, positions, pages, TARGETS)


def aborted(attempt: int, *, may_land: bool, error: CpkvError = GONE, name: str = "a") -> m.AbortTransfer:
    return m.AbortTransfer(name, attempt, str(error), may_land)


def test_chunks_are_sent_once_they_are_computed_and_each_position_once() -> None:
    """Kinds 11 and 29: no page before the forward pass that wrote it has ended, the tail once, at the end."""
    scheduler = Scheduler()
    announcement = scheduler.begin()
    scheduler.sender.computed("a", 1, scheduler.now)
    assert scheduler.actions() == [], "the decode worker has named no pages"
    assert scheduler.answer(announcement, opened(announcement)) == [SendPositions(0, "a", 1, (0,))]
    scheduler.sender.computed("a", 2, scheduler.now)
    assert scheduler.actions() == [SendPositions(1, "a", 1, (1,))]
    scheduler.sender.computed("a", 2, scheduler.now)
    assert scheduler.actions() == []
    scheduler.sender.sampled("a", 7, scheduler.now)
    assert scheduler.actions() == [SendPositions(0, "a", 1, (2,))]
    assert scheduler.taken(0, 1, (0,)) == scheduler.taken(1, 1, (1,)) == []
    finish = m.FinishTransfer("a", 1, 7)
    assert scheduler.taken(0, 1, (2,)) == [AskDecode(finish)]
    assert scheduler.answer(finish, m.TransferComplete("a", 1)) == [EndRequest("a", None), FreePages("a")]
    assert scheduler.sender.open_requests == scheduler.sender.closing_requests == ()


def test_nothing_is_finished_before_the_first_token_is_known() -> None:
    scheduler = Scheduler()
    scheduler.open()
    scheduler.sender.computed("a", 3, scheduler.now)
    scheduler.actions()
    assert scheduler.taken(0, 1, (0, 2)) + scheduler.taken(1, 1, (1,)) == []
    scheduler.sender.sampled("a", 7, scheduler.now)
    assert scheduler.actions() == [AskDecode(m.FinishTransfer("a", 1, 7))]


def test_what_the_decode_worker_has_is_not_sent() -> None:
    """Kind 17: by explicit position on both sides; a request that is there as a whole is finished at once."""
    scheduler = Scheduler()
    scheduler.open(positions=(1,))
    scheduler.sender.sampled("a", 7, scheduler.now)
    assert scheduler.actions() == [SendPositions(1, "a", 1, (1,))]
    assert scheduler.taken(1, 1, (1,)) == [AskDecode(m.FinishTransfer("a", 1, 7))]
    scheduler.open("b", positions=())
    scheduler.sender.sampled("b", 8, scheduler.now)
    assert scheduler.actions() == [AskDecode(m.FinishTransfer("b", 2, 8))]


def test_pages_are_free_here_and_there_only_once_every_rank_has_drained() -> None:
    """Kind 28."""
    scheduler = Scheduler()
    attempt = scheduler.sending()
    abort = aborted(attempt, may_land=True)
    assert scheduler.cancel() == [
        EndRequest("a", GONE),
        StopSending(0, "a", attempt),
        StopSending(1, "a", attempt),
        AskDecode(abort),
        QuarantinePages("a"),
    ]
    assert scheduler.taken(1, attempt, (1,)) == [], "what arrives now is late"
    assert scheduler.drained(0, attempt) == scheduler.drained(0, attempt) == []
    assert scheduler.drained(1, attempt) == [FreePages("a")]
    assert scheduler.answer(abort) == [AskDecode(m.WritesDrained("a", attempt))], "in this order"
    assert scheduler.sender.closing_requests == ("a",)
    assert scheduler.answer(m.WritesDrained("a", attempt)) == []
    assert scheduler.sender.closing_requests == ()


def test_a_rank_whose_pages_have_all_arrived_is_not_waited_for() -> None:
    scheduler = Scheduler()
    attempt = scheduler.sending()
    scheduler.taken(1, attempt, (1,))
    scheduler.taken(0, attempt, (0,))
    abort = aborted(attempt, may_land=True)
    assert scheduler.cancel()[1:] == [StopSending(0, "a", attempt), AskDecode(abort), QuarantinePages("a")]
    assert scheduler.drained(0, attempt) == [FreePages("a")]


def test_a_request_of_which_nothing_is_under_way_is_free_at_once_and_decode_is_told_so() -> None:
    scheduler = Scheduler()
    attempt = scheduler.sending()
    scheduler.taken(0, attempt, (0, 2))
    scheduler.taken(1, attempt, (1,))
    abort = aborted(attempt, may_land=False)
    assert scheduler.cancel() == [EndRequest("a", GONE), AskDecode(abort), FreePages("a")]
    assert scheduler.answer(m.FinishTransfer("a", attempt, 7), m.TransferComplete("a", attempt)) == [], "late"
    assert scheduler.answer(abort) == [] and scheduler.sender.closing_requests == ()


def test_after_a_failed_write_the_decode_side_is_never_told_that_all_have_drained() -> None:
    """Kind 28: "failed" is no fence at the peer, so its pages stay in quarantine until its engine is closed."""
    scheduler = Scheduler()
    attempt = scheduler.sending()
    scheduler.sender.rank_failed(0, "a", attempt, BROKE)
    scheduler.actions()
    assert scheduler.drained(0, attempt, may_land=True) == []
    assert scheduler.drained(0, attempt) == [], "the first word of a rank stands"
    assert scheduler.drained(1, attempt) == [FreePages("a")]
    assert scheduler.answer(aborted(attempt, may_land=True, error=BROKE)) == []
    assert scheduler.sender.closing_requests == ()


@pytest.mark.parametrize("is_closing", [False, True])
def test_a_dead_rank_reads_nothing_and_what_it_sent_may_land(is_closing: bool) -> None:
    """Kinds 28 and 40: the first cause is told."""
    scheduler = Scheduler()
    attempt = scheduler.sending()
    died = WorkerDiedError("rank 0 died")
    first = scheduler.cancel() if is_closing else []
    scheduler.sender.rank_lost(0, died)
    first += scheduler.actions()
    assert [action for action in first if isinstance(action, EndRequest)] == [
        EndRequest("a", GONE if is_closing else died)
    ]
    assert FreePages("a") not in first
    assert scheduler.drained(1, attempt) == [FreePages("a")]
    assert scheduler.answer(aborted(attempt, may_land=True, error=GONE if is_closing else died)) == []
    assert scheduler.sender.closing_requests == ()


def test_a_broken_connection_ends_every_request_and_what_is_owed_is_said_again() -> None:
    """Kind 28: the decode worker must learn of every attempt that was given up, however often the connection breaks."""
    scheduler = Scheduler()
    attempt = scheduler.sending()
    scheduler.sender.begin(m.OpenTransfer("b", 0, 5, 2, SENDERS, m.Sampling()), scheduler.now)
    scheduler.sender.decode_lost(BROKE)
    assert [action for action in scheduler.actions() if isinstance(action, EndRequest | AskDecode)] == [
        EndRequest("a", BROKE),
        EndRequest("b", BROKE),
    ]
    scheduler.drained(0, attempt)
    assert scheduler.drained(1, attempt) == [FreePages("a")]
    scheduler.sender.decode_back()
    abort, abort_b = aborted(attempt, may_land=True, error=BROKE), aborted(2, may_land=False, error=BROKE, name="b")
    assert scheduler.actions() == [AskDecode(abort), AskDecode(abort_b)]
    scheduler.sender.decode_lost(BROKE)
    scheduler.sender.decode_lost(BROKE)
    assert scheduler.actions() == []
    announcement = scheduler.begin("c")
    assert scheduler.answer(announcement, opened(announcement)) == [AskDecode(abort), AskDecode(abort_b)], "it is back"
    assert scheduler.answer(abort) == [AskDecode(m.WritesDrained("a", attempt))]
    scheduler.sender.refused(abort_b, ProtocolError("never heard of it"), scheduler.now)
    assert scheduler.answer(m.WritesDrained("a", attempt)) == []
    assert scheduler.sender.closing_requests == ()


def test_without_pages_it_is_asked_again_as_a_new_attempt_for_a_while() -> None:
    """Kind 35: the answer to the earlier attempt is dropped."""
    scheduler = Scheduler()
    first = scheduler.begin()
    scheduler.sender.refused(first, BusyError("no pages"), scheduler.now)
    scheduler.sender.sampled("a", 7, scheduler.now)
    scheduler.now = 0.4
    scheduler.sender.tick(scheduler.now)
    assert scheduler.actions() == []
    scheduler.now = 0.6
    scheduler.sender.tick(scheduler.now)
    (again,) = scheduler.actions()
    assert again.message.attempt == 2
    assert scheduler.answer(first, opened(first)) == []
    assert scheduler.answer(again.message, opened(again.message)) == [
        SendPositions(0, "a", 2, (0, 2)),
        SendPositions(1, "a", 2, (1,)),
    ]


def test_waiting_for_pages_ends_in_time_and_what_never_fits_does_not_wait() -> None:
    scheduler = Scheduler()
    first = scheduler.begin()
    scheduler.sender.refused(first, BusyError("no pages"), scheduler.now)
    assert scheduler.cancel() == [EndRequest("a", GONE), FreePages("a")]
    second = scheduler.begin()
    busy = BusyError("no pages")
    scheduler.now = 10.1
    scheduler.sender.refused(second, busy, scheduler.now)
    assert EndRequest("a", busy) in scheduler.actions()
    never = CapacityError("it needs 40 pages of 10")
    scheduler.sender.refused(scheduler.begin("b"), never, scheduler.now)
    assert scheduler.actions()[0] == EndRequest("b", never)


@pytest.mark.parametrize(
    "answer",
    [
        m.Done(),
        m.TransferOpened("a", 2, (0, 1, 2), (5, 6, 7), TARGETS),
        m.TransferOpened("b", 1, (0, 1, 2), (5, 6, 7), TARGETS),
        m.TransferOpened("a", 1, (0, 2, 1), (5, 6, 7), TARGETS),
        m.TransferOpened("a", 1, (0, 1, 1), (5, 6, 7), TARGETS),
        m.TransferOpened("a", 1, (0, 1, 3), (5, 6, 7), TARGETS),
        m.TransferOpened("a", 1, (-1, 0, 1), (5, 6, 7), TARGETS),
        m.TransferOpened("a", 1, (0, 1, 2), (5, 6), TARGETS),
        m.TransferOpened("a", 1, (0, 1, 2), (5, 6, 5), TARGETS),
        m.TransferOpened("a", 1, (0, 1, 2), (5, 6, -7), TARGETS),
        m.TransferOpened("a", 1, (0, 1, 2), (5, 6, 7), ()),
    ],
)
def test_an_answer_that_opens_something_else_ends_the_request(answer: Any) -> None:
    """Kinds 9, 12, 33 and 35: two positions of one page, and page -1, among them."""
    scheduler = Scheduler()
    (ended, ask, freed) = scheduler.answer(scheduler.begin(), answer)
    assert isinstance(ended.error, ProtocolError) and "the decode worker opened something else" in str(ended.error)
    assert ask.message.writes_may_land is False and freed == FreePages("a")


def test_a_completion_of_something_else_ends_the_request() -> None:
    scheduler = Scheduler()
    attempt = scheduler.sending()
    scheduler.taken(0, attempt, (0, 2))
    scheduler.taken(1, attempt, (1,))
    (ended, *_) = scheduler.answer(m.FinishTransfer("a", attempt, 7), m.TransferComplete("a", attempt + 1))
    assert "completed something else" in str(ended.error)


def test_news_and_answers_of_an_earlier_attempt_change_nothing() -> None:
    """Kind 35."""
    scheduler = Scheduler()
    first = scheduler.open()
    abort = aborted(1, may_land=False)
    scheduler.cancel()
    scheduler.answer(abort)
    attempt = scheduler.sending()
    assert attempt == 2
    assert scheduler.taken(0, 1, (0, 2)) == scheduler.taken(1, 1, (1,)) == []
    scheduler.sender.rank_failed(0, "a", 1, BROKE)
    assert scheduler.answer(first, opened(first)) == scheduler.answer(abort) == []
    assert scheduler.answer(m.FinishTransfer("a", 1, 7), m.TransferComplete("a", 1)) == []
    scheduler.sender.refused(first, BROKE, scheduler.now)
    assert scheduler.sender.open_requests == ("a",)
    scheduler.cancel()
    assert scheduler.drained(0, 1) == scheduler.drained(1, 1) == []
    scheduler.drained(0, 2)
    assert scheduler.drained(1, 2) == [FreePages("a")]


def test_an_id_is_free_once_everything_of_it_is_cleaned_up() -> None:
    scheduler = Scheduler()
    scheduler.open()
    with pytest.raises(ProtocolError, match="request a is sending; use an id once"):
        scheduler.begin()
    scheduler.cancel()
    with pytest.raises(ProtocolError, match="request a is closing; use an id once"):
        scheduler.begin()
    scheduler.answer(aborted(1, may_land=False))
    assert scheduler.begin().attempt == 2


def test_each_request_is_ended_and_freed_once_whatever_comes_after() -> None:
    """Kind 30."""
    scheduler = Scheduler()
    attempt = scheduler.sending()
    actions = scheduler.cancel()
    for error in (GONE, BROKE):
        scheduler.sender.rank_failed(1, "a", attempt, error)
        actions += scheduler.cancel("a", error)
    scheduler.sender.rank_lost(0, BROKE)
    scheduler.sender.rank_lost(1, BROKE)
    scheduler.sender.rank_lost(1, BROKE)
    scheduler.sender.decode_lost(BROKE)
    actions += scheduler.actions()
    actions += scheduler.drained(0, attempt) + scheduler.drained(1, attempt)
    assert actions.count(FreePages("a")) == 1
    assert sum(isinstance(action, EndRequest) for action in actions) == 1


def test_what_does_not_move_on_is_given_up_with_the_ranks_that_are_late() -> None:
    """Kind 40: a bounded time to an error that names what is missing."""
    scheduler = Scheduler()
    attempt = scheduler.sending()
    scheduler.now = 2.0
    scheduler.taken(1, attempt, (1,))
    scheduler.now = 4.9
    scheduler.sender.tick(scheduler.now)
    assert scheduler.actions() == []
    scheduler.now = 5.1
    scheduler.sender.tick(scheduler.now)
    (ended, *_) = scheduler.actions()
    assert str(ended.error) == "request a: 2 pages of ranks [0] did not come within 3 s"


def test_new_chunks_do_not_excuse_pages_that_do_not_come() -> None:
    scheduler = Scheduler()
    scheduler.open()
    for positions in (1, 2, 3):
        scheduler.sender.computed("a", positions, scheduler.now)
        scheduler.now += 1.1
    scheduler.actions()
    scheduler.sender.tick(scheduler.now)
    (ended, *_) = scheduler.actions()
    assert "3 pages of ranks [0, 1] did not come" in str(ended.error)


def test_between_chunks_nothing_is_late_and_the_time_of_a_chunk_begins_when_it_is_sent() -> None:
    scheduler = Scheduler()
    scheduler.open()
    scheduler.sender.computed("a", 1, scheduler.now)
    scheduler.actions()
    scheduler.taken(0, 1, (0,))
    scheduler.now = 100.0
    scheduler.sender.tick(scheduler.now)
    scheduler.sender.computed("a", 2, scheduler.now)
    scheduler.sender.tick(scheduler.now)
    assert scheduler.actions() == [SendPositions(1, "a", 1, (1,))]


@pytest.mark.parametrize("state", ["opening", "finishing"])
def test_an_answer_that_does_not_come_ends_the_request(state: str) -> None:
    scheduler = Scheduler()
    if state == "opening":
        scheduler.begin()
        scheduler.now = 2.0
        scheduler.sender.computed("a", 1, scheduler.now)
    else:
        attempt = scheduler.sending()
        scheduler.taken(0, attempt, (0, 2))
        scheduler.taken(1, attempt, (1,))
    scheduler.now = 3.1
    scheduler.sender.tick(scheduler.now)
    (ended, *_) = scheduler.actions()
    assert f"the answer of the decode worker while {state} did not come within 3 s" in str(ended.error)
