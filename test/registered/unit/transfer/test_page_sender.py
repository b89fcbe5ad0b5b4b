"""One rank's sending, step by step: what leaves, what is told, and when nothing leaves any more."""

from __future__ import annotations

from collections import Counter

import pytest
from page_sender_bench import PAGES, TARGET_BASE, Bench, Engine, Link, target_of

from cpkv.errors import ProtocolError, TransferError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.transfer_map import PageMove, page_moves, sender_of_positions
from cpkv.protocol.messages import MemoryRegion, PagesSent, PagesTaken, TransferTarget
from cpkv.testing.hostile_fabric import UNIT, PageMemory, page_content
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.backend import Region
from cpkv.transfer.page_sender import DrainedNews, FailedNews, PageSender, SendOrder, TakenNews

register_cpu_ci(est_time=1, suite="unit")


def test_pages_are_taken_once_their_bytes_are_there() -> None:
    """Kinds 28 and 31: no report before the engine says that all is done, no news before the answer."""
    bench = Bench()
    bench.order((0, 2))
    assert bench.step() == () and bench.link.reports == []
    bench.engine.end(count=3)
    assert bench.step() == () and bench.link.reports == []
    bench.engine.end()
    assert bench.step() == ()
    assert bench.link.reports == [PagesSent("a", 1, 1, 0, (0, 2))]
    bench.link.answer(bench.link.reports[0])
    assert bench.step() == (TakenNews("a", 1, (0, 2), 2 * 2 * UNIT),)
    assert not bench.sender.busy and bench.step() == ()


@pytest.mark.parametrize("pages", [1, 2, 7])
def test_there_is_one_descriptor_for_each_page_and_pool(pages: int) -> None:
    """Kind 38: never one for each layer; neighbours on both sides are one."""
    bench = Bench()
    bench.order(tuple(range(pages)))
    assert len(bench.engine.runs) == 2 * pages
    assert {run.length for _, run in bench.engine.runs} == {UNIT}
    moves = tuple(PageMove(position, 3 + position, 0, 5 + position) for position in range(pages))
    bench.sender.order(SendOrder("b", 2, moves, bench.targets))
    assert [run.length for _, run in bench.engine.runs[2 * pages :]] == [pages * UNIT] * 2


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("owners", [1, 3])
def test_every_destination_gets_the_bytes_of_each_of_its_pages_once(replicated: bool, owners: int) -> None:
    """Kinds 30, 34 and 37: four ranks together send what is there once, also where each of them holds all of it."""
    ranks, count = 4, 11
    placement, target_placement = PagePlacement(2, 1 if replicated else ranks), PagePlacement(2, owners)
    pages = tuple(range(4, 4 + count)) if replicated else tuple(range(8, 8 + count))
    target_pages = tuple(range(owners, owners + count))
    senders = sender_of_positions(pages, placement, ranks)
    targets = tuple(target_of(owner) for owner in range(owners))
    written: Counter[tuple[str, int]] = Counter()
    for rank in range(ranks):
        engine = Engine()
        sender = PageSender(rank, engine, PageMemory(1 << 20, PAGES), Link)
        mine = [position for position in range(count) if senders[position] == rank]
        moves = page_moves(
            mine,
            [pages[position] for position in mine],
            [target_pages[position] for position in mine],
            placement,
            target_placement,
            rank,
        )
        sender.order(SendOrder("a", 1, moves, targets))
        for _ in range(2 * owners):
            engine.end()
            sender.step()
        for session_id, run in engine.runs:
            written.update((session_id, address) for address in range(run.target, run.target + run.length))
    assert set(written.values()) == {1}
    wanted = Counter(f"decode-{target_placement.owner(page)}" for page in target_pages)
    got = Counter(session_id for session_id, _ in written)
    assert got == {session_id: pages * 2 * UNIT for session_id, pages in wanted.items()}


def test_a_long_order_is_reported_part_by_part_and_stopped_after_what_is_at_the_engine() -> None:
    """Kind 28: what is at the engine ends by itself, so that nothing of it can land later; the rest never leaves."""
    bench = Bench(part_pages=2)
    bench.order((0, 1, 2, 3, 4, 5, 6))
    assert len(bench.engine.runs) == 8, "two parts"
    bench.engine.end(count=4)
    bench.step()
    assert bench.link.reports == [PagesSent("a", 1, 1, 0, (0, 1))]
    assert len(bench.engine.runs) == 12
    bench.sender.stop("a", 1)
    assert bench.step() == ()
    bench.engine.end()
    assert bench.step() == (DrainedNews("a", 1, False),)
    assert len(bench.engine.runs) == 12 and not bench.sender.busy
    bench.link.answer(bench.link.reports[0])
    assert bench.step() == (), "an answer that comes after is dropped"


