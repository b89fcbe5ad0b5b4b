"""Which attempts are over: the first cause stands, late messages are told from current ones, memory is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import ProtocolError
from cpkv.protocol.attempts import MAX_CAUSE_CHARS, EndedAttempts
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")


def test_the_first_cause_stands_and_is_told() -> None:
    """Kinds 35 and 40."""
    ended = EndedAttempts()
    ended.end(3, "rank 2 could not send")
    ended.end(3, "it was aborted")
    assert ended.cause_of(3) == "rank 2 could not send"
    assert ended.cause_of(2) is None and ended.cause_of(4) is None
    ended.refuse("r1", 4)
    with pytest.raises(
        ProtocolError, match="^request r1: attempt 3 is over: rank 2 could not send; its messages are dropped$"
    ):
        ended.refuse("r1", 3)


def test_the_drawing_at_the_top_of_the_module_is_right() -> None:
    ended = EndedAttempts(remembered=3)
    for attempt in (39, 40, 43, 45):
        ended.end(attempt, "why")
    over = [attempt for attempt in range(38, 47) if ended.cause_of(attempt) is not None]
    assert over == [38, 39, 40, 43, 45]
    assert ended.cause_of(38) == ended.cause_of(39) == "it ended long ago"


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 6))
def test_what_has_ended_stays_over_and_what_is_above_stays_open(attempts: list[int], remembered: int) -> None:
    """Whatever was forgotten counts as over, and nothing above the highest that ended does."""
    ended = EndedAttempts(remembered)
    for attempt in attempts:
        ended.end(attempt, "why")
    assert all(ended.cause_of(attempt) is not None for attempt in attempts)
    assert ended.cause_of(max(attempts, default=0) + 1) is None
    if len(set(attempts)) <= remembered:
        assert all(ended.cause_of(attempt) is None for attempt in set(range(1, 41)) - set(attempts))


def test_a_peer_cannot_fill_the_memory_with_causes() -> None:
    ended = EndedAttempts()
    ended.end(1, "x" * 100_000)
    cause = ended.cause_of(1)
    assert cause is not None and len(cause) == MAX_CAUSE_CHARS
