"""Runs of bytes: merging conserves them, and each must lie inside one region at both ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import ConfigError, TransferError
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.runs import Peer, Region, Run, Runs, merge_runs, place_runs
from cpkv.transfer.waiting_runs import WaitingRuns

register_cpu_ci(est_time=3, suite="unit")

HERE = (Region(0x1000, 0x1000), Region(0x2000, 0x800), Region(0x9000, 0x100))
THERE = Peer("decode:1", (Region(0x50000, 0x2000), Region(0x52000, 0x100)))


@st.composite
def run_lists(draw: st.DrawFn) -> list[Run]:
    """Runs of which each may touch the one before in source, in target, in both or in neither."""
    runs: list[Run] = []
    source, target = 1 << 20, 1 << 40
    for _ in range(draw(st.integers(0, 30))):
        length = draw(st.integers(1, 50))
        source += draw(st.sampled_from([0, 0, 7, -3]))
        target += draw(st.sampled_from([0, 0, 5, -9]))
        runs.append(Run(source, target, length))
        source, target = source + length, target + length
    return runs


def merged_runs(runs: list[Run], limit: int = 1 << 20) -> list[Run]:
    return listed(merge_runs(Runs.of(runs), limit))


def placed_runs(regions: tuple[Region, ...], peer: Peer, runs: list[Run]) -> tuple[list[Run], frozenset[Region]]:
    placed, sources = place_runs(regions, peer, Runs.of(runs))
    return listed(placed), sources


def listed(runs: Runs) -> list[Run]:
    made = runs.as_list()
    assert all(type(run) is Run and {type(number) for number in run} == {int} for run in made)
    return made


def bytes_moved(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.source + i, run.target + i) for run in runs for i in range(run.length)]


@given(run_lists(), st.integers(1, 200))
def test_merging_conserves_every_byte_its_order_and_its_limit(runs: list[Run], limit: int) -> None:
    merged = merged_runs(runs, limit)
    assert bytes_moved(merged) == bytes_moved(runs)
    longest = max((run.length for run in runs), default=0)
    assert all(run.length <= max(limit, longest) for run in merged)
    assert all(run in runs for run in merged if run.length > limit), "only a run that came too long may be too long"
    for left, right in zip(merged, merged[1:], strict=False):
        touching = left.source + left.length == right.source and left.target + left.length == right.target
        assert not touching or left.length + right.length > limit, "two neighbours were left apart"


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=20),
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 1 << 20)), max_size=3),
)
def test_a_page_lies_as_many_lengths_behind_a_start_as_its_place_says(
    pages: list[tuple[int, int]], spans: list[tuple[int, int, int]]
) -> None:
    runs = Runs.of_pages([here for here, _ in pages], [there for _, there in pages], spans)
    assert listed(runs) == [
        Run(source + here * size, target + there * size, size)
        for source, target, size in spans
        for here, there in pages
    ]


def test_as_many_pages_must_be_read_as_are_written() -> None:
    with pytest.raises(ValueError, match="2 pages are read and 1 are written"):
        Runs.of_pages([1, 2], [1], [(0, 0, 64)])


def test_numbers_beyond_64_bits_are_refused() -> None:
    with pytest.raises(TransferError, match="does not fit in 64 bits"):
        Runs.of([Run(0x1000, 1 << 63, 16)])
    with pytest.raises(TransferError, match="does not fit in 64 bits"):
        Runs.of_pages([1], [1], [(0x1000, 1 << 63, 64)])
    with pytest.raises(TransferError, match=r"writes .* not inside one region that peer far"):
        place_runs(HERE, Peer("far", (Region(1 << 63, 64), Region((1 << 63) - 64, 128))), Runs.of([GOOD]))


@pytest.mark.parametrize(
    ("page", "start"), [(1 << 58, 0x50000), (0x1401, (1 << 63) - 64), (1 << 62, 0), (-1, 0x50040), (0, -64)]
)
def test_a_page_beyond_the_last_address_is_refused(page: int, start: int) -> None:
    """In 64 bits some of these would begin anew, at the first byte of the peer's region."""
    for here, there, spans in (([0], [page], (0x1000, start, 64)), ([page], [0], (start, 0x50000, 64))):
        with pytest.raises(TransferError, match="beyond the last address"):
            Runs.of_pages(here, there, [spans])


def test_the_last_page_of_all_is_none_too_many() -> None:
    assert listed(Runs.of_pages([0], [1], [(0, (1 << 63) - 129, 64)])) == [Run(0, (1 << 63) - 65, 64)]


def test_pages_that_follow_each_other_become_one_run() -> None:
    pages = [Run(0x1000 + i * 64, 0x50000 + i * 64, 64) for i in range(8)]
    assert merged_runs(pages) == [Run(0x1000, 0x50000, 512)]
    assert [run.length for run in merged_runs(pages, 192)] == [192, 192, 128]


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (-1, -1)], ids=["target gap", "source gap", "overlap"])
def test_runs_that_touch_at_one_end_only_stay_apart(step: tuple[int, int]) -> None:
    runs = [Run(1000, 5000, 100), Run(1100 + step[0], 5100 + step[1], 100)]
    assert merged_runs(runs) == runs


