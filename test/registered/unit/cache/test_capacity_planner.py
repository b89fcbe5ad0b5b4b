"""The capacity plan: the limits that GLM-5.2 must keep, and that the numbers are those of the engine's own code."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from cpkv.cache.allocator import PageAllocator
from cpkv.cache.capacity import allocatable_tokens
from cpkv.cache.capacity_plan import CapacityPlan, ContextNumbers
from cpkv.cache.capacity_planner import MAX_CONTEXT, CapacityPlanner
from cpkv.config.settings import EngineSettings
from cpkv.errors import ConfigError
from cpkv.layout.model_numbers import ModelNumbers, model_presets
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.view_costs import TAIL, BatchSizes
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit")

MIB, GIB, MILLION = 1 << 20, 1 << 30, 1 << 20
TINY = ModelNumbers(4, (True, True, False, False), 64, 16, 32, 4, 64, 4096)


def planner_of(model: ModelNumbers | str = "glm-5.2", memory: int = 60 * GIB, **changes: Any) -> CapacityPlanner:
    fields: dict[str, Any] = {
        "num_pages": 1,
        "enable_cp_shared_kv": True,
        "cp_size": 8,
        "chunk_size": 8192,
        "dtype": "bfloat16",
        "latent_dtype": "fp8",
        "index_dtype": "fp8",
    }
    numbers = model_presets()[model] if isinstance(model, str) else model
    return CapacityPlanner(numbers, EngineSettings(**(fields | changes)), memory)


@pytest.fixture(scope="module")
def glm52() -> CapacityPlan:
    return planner_of().report((131072,))


def scratch(numbers: ContextNumbers) -> dict[str, int]:
    return {view.view: view.scratch_bytes for view in numbers.views}


def test_glm52_at_a_million_tokens_keeps_its_scratch_small_with_packed_rows(glm52: CapacityPlan) -> None:
    held = scratch(glm52.million)
    assert held["mixed"] <= 1.6 * GIB
    assert held["blocked"] <= 256 * MIB
    assert held["unified"] < held["mixed"] / 8


def test_glm52_at_a_million_tokens_keeps_its_scratch_small_with_bfloat16_rows() -> None:
    held = scratch(planner_of(latent_dtype=None).context_numbers(MILLION))
    assert held["mixed"] <= 2.6 * GIB
    assert held["blocked"] <= 256 * MIB


def test_unified_holds_no_latent_rows_but_the_tail_of_the_chunk(glm52: CapacityPlan) -> None:
    unified = next(view for view in glm52.million.views if view.view == "unified")
    row = glm52.latent_row_bytes
    chunk_rows = {TAIL: (78 * 64 + 8192) * row, "exchange": 8192 * row}
    # What else it holds are index keys, and the tail does not grow with the context.
    assert {name: size for name, size in unified.buffers.items() if "key" not in name} == chunk_rows
    short = next(view for view in glm52.contexts[0].views if view.view == "unified")
    assert short.buffers[TAIL] == unified.buffers[TAIL]


def test_eight_ranks_hold_nearly_eight_times_as_much_with_scratch_counted(glm52: CapacityPlan) -> None:
    ratio = {view.view: view.capacity_ratio for view in glm52.million.views}
    for view in ("unified", "mixed", "blocked"):
        assert ratio[view] >= 0.97 * 8
    # Neither is it owed to the scratch that a replicated pool needs.
    unified = next(view for view in glm52.million.views if view.view == "unified")
    assert unified.capacity.tokens >= 0.97 * 8 * glm52.replicated.tokens
    assert glm52.capacity_ratio == 8


def test_sizes_of_glm52_rows_by_hand(glm52: CapacityPlan) -> None:
    assert glm52.latent_row_bytes == 512 + 4 * 4 + 64 * 2 and glm52.index_row_bytes == 128 + 4
    assert glm52.token_bytes == 78 * 656 + 21 * 132 and glm52.page_bytes == 64 * glm52.token_bytes
    million = glm52.million
    assert million.pages == 16384 and million.replicated_bytes == 16384 * glm52.page_bytes
    assert million.shared_bytes * 8 == million.replicated_bytes
    mixed = next(view for view in million.views if view.view == "mixed")
    assert mixed.moved_bytes == (MILLION - 8192) * glm52.token_bytes


def test_the_planner_takes_unified_on_one_host_and_mixed_over_several(glm52: CapacityPlan) -> None:
    one, several = glm52.million.choices
    assert (one.hosts, one.view) == ("one", "unified") and (several.hosts, several.view) == ("several", "mixed")
    held = scratch(glm52.million)
    assert one.scratch_bytes == held["unified"] and several.scratch_bytes == held["mixed"]
    assert one.reason and "several hosts" in several.reason


@pytest.mark.parametrize("memory_pages", [2, 3, 17, 100])
@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_capacity_is_what_the_allocator_hands_out(memory_pages: int, cp_size: int) -> None:
    planner = planner_of(TINY, cp_size=cp_size, page_size=16, chunk_size=64)
    page = planner.geometry.page_bytes
    planner = dataclasses.replace(planner, kv_memory=memory_pages * page + page - 1)
    for shared in (False, True):
        placement = PagePlacement(16, cp_size if shared else 1)
        filled = planner.capacity(0, shared)
        assert filled.tokens == allocatable_tokens(memory_pages, placement)
        assert planner.capacity(page - 1, shared).pages == filled.pages
        less = planner.capacity(page, shared).tokens
        assert less == (allocatable_tokens(memory_pages - 1, placement) if memory_pages > 2 else 0)
    assert planner.capacity(0, True).pages == cp_size * planner.capacity(0, False).pages


@pytest.mark.parametrize("context", [1, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize("view", ["replicated", "full", "mixed", "unified", "blocked"])
def test_costs_are_those_of_a_batch_whose_pages_the_allocator_gave(context: int, view: Any) -> None:
    planner = planner_of(TINY, cp_size=4, page_size=16, chunk_size=64)
    placement = planner.placement(True)
    allocator = PageAllocator(400, placement)
    pages = tuple(int(page) for page in allocator.allocate("a", placement.pages_for(context)))
    start = max(0, context - 64)
    segment = Segment("a", start, (0,) * (context - start), pages, True)
    plan = BatchPlan.build(BatchSpec(0, (segment,), "interleave", "mixed"), placement, 4)
    expected = planner.costs.cost(view, BatchSizes.of(plan, planner.options))
    assert planner.last_chunk(view, context) == expected
    assert expected.held_bytes <= planner.set_aside(view, context).held_bytes


def test_current_serves_only_a_first_chunk() -> None:
    planner = planner_of(TINY, cp_size=4, page_size=16, chunk_size=64)
    served = {
        context: next(view for view in planner.views(context) if view.view == "current") for context in (64, 65, 4096)
    }
    assert [view.serves_context for view in served.values()] == [True, False, False]
    assert served[64].scratch_bytes == served[4096].scratch_bytes
    assert planner.context_numbers(64).choices[0].view == "current"


def test_a_given_scratch_refuses_what_does_not_fit_and_is_what_is_set_aside() -> None:
    planner = planner_of(scratch_bytes=70 * MIB)
    numbers = planner.context_numbers(MILLION)
    serving = [view.view for view in numbers.views if view.serves_context]
    assert serving == ["blocked"]
    assert {choice.view for choice in numbers.choices} == {"blocked"}
    assert {choice.scratch_bytes for choice in numbers.choices} == {70 * MIB}
    refused = planner_of(scratch_bytes=MIB).context_numbers(MILLION).choices
    assert {choice.view for choice in refused} == {None}
    assert all("raise --scratch-bytes to" in choice.reason for choice in refused)


def test_a_forced_view_is_the_only_one_beside_replicated() -> None:
    numbers = planner_of(kv_view="unified").context_numbers(131072)
    assert [view.view for view in numbers.views] == ["replicated", "unified"]
    one, several = numbers.choices
    assert one.view == "unified" and several.view is None and "leave out --kv-view" in several.reason


def test_without_prefetch_there_is_one_latent_buffer() -> None:
    double, single = (
        next(view for view in planner_of(prefetch=prefetch).views(MILLION) if view.view == "mixed")
        for prefetch in (True, False)
    )
    assert 0 <= double.scratch_bytes - single.scratch_bytes - double.buffers["latent 1"] < 64
    assert "latent 1" not in single.buffers and double.moved_bytes == single.moved_bytes


def test_one_rank_shares_with_nobody() -> None:
    plan = planner_of(TINY, memory=GIB, enable_cp_shared_kv=False, cp_size=1, page_size=16).report((1000, 8192))
    assert plan.capacity_ratio == 1 and plan.shared == plan.replicated
    assert [view.view for view in plan.million.views] == ["replicated"] and plan.million.choices == ()
    assert [numbers.beyond_model for numbers in plan.contexts] == [False, True]


def test_memory_that_the_scratch_fills_holds_nothing() -> None:
    planner = planner_of(memory=140 * MIB)
    views = {view.view: view for view in planner.views(MILLION)}
    assert views["mixed"].capacity.pages == 0 and views["mixed"].capacity_ratio == 0
    assert views["replicated"].capacity.tokens == 0
    assert views["blocked"].capacity.pages == (140 * MIB - views["blocked"].scratch_bytes) // 3452160 * 8 - 8


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cp_size": 0}, "cp_size is 0; it must be from 1 to 8"),
        ({"cp_size": 9}, "cp_size is 9"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"index_dtype": "float32"}, "do not exist"),
        ({"memory": 1000}, "take 6904320; raise it to that or more"),
        ({"memory": 6904319}, "take 6904320; raise it to that or more"),
        ({"memory": 10 << 40}, "is too much for one pool"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planner_of(**changes).report((1000,))
    assert told in str(caught.value)


def test_the_smallest_memory_that_is_taken_holds_a_page_of_every_rank() -> None:
    assert planner_of(memory=6904320).report((1,)).shared.pages == 8


@pytest.mark.parametrize("context", [0, -1, MAX_CONTEXT + 1])
def test_a_context_out_of_range_is_refused(context: int) -> None:
    with pytest.raises(ConfigError, match=f"--context is {context} tokens; it must be from 1 to {MAX_CONTEXT}"):
        planner_of().context_numbers(context)


def test_the_size_of_computed_values_is_the_engines() -> None:
    import torch

    from cpkv.model.norms import compute_dtype_of

    for dtype in ("float64", "float32", "bfloat16"):
        index = dtype if dtype == "float64" else "fp8"
        planner = planner_of(dtype=dtype, latent_dtype=None, index_dtype=index)
        assert planner.costs.queries.item_bytes == compute_dtype_of(getattr(torch, dtype)).itemsize


def test_the_plan_is_plain_data(glm52: CapacityPlan) -> None:
    text = msgspec.json.encode(glm52)
    assert msgspec.json.decode(text, type=CapacityPlan) == glm52
