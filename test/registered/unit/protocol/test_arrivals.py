"""Arrivals against a set: every position once, from its sender, in this attempt; all of a message or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import ProtocolError
from cpkv.protocol.arrivals import Arrivals
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

SENDERS = (2, 0, 1, 2, 0)
Message = tuple[int, int, list[int]]
"""attempt, rank, positions"""


def fault_of(message: Message, senders: list[int], arrived: set[int]) -> bool:
    """Whether a message must be refused, by the rule."""
    attempt, rank, positions = message
    return (
        attempt != 1
        or len(positions) != len(set(positions))
        or any(not 0 <= at < len(senders) or senders[at] != rank or at in arrived for at in positions)
    )


@st.composite
def senders_and_messages(draw: st.DrawFn) -> tuple[list[int], list[Message]]:
    """Mostly right messages, so that some requests complete, and any kind of wrong one between them."""
    senders = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    right = [
        (1, rank, [at for at in range(len(senders)) if senders[at] == rank]) for rank in draw(st.permutations(range(4)))
    ]
    wrong = st.tuples(
        st.sampled_from([1, 1, 1, 0, 2]), st.integers(-1, 4), st.lists(st.integers(-2, len(senders)), max_size=4)
    )
    again = st.sampled_from(right)
    messages = [*right, *draw(st.lists(again, max_size=3)), *draw(st.lists(wrong, max_size=6))]
    return senders, draw(st.permutations(messages))


@given(senders_and_messages())
def test_any_sequence_of_messages_agrees_with_a_set(case: tuple[list[int], list[Message]]) -> None:
    """Kinds 11, 33 and 35."""
    senders, messages = case
    arrivals = Arrivals("r", 1, senders)
    arrived: set[int] = set()
    for message in messages:
        if fault_of(message, senders, arrived):
            with pytest.raises(ProtocolError):
                arrivals.record(*message)
        else:
            arrivals.record(*message)
            arrived |= set(message[2])
        missing = tuple(at for at in range(len(senders)) if at not in arrived)
        assert arrivals.missing == missing
        if missing:
            with pytest.raises(ProtocolError, match=f"{len(missing)} of {len(senders)} pages never arrived"):
                arrivals.check_complete(1)
        else:
            arrivals.check_complete(1)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ((1, 2, [0, 3]), "page position 0 was sent twice"),
        ((1, 1, [2, 2]), "rank 1 names a page position twice in one message"),
        ((1, 0, [1, 2]), "page position 2 belongs to rank 1 and came from rank 0"),
        ((1, 0, [1, 5]), "rank 0 sent page position 5 of 5"),
        ((1, 0, [-1, 1]), "rank 0 sent page position -1 of 5"),
        ((0, 0, [1, 4]), "a message of attempt 0 came during attempt 1; dropped"),
        ((2, 0, [1, 4]), "a message of attempt 2 came during attempt 1; dropped"),
    ],
    ids=["duplicate", "duplicate inside", "wrong sender", "too far", "no page", "earlier attempt", "later attempt"],
)
def test_a_refused_message_names_its_fault_and_leaves_no_trace(message: Message, says: str) -> None:
    """Kinds 9 and 35: the right positions of a refused message do not count either."""
    arrivals = Arrivals("r9", 1, SENDERS)
    arrivals.record(1, 2, [0])
    with pytest.raises(ProtocolError, match=f"^request r9: {says}$"):
        arrivals.record(*message)
    assert arrivals.missing == (1, 2, 3, 4)
    arrivals.record(1, 2, [3])
    arrivals.record(1, 0, [4, 1])
    arrivals.record(1, 1, [2])
    arrivals.check_complete(1)
    assert repr(arrivals) == "Arrivals(r9, attempt 1, 5/5)"


def test_a_start_with_missing_pages_is_refused_with_the_first_one_and_its_sender() -> None:
    arrivals = Arrivals("r9", 1, SENDERS)
    arrivals.record(1, 2, [0])
    with pytest.raises(
        ProtocolError, match="request r9: 4 of 5 pages never arrived, the first is position 1 of rank 0"
    ):
        arrivals.check_complete(1)


def test_a_late_finish_of_another_attempt_does_not_start_this_one() -> None:
    """Kind 35."""
    arrivals = Arrivals("r9", 3, (0,))
    arrivals.record(3, 0, [0])
    with pytest.raises(ProtocolError, match="a message of attempt 2 came during attempt 3"):
        arrivals.check_complete(2)


def test_a_rank_that_owns_nothing_may_say_so() -> None:
    """Kind 21."""
    arrivals = Arrivals("r9", 1, SENDERS)
    arrivals.record(1, 3, [])
    assert arrivals.missing == (0, 1, 2, 3, 4)
