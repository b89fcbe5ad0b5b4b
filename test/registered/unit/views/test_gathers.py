"""What views move and hold is what the planner says, in one order on every rank, and a failure ends it on all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from gather_checks import (
    HISTORIES,
    LONGEST,
    NO_HISTORY,
    check_bytes,
    check_order,
    check_scratch,
    gathers_by_rule,
)
from view_ranks import (
    EIGHT_LAYERS,
    FORMATS,
    ONE_COPY,
    SLOTS,
    SMALL,
    Prompt,
    Reading,
    ViewRanks,
    check_seen,
    make_geometry,
    make_prompts,
)

from cpkv.config.names import ViewName
from cpkv.errors import CpkvError, NumericsError, WorkerDiedError
from cpkv.testing.registration import register_cpu_ci
from cpkv.views.counters import ViewCounters
from cpkv.views.history_gather import GatherLane

register_cpu_ci(est_time=11, suite="unit")

# Views that gather ahead where they may, and those that never do.
PREFETCH_OR_NOT = [
    *product(("mixed", "full", "layer-split"), (True, False)),
    ("unified", True),
    ("blocked", False),
    ("current", True),
    ("replicated", False),
]


# Every number of ranks and every top-k with each view, with and without prefetch.
@pytest.mark.parametrize(("cp_size", "topk"), [(2, 1), (4, LONGEST - 1), (8, LONGEST), (8, 1)])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("view", ["mixed", "full"])
def test_all_ranks_start_the_same_gathers_in_the_order_of_the_plan(
    view: ViewName, prefetch: bool, cp_size: int, topk: int
) -> None:
    """Kinds 21 and 32: also ranks without a token or a page; with prefetch in a group of their own."""
    check_order(view, cp_size, prefetch, topk)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("view", [*ONE_COPY, "current", "layer-split"])
def test_without_history_no_page_is_gathered(view: ViewName, prefetch: bool, tmp_path: Path) -> None:
    geometry = make_geometry(3, slots=EIGHT_LAYERS)
    prompts = make_prompts(geometry, 4, NO_HISTORY)
    ranks = ViewRanks(geometry, 4, prompts, view, folder=tmp_path, options=SMALL._replace(prefetch=prefetch))
    check_seen(ranks, ranks.read(prompts), prompts)
    for rank, comm in enumerate(ranks.comms):
        assert comm.prefetch.sequence == []
        # A rank that reads rows through `blocked` says in one collective a layer that it asks for none.
        layers = range(geometry.num_layers) if view == "blocked" else []
        assert [one.label for one in comm.sequence or []] == [f"rows asked for {layer}" for layer in layers]
        assert ranks.counters[rank].moved_bytes == ranks.counters[rank].history_bytes == 0


@pytest.mark.parametrize("view", ["unified", "replicated"])
def test_a_view_of_memory_that_is_there_moves_nothing(view: ViewName, tmp_path: Path) -> None:
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, HISTORIES)
    ranks = ViewRanks(geometry, 4, prompts, view, folder=tmp_path)
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)
    for rank, comm in enumerate(ranks.comms):
        assert comm.sequence == comm.prefetch.sequence == []
        assert ranks.counters[rank].moved_bytes == ranks.counters[rank].history_bytes == 0


@pytest.mark.parametrize("topk", [1, LONGEST])
@pytest.mark.parametrize("view", ["blocked", "layer-split"])
def test_the_other_views_gather_index_keys_only_where_they_are_scored(view: ViewName, topk: int) -> None:
    geometry = make_geometry(16, FORMATS[1], EIGHT_LAYERS)
    prompts = make_prompts(geometry, 4, HISTORIES)
    ranks = ViewRanks(geometry, 4, prompts, view, topk=topk)
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)
    labels = [one.label for one in ranks.comms[0].sequence or [] if "pages" in one.label]
    if view == "layer-split":
        assert labels == gathers_by_rule(geometry, topk < LONGEST)
    else:
        # One block of keys for each of the three requests with history.
        with_indexer = [layer for layer, slot in enumerate(geometry.slots) if slot >= 0 and topk < LONGEST]
        assert labels == [f"index pages {layer}" for layer in with_indexer for _ in range(3)]
    assert [comm.sequence for comm in ranks.comms] == [ranks.comms[0].sequence] * 4


def test_blocked_gathers_each_block_of_keys_once_a_layer() -> None:
    """Histories of one whole block, of two blocks and of a block and a page; the last ends among current keys."""
    geometry = make_geometry(16)
    prompts = make_prompts(geometry, 2, [(512, 1), (1024, 16), (513, 600)])
    ranks = ViewRanks(geometry, 2, prompts, "blocked", queries_bytes=1 << 16)
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)
    labels = [one.label for one in ranks.comms[0].sequence or [] if "index" in one.label]
    assert labels == [f"index pages {layer}" for layer in (0, 2) for _ in range(1 + 2 + 2)]


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(("cp_size", "page_size", "topk"), [(2, 1, 1), (3, 16, LONGEST), (4, 3, 1), (8, 3, LONGEST)])
@pytest.mark.parametrize("view", ["mixed", "full", "layer-split"])
def test_the_bytes_moved_are_those_of_the_planner_and_of_a_count(
    view: ViewName, cp_size: int, page_size: int, topk: int, prefetch: bool
) -> None:
    """Kind 36: each page that holds history once in every layer and slot that is read, and the padding."""
    check_bytes(view, cp_size, page_size, prefetch, topk)


@pytest.mark.parametrize("topk", [1, LONGEST])
@pytest.mark.parametrize("lengths", [HISTORIES, [(33, 2)], [(1030, 3), (0, 1)]], ids=["four", "one", "long"])
def test_blocked_moves_the_blocks_of_keys_and_the_rows_that_were_asked_for(
    lengths: list[tuple[int, int]], topk: int
) -> None:
    """Each row of the history once, since the requests are read in one piece; nothing for ranks that ask for none."""
    geometry = make_geometry(16, FORMATS[3])
    prompts = make_prompts(geometry, 4, lengths)
    ranks = ViewRanks(geometry, 4, prompts, "blocked", topk=topk, queries_bytes=1 << 20)
    ranks.store_history(prompts)
    for counters in ranks.counters:
        assert counters == ViewCounters()
    check_seen(ranks, ranks.read(prompts, Reading(idle=(2,))), prompts)
    key_pages = 0
    for prompt in prompts:
        pages = prompt.pages[: -(-prompt.history // 16)] if prompt.tokens > topk else ()
        for first in range(0, len(pages), 32):
            block = pages[first : first + 32]
            key_pages += 4 * max(sum(page % 4 == owner for page in block) for owner in range(4))
    moved = key_pages * geometry.index_block_bytes * geometry.num_slots
    rows = sum(prompt.history for prompt in prompts) * geometry.row_format.latent_row_bytes * geometry.num_layers
    assert [counters.moved_bytes - moved for counters in ranks.counters] == [rows, rows, 0, rows]


@pytest.mark.parametrize("topk", [1, LONGEST])
@pytest.mark.parametrize("lengths", [HISTORIES, NO_HISTORY, [(0, 1)]], ids=["history", "no history", "one token"])
@pytest.mark.parametrize(("view", "prefetch"), PREFETCH_OR_NOT)
def test_the_scratch_is_what_the_planner_says(
    view: ViewName, prefetch: bool, lengths: list[tuple[int, int]], topk: int, tmp_path: Path
) -> None:
    """Allocated and counted; of `unified` the tail is counted too, and lies in the pool."""
    check_scratch(view, lengths, prefetch, topk, tmp_path)


def test_counters_of_batches_add_up_and_keep_the_highest_scratch() -> None:
    total = ViewCounters({"full": 2}, 5, 3, 70, 1.0, 0.25)
    total.add(ViewCounters({"full": 1, "current": 4}, 10, 2, 60, 2.0, 0.5))
    assert total == ViewCounters({"full": 3, "current": 4}, 15, 5, 70, 3.0, 0.75)


def failing_once(ranks: ViewRanks, what: str, layer: int) -> None:
    """Rank 1 cannot read its own pages of a layer: the others wait for it in the gather."""
    pool = ranks.pools[1]
    honest: Callable[..., None] = getattr(pool, what)

    def collect(at: int, local_pages: torch.Tensor, out: torch.Tensor) -> None:
        if at == layer:
            raise NumericsError("the pages are gone")
        honest(at, local_pages, out=out)

    setattr(pool, what, collect)


def check_all_end(ranks: ViewRanks, prompts: list[Prompt], reading: Reading) -> None:
    """Rank 1 is the cause, everyone else names it, and no thread gathers any more."""
    with pytest.raises(CpkvError) as raised:
        ranks.read(prompts, reading)
    for lane in lanes():
        lane.join(15)
        assert not lane.is_alive(), f"{lane.name} still waits for a gather that cannot finish"
    assert isinstance(raised.value, NumericsError) and raised.value is ranks.raised[1]
    for rank in (0, 2, 3):
        error = ranks.raised[rank]
        assert isinstance(error, WorkerDiedError), f"rank {rank}: {error!r}"
        assert str(error).endswith("rank 1 failed: the pages are gone")


def lanes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefill rank")]


def test_a_lane_runs_no_job_behind_one_that_failed() -> None:
    """Its gather would meet another one of the other ranks, and they would report that in place of the cause."""
    lane, ran = GatherLane("prefill rank 0 prefetch"), []

    def fail() -> None:
        raise NumericsError("the pages are gone")

    first, second = lane.submit(fail), lane.submit(lambda: ran.append("second"))
    lane.close(wait=True)
    assert ran == []
    for future in (first, second):
        with pytest.raises(NumericsError, match="the pages are gone"):
            future.result(timeout=15)


@pytest.mark.parametrize(
    ("prefetch", "what", "layer"),
    [
        (True, "index_pages", 0),
        (True, "latent_pages", 2),
        (True, "index_pages", 2),
        (False, "latent_pages", 0),
        (False, "latent_pages", 2),
        (False, "index_pages", 2),
    ],
)
@pytest.mark.parametrize("view", ["mixed", "full"])
def test_a_rank_whose_gather_fails_ends_all_ranks_with_its_cause(
    view: ViewName, prefetch: bool, what: str, layer: int
) -> None:
    """Kind 32: in the middle of the batch the others are in that very gather."""
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, HISTORIES)
    ranks = ViewRanks(geometry, 4, prompts, view, options=SMALL._replace(prefetch=prefetch))
    ranks.store_history(prompts)
    failing_once(ranks, what, layer)
    check_all_end(ranks, prompts, Reading())
    # What rank 1 has to gather behind it would meet the gather that the others are in.
    comm = ranks.comms[1].prefetch if prefetch else ranks.comms[1]
    by_rule = gathers_by_rule(geometry, scored=True)
    label = f"{what.replace('_', ' ')} {layer}"
    assert [one.label for one in comm.sequence or []] == by_rule[: by_rule.index(label)]


@pytest.mark.parametrize("view", ["mixed", "full", "blocked", "layer-split"])
def test_a_rank_that_fails_between_two_gathers_ends_all_ranks_with_its_cause(view: ViewName) -> None:
    """Kind 32: it has read the keys of layer 0, and what it gathers ahead is under way."""
    geometry = make_geometry(3, slots=EIGHT_LAYERS)
    prompts = make_prompts(geometry, 4, HISTORIES)
    ranks = ViewRanks(geometry, 4, prompts, view)
    ranks.store_history(prompts)

    def fail(rank: int, layer: int) -> None:
        if (rank, layer) == (1, 1):
            raise NumericsError("the pages are gone")

    check_all_end(ranks, prompts, Reading(before_rows=fail))


def test_a_view_that_is_closed_leaves_no_thread_and_one_that_is_abandoned_waits_for_nobody() -> None:
    geometry = make_geometry(3, slots=SLOTS)
    prompts = make_prompts(geometry, 2, HISTORIES)
    ranks = ViewRanks(geometry, 2, prompts, "mixed")
    ranks.store_history(prompts)
    ranks.read(prompts)
    assert lanes() == []
    # Rank 1 never comes, so the gather of layer 0 cannot end before the group does.
    ranks.open(ranks.plan(prompts), 0).close(abandon=True)
    [lane] = lanes()
    assert lane.is_alive()
    ranks.group.abort(1, "it never came")
    lane.join(15)
    assert not lane.is_alive()