def test_a_limit_below_one_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit_bytes is 0"):
        merged_runs([], 0)


def test_runs_over_the_seam_of_two_regions_stay_apart() -> None:
    # 0x1000..0x2000 and 0x2000..0x2800 are neighbours in memory but two registrations, and likewise at the peer.
    runs = [Run(0x1F00, 0x50000, 0x100), Run(0x2000, 0x50100, 0x100), Run(0x2100, 0x50200, 0x100)]
    merged, sources = placed_runs(HERE, THERE, runs)
    assert merged == [Run(0x1F00, 0x50000, 0x100), Run(0x2000, 0x50100, 0x200)]
    assert sources == {HERE[0], HERE[1]}
    at_peer = [Run(0x1000, 0x51FF0, 0x10), Run(0x1010, 0x52000, 0x10)]
    assert placed_runs(HERE, THERE, at_peer) == (at_peer, frozenset({HERE[0]}))


@given(st.lists(st.tuples(st.integers(0, 0xFFF), st.integers(0, 0x1FFF), st.integers(1, 0x40)), max_size=40))
def test_placing_conserves_every_byte(pieces: list[tuple[int, int, int]]) -> None:
    runs = [Run(0x1000 + s, 0x50000 + t, min(n, 0x1000 - s, 0x2000 - t)) for s, t, n in pieces]
    merged, _ = placed_runs(HERE, THERE, runs)
    assert bytes_moved(merged) == bytes_moved(runs)


GOOD = Run(0x1000, 0x50000, 0x10)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (Run(0x0FFF, 0x50000, 2), r"run 2 of 3 reads \[0xfff, 0x1001\) of 2 bytes.*\[0x1000, 0x2000\) of 4,096 bytes"),
        (Run(0x27FF, 0x50000, 2), r"run 2 of 3 reads \[0x27ff, 0x2801\)"),
        (Run(0x1FFF, 0x50000, 2), r"run 2 of 3 reads \[0x1fff, 0x2001\).*inside one region"),
        (Run(0x9100, 0x50000, 1), r"reads \[0x9100, 0x9101\) of 1 bytes"),
        (Run(-0x10, 0x50000, 1), "reads"),
        (Run(0x1000, 0x4FFFF, 2), r"run 2 of 3 writes \[0x4ffff, 0x50001\) of 2 bytes.*decode:1.*\[0x50000, 0x52000\)"),
        (Run(0x1000, 0x51FFF, 2), r"writes \[0x51fff, 0x52001\).*inside one region"),
        (Run(0x1000, 0x52100, 1), r"writes \[0x52100, 0x52101\)"),
        (Run(0x1000, 0x50000, 0), "run 2 of 3 has 0 bytes"),
        (Run(0x1010, 0x50010, -0x10), "run 2 of 3 has -16 bytes"),
    ],
)
def test_a_run_outside_one_region_is_refused_with_its_numbers(run: Run, says: str) -> None:
    with pytest.raises(TransferError, match=says):
        placed_runs(HERE, THERE, [GOOD, GOOD, run])


def test_a_peer_or_a_sender_without_regions_takes_nothing() -> None:
    with pytest.raises(TransferError, match=r"registered here \(none\)"):
        placed_runs((), THERE, [GOOD])
    with pytest.raises(TransferError, match=r"peer empty registered \(none\)"):
        placed_runs(HERE, Peer("empty", ()), [GOOD])


@given(run_lists(), st.integers(1, 4), st.integers(1, 60))
def test_writes_carry_every_byte_in_order_and_no_more_than_they_may(
    runs: list[Run], max_runs: int, max_bytes: int
) -> None:
    waiting = WaitingRuns(Runs.of(runs))
    writes = []
    while waiting:
        ahead = waiting.first(2)
        writes.append(waiting.take_write(max_runs, max_bytes))
        assert writes[-1][0].source == ahead[0].source
    assert bytes_moved([run for write in writes for run in write]) == bytes_moved(runs)
    assert all(len(write) <= max_runs and sum(run.length for run in write) <= max_bytes for write in writes)


def test_thousands_of_runs_wait_in_order() -> None:
    runs = [Run(2 * number, 3 * number, 1) for number in range(5000)]
    waiting = WaitingRuns(Runs.of(runs))
    assert waiting.first(3000) == runs[:3000]
    taken: list[Run] = []
    while len(taken) < 4000:
        taken += waiting.take_write(1000, 700)
    assert taken == runs[: len(taken)]
    waiting.clear()
    assert not waiting and waiting.first(1) == []


def test_a_message_names_four_regions_and_counts_the_rest() -> None:
    many = [Region(0x100000 * i, 16) for i in range(1, 8)]
    with pytest.raises(TransferError, match=r"0x400000, 0x400010\) of 16 bytes and 3 more"):
        placed_runs(many, THERE, [GOOD])


@pytest.mark.parametrize("module", ["cpkv.transfer", "cpkv.transfer.backend", "cpkv.transfer.mooncake"])
def test_importing_a_back_end_loads_neither_torch_nor_the_engine(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'mooncake', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0
