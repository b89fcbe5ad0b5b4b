"""The planner against a list of all views: the cheapest that fits, its reason, and refusals with computed numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpkv.config.names import KvView, SplitStrategy, ViewName
from cpkv.errors import CapacityError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.planner import ViewPlanner
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.query_blocks import QueryBlocks
from cpkv.layout.row_format import RowFormat
from cpkv.layout.view_costs import BatchSizes, ViewCost, ViewCosts, ViewOptions
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

APART = "the ranks run on two hosts"
FORCED = [view for view in get_args(KvView) if view != "auto"]


def make_planner(
    page_size: int, cp_size: int, *, owners: int | None = None, topk: int = 8, workspace: int = 2000, **options: Any
) -> ViewPlanner:
    geometry = PoolGeometry(RowFormat("bfloat16", 5, 3, "fp8", 8), page_size, index_slots([True, False, True]))
    costs = ViewCosts(
        geometry, QueryBlocks(topk, 8, 2, 4, workspace), ViewOptions(key_block_tokens=512, round_bytes=256)
    )
    placement = PagePlacement(page_size, cp_size if owners is None else owners)
    return ViewPlanner(costs, placement, cp_size, "zigzag", **{"unified_reason": APART} | options)


def make_segments(lengths: list[tuple[int, int]], page_size: int, seed: int = 0) -> list[Segment]:
    """Requests of (history, current) tokens, on shuffled pages."""
    pages = random.Random(seed).sample(range(8, 4000), 1000)
    segments = []
    for number, (history, current) in enumerate(lengths):
        mine = tuple(pages.pop() for _ in range(-(-(history + current) // page_size)))
        segments.append(Segment(f"r{number}", history, (0,) * current, mine, True))
    return segments


def cost_of(planner: ViewPlanner, segments: list[Segment], view: ViewName) -> ViewCost:
    spec = BatchSpec(0, tuple(segments), planner.strategy, view)
    plan = BatchPlan.build(spec, planner.placement, planner.cp_size)
    return planner.costs.cost(view, BatchSizes.of(plan, planner.costs.options))


def views_by_rule(planner: ViewPlanner, has_history: bool) -> list[ViewName]:
    """What a batch of a shared pool may use, in order of preference; the drawing of the module in words."""
    if planner.forced != "auto":
        return [planner.forced]
    gathered: ViewName = "mixed" if planner.unified_reason else "unified"
    return [*(["current"] if planner.current_reuse and not has_history else []), gathered, "blocked"]


LENGTHS = st.lists(st.tuples(st.sampled_from([0, 0, 1, 16, 17, 50]), st.integers(1, 40)), min_size=1, max_size=8)


@given(
    LENGTHS,
    st.sampled_from([1, 3, 16]),
    st.integers(2, 8),
    st.sampled_from(["auto", *FORCED]),
    st.booleans(),
    st.sampled_from([APART, None]),
    st.sampled_from(["zigzag", "interleave"]),
    st.one_of(st.none(), st.integers(0, 30000)),
)
def test_the_choice_is_the_cheapest_view_that_fits(
    lengths: list[tuple[int, int]],
    page_size: int,
    cp_size: int,
    forced: KvView,
    reuse: bool,
    unified_reason: str | None,
    strategy: SplitStrategy,
    scratch_bytes: int | None,
) -> None:
    planner = replace(
        make_planner(page_size, cp_size, forced=forced, current_reuse=reuse, unified_reason=unified_reason),
        strategy=strategy,
        scratch_bytes=scratch_bytes,
    )
    segments = make_segments(lengths, page_size)
    has_history = any(history for history, _ in lengths)
    if forced == "current" and has_history:
        with pytest.raises(CapacityError, match="the view current was forced and holds no history.*raise --chunk-size"):
            planner.choose(segments)
        return
    costs = [cost_of(planner, segments, view) for view in views_by_rule(planner, has_history)]
    assert [(one.view, one.cost) for one in planner.admissible(segments)] == [(cost.view, cost) for cost in costs]
    fitting = [cost for cost in costs if scratch_bytes is None or cost.held_bytes <= scratch_bytes]
    if not fitting:
        least = min(cost.held_bytes for cost in costs)
        with pytest.raises(
            CapacityError, match=f"and the scratch has {scratch_bytes}; raise --scratch-bytes to {least}"
        ):
            planner.choose(segments)
        assert replace(planner, scratch_bytes=least).choose(segments).cost.held_bytes == least
        return
    chosen = planner.choose(segments)
    others = [cost for cost in fitting if cost.view != "blocked"]
    least_moved = min(cost.moved_bytes for cost in others or fitting)
    # Of those that move the least the preferred one comes first.
    assert chosen[:2] == next((cost.view, cost) for cost in others or fitting if cost.moved_bytes == least_moved)


@given(LENGTHS, st.booleans(), st.sampled_from([APART, None]))
def test_blocked_can_serve_whatever_nothing_else_can(
    lengths: list[tuple[int, int]], reuse: bool, unified_reason: str | None
) -> None:
    planner = make_planner(3, 4, current_reuse=reuse, unified_reason=unified_reason)
    last = planner.admissible(make_segments(lengths, 3))[-1]
    assert last.view == "blocked" and last.reason.startswith("the scratch is too small")


def test_a_forced_view_is_used_whatever_it_costs_and_says_so() -> None:
    for forced in FORCED:
        planner = make_planner(4, 2, forced=forced)
        history = 0 if forced == "current" else 30
        chosen = planner.choose(make_segments([(history, 5)], 4))
        assert (chosen.view, chosen.reason) == (forced, "it was forced")


@pytest.mark.parametrize(
    ("history", "options", "view", "reason"),
    [
        (0, {}, "current", "no request of the batch has history"),
        (0, {"current_reuse": False}, "mixed", f"the history is gathered: {APART}"),
        (5, {}, "mixed", f"the history is gathered: {APART}"),
        (5, {"unified_reason": None}, "unified", "the ranks share memory: nothing moves"),
        (0, {"unified_reason": None}, "current", "no request of the batch has history"),
        (5, {"forced": "full"}, "full", "it was forced"),
        (5, {"owners": 1}, "replicated", "every rank holds every page"),
        (0, {"owners": 1}, "replicated", "every rank holds every page"),
    ],
)
def test_the_view_and_its_reason(history: int, options: dict[str, Any], view: str, reason: str) -> None:
    """One request of the batch has history, or none."""
    planner = make_planner(4, 4, **options)
    chosen = planner.choose(make_segments([(0, 7), (history, 3)], 4))
    assert (chosen.view, chosen.reason) == (view, reason)


def test_one_rank_holds_every_page() -> None:
    assert make_planner(4, 1).choose(make_segments([(9, 3)], 4)).view == "replicated"


def test_a_scratch_too_small_for_the_history_says_why_blocked_serves_it() -> None:
    segments = make_segments([(400, 8)], 4)
    for unified_reason, gathered in ((APART, "mixed"), (None, "unified")):
        planner = make_planner(4, 4, unified_reason=unified_reason)
        preferred, blocked = (cost_of(planner, segments, view) for view in (gathered, "blocked"))
        if preferred.held_bytes <= blocked.held_bytes:
            continue
        assert replace(planner, scratch_bytes=preferred.held_bytes).choose(segments).view == gathered
        chosen = replace(planner, scratch_bytes=preferred.held_bytes - 1).choose(segments)
        assert (chosen.view, chosen.reason) == ("blocked", "the scratch is too small to gather a layer's history")


def test_a_request_that_no_view_can_hold_is_refused_by_name_with_the_bytes() -> None:
    segments = make_segments([(400, 8), (0, 2)], 4)
    for forced, held_by, end in (
        ("auto", "blocked", ""),
        ("mixed", "mixed", " or leave out --kv-view"),
        ("blocked", "blocked", ""),
    ):
        planner = make_planner(4, 4, forced=forced, scratch_bytes=10)
        needed = cost_of(planner, segments, held_by).held_bytes  # type: ignore[arg-type]
        with pytest.raises(CapacityError) as refusal:
            planner.choose(segments)
        assert str(refusal.value) == (
            f"request r0, r1: the view {held_by} holds up to {needed} bytes for 408 tokens, and the scratch has 10; "
            f"raise --scratch-bytes to {needed}{end}"
        )


@example(context=188, chunk=32, page_size=4, cp_size=3, topk=8, workspace=100, forced="mixed", unified_reason=APART)
@example(context=188, chunk=32, page_size=4, cp_size=3, topk=8, workspace=20000, forced="auto", unified_reason=APART)
@example(context=59, chunk=2, page_size=4, cp_size=4, topk=8, workspace=100, forced="full", unified_reason=APART)
@example(
    context=103, chunk=35, page_size=4, cp_size=3, topk=64, workspace=20000, forced="blocked", unified_reason=APART
)
@given(
    context=st.integers(1, 200),
    chunk=st.integers(1, 60),
    page_size=st.sampled_from([1, 4, 16]),
    cp_size=st.integers(2, 8),
    topk=st.sampled_from([8, 64]),
    workspace=st.sampled_from([100, 20000, 1 << 20]),
    forced=st.sampled_from(["auto", *FORCED]),
    unified_reason=st.sampled_from([APART, None]),
)
def test_the_scratch_for_a_context_serves_every_chunk_of_every_request_up_to_it(
    context: int,
    chunk: int,
    page_size: int,
    cp_size: int,
    topk: int,
    workspace: int,
    forced: KvView,
    unified_reason: str | None,
) -> None:
    """Pages dealt to the owners in turn; the preferred view serves each chunk, and the last resort could too."""
    planner = make_planner(
        page_size, cp_size, topk=topk, workspace=workspace, forced=forced, unified_reason=unified_reason
    ).with_scratch_for(context, chunk)
    assert planner.scratch_bytes is not None
    for tokens in {context, max(1, context - 1), max(1, context // 2), min(chunk, context)}:
        pages = tuple(range(cp_size, cp_size + -(-tokens // page_size)))
        for start in range(0, tokens if forced != "current" else 1, chunk):
            ids = (0,) * (min(tokens, start + chunk) - start)
            choices = planner.admissible([Segment("r", start, ids, pages, True)])
            for choice in choices:
                assert choice.cost.held_bytes <= planner.scratch_bytes, (
                    f"{choice.view} holds {choice.cost.held_bytes} bytes for tokens {start} to {start + len(ids)}, "
                    f"and the scratch for {context} tokens in chunks of {chunk} has {planner.scratch_bytes}"
                )
            assert planner.choose([Segment("r", start, ids, pages, True)]) == choices[0]


def linked_planner(**options: Any) -> ViewPlanner:
    return make_planner(16, 4, **{"unified_reason": None, "linked": True} | options)


@pytest.mark.parametrize(("history", "view"), [(0, "current"), (64, "mixed"), (256, "mixed"), (9000, "unified")])
def test_over_links_a_gather_is_taken_while_it_moves_less_than_is_read(history: int, view: ViewName) -> None:
    """A chunk reads chosen rows again and again, however long the history; a gather brings each once."""
    segments = make_segments([(history, 640)], 16)
    found = linked_planner().choose(segments)
    assert found.view == view
    if history:
        assert "links between the ranks' devices" in found.reason
    assert linked_planner(linked=False).choose(segments).view == ("unified" if history else "current")


def test_what_is_read_over_links_is_counted() -> None:
    """Three of four owners are others: 16 queries of a rank, 8 rows of 16 bytes each, in 3 layers; 64 pages' blocks."""
    planner = linked_planner()
    segments = make_segments([(1024, 64)], 16)
    plan = BatchPlan.build(BatchSpec(0, tuple(segments), "zigzag", "unified"), planner.placement, 4)
    sizes = BatchSizes.of(plan, planner.costs.options)
    pages = 4 * plan.history.max_pages
    blocks = pages * 2 * 16 * (8 + 4)
    assert planner.costs.read_bytes("unified", sizes) == (16 * 8 * 16 * 3 + blocks) * 3 // 4
    assert planner.costs.read_bytes("mixed", sizes) == 0
    assert planner.costs.read_bytes("unified", replace(sizes, history_pages=0)) == 0


def test_over_links_the_scratch_has_room_for_a_gather() -> None:
    """Whichever view a batch takes, and a forced one is not argued with."""
    with_room = linked_planner().with_scratch_for(3000, 640)
    assert with_room.choose(make_segments([(64, 640)], 16)).view == "mixed"
    assert with_room.scratch_bytes > linked_planner(linked=False).with_scratch_for(3000, 640).scratch_bytes
    assert linked_planner(forced="unified").choose(make_segments([(64, 64)], 16)).view == "unified"
    apart = linked_planner(unified_reason=APART).choose(make_segments([(9000, 64)], 16))
    assert (apart.view, apart.reason) == ("mixed", f"the history is gathered: {APART}")