def test_a_stop_of_which_nothing_is_under_way_is_answered() -> None:
    bench = Bench()
    bench.sender.stop("a", 1)
    assert bench.step() == (DrainedNews("a", 1, False),)
    bench.sender.stop("a", 1)
    assert bench.step() == (DrainedNews("a", 1, False),)


def test_a_failed_write_fails_the_attempt_and_says_that_writes_may_land() -> None:
    """Kinds 28 and 40: drained only once the other writes have ended, and the cause and the rank are named."""
    bench = Bench(part_pages=1)
    bench.order((0, 1, 2))
    bench.engine.end("failed", count=2)
    (failed,) = bench.step()
    assert isinstance(failed, FailedNews)
    assert str(failed.error).startswith("rank 1 could not send 1 pages of request a: the peer is gone")
    assert bench.step() == () and bench.sender.busy
    bench.engine.end()
    assert bench.step() == (DrainedNews("a", 1, True),)
    assert len(bench.engine.runs) == 4, "the third page has not left"


def test_a_write_that_fails_after_the_stop_may_land_too() -> None:
    """Kind 28."""
    bench = Bench()
    bench.order((0,))
    bench.sender.stop("a", 1)
    bench.engine.end("failed")
    assert bench.step() == (DrainedNews("a", 1, True),)


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_nothing_leaves_after_drained(how: str) -> None:
    """Kinds 28 and 35: the next chunk's order was on its way when the attempt ended."""
    bench = Bench()
    bench.order((0,))
    if how == "stopped":
        bench.sender.stop("a", 1)
    bench.engine.end("done" if how == "stopped" else "failed")
    assert isinstance(bench.step()[-1], DrainedNews)
    bench.order((1, 2))
    (late,) = bench.step()
    assert isinstance(late, FailedNews) and "rank 1 sends no more of request a" in str(late.error)
    assert len(bench.engine.runs) == 2 and not bench.sender.busy
    bench.order((1, 2), attempt=2)
    assert len(bench.engine.runs) == 6, "the next attempt of that request is another matter"


def test_an_order_between_stop_and_drained_changes_nothing() -> None:
    bench = Bench()
    bench.order((0,))
    bench.sender.stop("a", 1)
    bench.order((1,))
    assert bench.step() == () and len(bench.engine.runs) == 2
    bench.engine.end()
    assert bench.step() == (DrainedNews("a", 1, False),)


def test_other_requests_go_on_when_one_fails() -> None:
    bench = Bench()
    bench.order((0,))
    bench.order((1,), attempt=2, name="b")
    bench.engine.end("failed", count=2)
    bench.step()
    assert bench.landed() == (TakenNews("b", 2, (1,), 2 * UNIT),)


def test_digests_are_those_of_the_bytes_that_left() -> None:
    """Taken before the bytes leave: one that is taken later would agree with whatever the page holds by then."""
    bench = Bench(digests=True)
    for position in (0, 1):
        bench.memory.write(2 * position + 1, page_content(1, position, 0), page_content(1, position, 1))
    wanted = tuple(bench.memory.page_digest(page) for page in (1, 3))
    bench.order((0, 1))
    bench.memory.write(1, bytes(UNIT), bytes(UNIT))
    bench.engine.end()
    bench.step()
    assert bench.link.reports[0].digests == wanted


def test_damaged_pages_are_sent_once_more_under_another_report() -> None:
    bench = Bench()
    bench.order((0, 1, 2))
    bench.engine.end()
    bench.step()
    bench.link.answer(bench.link.reports[0], damaged=(1,))
    assert bench.step() == (TakenNews("a", 1, (0, 2), 2 * 2 * UNIT),)
    assert [run.source for _, run in bench.engine.runs[6:]] == [run.source for _, run in bench.engine.runs[:6]][1::3]
    bench.engine.end()
    bench.step()
    assert bench.link.reports[1] == PagesSent("a", 1, 1, 1, (1,))
    bench.link.answer(bench.link.reports[1])
    assert bench.step() == (TakenNews("a", 1, (1,), 2 * UNIT),)


def test_a_refused_report_ends_the_attempt_with_its_error() -> None:
    """Kind 40: the decode worker's own words."""
    bench = Bench()
    bench.order((0,))
    bench.engine.end()
    bench.step()
    error = ProtocolError("decode worker: request a: attempt 1 is over")
    bench.link.ready.append((bench.link.reports[0], error))
    assert bench.step() == (FailedNews("a", 1, error), DrainedNews("a", 1, False))


def test_a_broken_connection_ends_what_is_under_way_and_the_next_order_makes_another() -> None:
    bench = Bench()
    bench.order((0,))
    bench.link.broken = True
    (failed,) = bench.step()
    assert isinstance(failed, FailedNews) and "the decode worker is gone" in str(failed.error)
    assert bench.link.closed
    bench.engine.end()
    assert bench.step() == (DrainedNews("a", 1, False),)
    bench.order((0,), attempt=2)
    assert len(bench.links) == 2 and bench.landed() == (TakenNews("a", 2, (0,), 2 * UNIT),)


