"""Arrivals against a set: every position once, from its sender; all of a report or nothing; each report once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import ProtocolError, TransferError
from cpkv.protocol.arrivals import Arrivals
from cpkv.protocol.messages import PagesSent, PagesTaken
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

SENDERS = (2, 0, 1, 2, 0)
ALL = (0, 1, 2, 3, 4)
Report = tuple[int, list[int]]
"""rank, positions"""


def report_of(rank: int, positions: list[int], number: int = 0, digests: tuple[str, ...] = ()) -> PagesSent:
    return PagesSent("r9", 1, rank, number, tuple(positions), digests)


def is_wrong(report: Report, senders: list[int], wanted: set[int], arrived: set[int]) -> bool:
    """Whether a report must be refused, by the rule."""
    rank, positions = report
    return len(positions) != len(set(positions)) or any(
        not 0 <= at < len(senders) or senders[at] != rank or at not in wanted or at in arrived for at in positions
    )


@st.composite
def senders_and_reports(draw: st.DrawFn) -> tuple[list[int], set[int], list[Report]]:
    """Mostly right reports, so that some requests complete, and any kind of wrong one between them."""
    senders = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    wanted = set(range(len(senders))) - draw(st.sets(st.integers(0, 7), max_size=2))
    right = [(rank, [at for at in sorted(wanted) if senders[at] == rank]) for rank in draw(st.permutations(range(4)))]
    wrong = st.tuples(st.integers(-1, 4), st.lists(st.integers(-2, len(senders)), max_size=4))
    again = st.sampled_from(right)
    reports = [*right, *draw(st.lists(again, max_size=3)), *draw(st.lists(wrong, max_size=6))]
    return senders, wanted, draw(st.permutations(reports))


@given(senders_and_reports())
def test_any_sequence_of_reports_agrees_with_a_set(case: tuple[list[int], set[int], list[Report]]) -> None:
    """Kinds 11, 30 and 33: each position once, and what was there before not at all."""
    senders, wanted, reports = case
    arrivals = Arrivals("r9", senders, sorted(wanted))
    arrived: set[int] = set()
    for number, report in enumerate(reports):
        rank, positions = report
        message = report_of(rank, positions, number)
        if is_wrong(report, senders, wanted, arrived):
            with pytest.raises(ProtocolError):
                arrivals.take(message, ())
        else:
            assert arrivals.take(message, ()) == PagesTaken("r9", 1, number)
            arrived |= set(positions)
            assert arrivals.take(message, ()) == PagesTaken("r9", 1, number), "a report that comes again"
        missing = tuple(sorted(wanted - arrived))
        assert arrivals.missing == missing
        if missing:
            with pytest.raises(ProtocolError, match=f"{len(missing)} of {len(wanted)} pages never arrived"):
                arrivals.check_complete()
        else:
            arrivals.check_complete()


@pytest.mark.parametrize(
    ("rank", "positions", "says"),
    [
        (2, [0, 3], "page position 0 was sent twice"),
        (1, [2, 2], "rank 1 names a page position twice in one message"),
        (0, [1, 2], "page position 2 belongs to rank 1 and came from rank 0"),
        (0, [1, 5], "rank 0 sent page position 5 of 5"),
        (0, [-1, 1], "rank 0 sent page position -1 of 5"),
        (0, [1, 4], "page position 4 was there before it was sent"),
    ],
    ids=["duplicate", "duplicate inside", "wrong sender", "too far", "no page", "not wanted"],
)
def test_a_refused_report_names_its_fault_and_leaves_no_trace(rank: int, positions: list[int], says: str) -> None:
    """Kinds 9 and 30: the right positions of a refused report do not count either."""
    arrivals = Arrivals("r9", SENDERS, (0, 1, 2, 3))
    arrivals.take(report_of(2, [0], 0), ())
    with pytest.raises(ProtocolError, match=f"^request r9: {says}$"):
        arrivals.take(report_of(rank, positions, 1), ())
    assert arrivals.missing == (1, 2, 3)
    arrivals.take(report_of(2, [3], 2), ())
    arrivals.take(report_of(0, [1], 3), ())
    arrivals.take(report_of(1, [2], 4), ())
    arrivals.check_complete()
    assert repr(arrivals) == "Arrivals(r9, 4/4)"


def test_a_start_with_missing_pages_is_refused_with_the_first_one_and_its_sender() -> None:
    arrivals = Arrivals("r9", SENDERS, ALL)
    arrivals.take(report_of(2, [0]), ())
    with pytest.raises(
        ProtocolError, match="request r9: 4 of 5 pages never arrived, the first is position 1 of rank 0"
    ):
        arrivals.check_complete()


def test_a_report_that_comes_again_counts_once_and_has_one_meaning() -> None:
    """Kinds 30 and 35: after a reconnection the same report may come again."""
    arrivals = Arrivals("r9", SENDERS, ALL)
    answer = arrivals.take(report_of(2, [0], 7), ())
    assert arrivals.take(report_of(2, [0], 7), ()) == answer
    with pytest.raises(ProtocolError, match="request r9: rank 2 gave report 7 two meanings"):
        arrivals.take(report_of(2, [3], 7), ())
    arrivals.take(report_of(0, [1], 7), ())
    assert arrivals.missing == (2, 3, 4), "each rank counts its own reports"


def test_a_damaged_page_is_asked_for_once_more_and_then_refused_with_both_digests() -> None:
    arrivals = Arrivals("r9", SENDERS, ALL)
    first = report_of(0, [1, 4], 0, ("aa", "bb"))
    assert arrivals.take(first, ("aa", "xx")).damaged == (4,)
    assert arrivals.missing == (0, 2, 3, 4)
    assert arrivals.take(first, ("aa", "bb")).damaged == (4,), "what was answered stays answered"
    with pytest.raises(
        TransferError, match="request r9: page position 4 of rank 0 left with digest bb and arrived with yy, twice"
    ):
        arrivals.take(report_of(0, [4], 1, ("bb",)), ("yy",))
    assert arrivals.missing == (0, 2, 3, 4)
    assert arrivals.take(report_of(0, [4], 2, ("bb",)), ("bb",)).damaged == ()


def test_digests_for_some_of_the_pages_only_are_refused() -> None:
    arrivals = Arrivals("r9", SENDERS, ALL)
    with pytest.raises(ProtocolError, match="rank 0 gives 1 digests for 2 pages"):
        arrivals.take(report_of(0, [1, 4], 0, ("aa",)), ("aa", "bb"))


def test_a_rank_that_owns_nothing_may_say_so() -> None:
    """Kind 21."""
    arrivals = Arrivals("r9", SENDERS, ALL)
    arrivals.take(report_of(3, []), ())
    assert arrivals.missing == ALL