def test_a_report_whose_connection_broke_is_not_waited_for() -> None:
    """Whether the decode worker has it, nobody knows: the attempt ends, and no write is under way."""
    bench = Bench()
    bench.order((0,))
    bench.engine.end()
    bench.step()
    bench.link.broken = True
    failed, drained = bench.step()
    assert isinstance(failed, FailedNews) and drained == DrainedNews("a", 1, False)


def test_an_answer_to_another_report_ends_the_connection() -> None:
    """Kind 34: answers are paired by what they say and not by their place alone."""
    bench = Bench()
    bench.order((0,))
    bench.engine.end()
    bench.step()
    bench.link.ready.append((bench.link.reports[0], PagesTaken("a", 1, 5)))
    failed, drained = bench.step()
    assert isinstance(failed, FailedNews) and "the decode worker answered" in str(failed.error)
    assert drained == DrainedNews("a", 1, False) and bench.link.closed


def test_without_a_connection_nothing_leaves() -> None:
    bench = Bench()
    bench.connects = False
    bench.order((0,))
    failed, drained = bench.step()
    assert isinstance(failed, FailedNews) and "nobody listens there" in str(failed.error)
    assert drained == DrainedNews("a", 1, False) and bench.engine.runs == []


def test_heartbeats_find_a_broken_connection() -> None:
    bench = Bench()
    bench.connects = False
    bench.sender.heartbeat()
    assert bench.sender.take_news() == ()
    bench.connects = True
    bench.sender.heartbeat()
    assert bench.link.beats == 1, "it beats before the first page"
    bench.order((0,))
    bench.sender.heartbeat()
    assert bench.link.beats == 2
    bench.link.broken = True
    bench.sender.heartbeat()
    assert isinstance(bench.sender.take_news()[0], FailedNews)


def test_a_connection_that_broke_before_an_order_does_not_fail_it() -> None:
    """Kind 35: a decode worker that was killed and started anew, while nothing was under way."""
    bench = Bench()
    bench.sender.heartbeat()
    bench.link.broken = True
    stale = bench.link
    bench.order((0,))
    assert stale.closed
    assert bench.sender.take_news() == ()
    assert bench.engine.runs
    assert bench.link is not stale


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ((), "a page goes to decode owner 0 of 0"),
        ((TransferTarget("decode-0", (MemoryRegion(TARGET_BASE, 64),)),), "names 1 regions, and pages have bytes in 2"),
        ((TransferTarget("decode-0", (MemoryRegion(TARGET_BASE, 8),) * 2),), "is not inside one region"),
    ],
)
def test_targets_that_do_not_fit_fail_the_attempt(targets: tuple[TransferTarget, ...], says: str) -> None:
    """A peer names them, so a wrong one is a typed error and ends one attempt only."""
    bench = Bench()
    bench.targets = targets
    bench.order((0, 1))
    failed, drained = bench.step()
    assert isinstance(failed, FailedNews) and says in str(failed.error)
    assert drained == DrainedNews("a", 1, False) and bench.engine.runs == []


def test_owners_are_served_one_after_the_other_in_the_order_of_the_moves() -> None:
    """Kind 37 and incast: the order of moves begins at another owner on each rank."""
    bench = Bench(owners=2)
    moves = tuple(PageMove(position, position + 1, owner, position + 1) for position, owner in ((0, 1), (2, 1), (1, 0)))
    bench.sender.order(SendOrder("a", 1, moves, bench.targets))
    assert [session_id for session_id, _ in bench.engine.runs] == ["decode-1"] * 4 + ["decode-0"] * 2


def test_memory_is_registered_as_a_whole_or_not_at_all() -> None:
    engine, memory = Engine(), PageMemory(1 << 20, PAGES)
    engine.refuses = "no more memory can be pinned"
    with pytest.raises(TransferError, match="pinned"):
        PageSender(0, engine, memory, Link)
    assert engine.registered == []
    engine.refuses = ""
    sender = PageSender(0, engine, memory, Link)
    assert len(engine.registered) == 2
    assert sender.close(0.0) and engine.registered == []


def test_closing_with_a_write_that_does_not_end_closes_the_engine() -> None:
    """Kind 28: when `close` returns, no page is read."""
    bench = Bench(part_pages=1)
    bench.order((0, 1, 2))
    assert not bench.sender.close(0.0)
    assert bench.link.closed
    with pytest.raises(TransferError, match="closed"):
        bench.engine.register(Region(1, 1))
    assert len(bench.engine.runs) == 4
