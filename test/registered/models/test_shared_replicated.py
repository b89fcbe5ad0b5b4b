"""Shared equals replicated bit for bit: the same requests, chunks and batches through either pool, in one run.

Logits of every position, chosen positions, and every byte of every page. Pools start poisoned with NaN bytes, and page
ids are shuffled, so whatever reads a byte that nobody wrote, or a page of someone else, shows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_comparison import (
    BLOCKED,
    FORMATS,
    FULL,
    MIXED,
    UNIFIED,
    VIEW_KINDS,
    ViewKind,
    check_views,
    run_pool,
)
from random_batches import FAMILIES, SPLITS, check_both_pools_and_reference, check_served_formats
from reference_checks import pages_of
from view_cases import ThreeRequests, daily_kinds, daily_three_requests

from cpkv.errors import NumericsError
from cpkv.model.shape import ModelShape
from cpkv.pool.page_pool import PagePool
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.ranks import ThreadedRanks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="models")


@pytest.mark.parametrize("case", daily_three_requests(), ids=str)
def test_a_batch_of_requests_has_the_same_bits(hot_model: Callable, prompt: Callable, case: ThreeRequests) -> None:
    """Kinds 16, 20, 21, 24, 25: requests of different history in one batch, a long batch and then a short one."""
    case.check(hot_model, prompt, daily_kinds(case))


def test_every_view_meets_every_format_split_and_number_of_ranks() -> None:
    """Each kind of view meets half of the formats and numbers of ranks, and with its like all of them."""
    assert {kind for case in daily_three_requests() for kind in daily_kinds(case)} == set(VIEW_KINDS)
    assert all(
        {"mixed", "full", "unified", "blocked"} <= {k.view for k in daily_kinds(c)} for c in daily_three_requests()
    )
    cases = [case for case in daily_three_requests() if case.chunk_size < 150]
    assert {case.formats for case in cases} == set(FORMATS)
    assert {case.cp_size for case in cases} == set(range(1, 9))
    assert {case.strategy for case in cases} == set(SPLITS)
    assert {case.family for case in cases} == set(FAMILIES)
    for ahead in (MIXED, FULL):
        assert {case.strategy for case in cases if ahead in daily_kinds(case)} == set(SPLITS)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(data=st.data())
def test_any_batch_equals_replicated_and_the_reference(
    hot_model: Callable, prompt: Callable, reference_model: Callable, family: str, data: st.DataObject
) -> None:
    """float64, at most 300 tokens in all: both pools to the bit, and the reference within 1e-9."""
    check_both_pools_and_reference(data, family, hot_model, prompt, reference_model)  # type: ignore[arg-type]


@settings(max_examples=8)
@given(data=st.data())
def test_any_batch_has_the_same_bits(hot_model: Callable, prompt: Callable, data: st.DataObject) -> None:
    """The stored formats that are served."""
    check_served_formats(data, hot_model, prompt)


def poison_behind_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no pool holds a row any longer than it takes to write it."""
    write = PagePool.write

    def write_then_poison(pool: PagePool, *arguments: object) -> None:
        write(pool, *arguments)  # type: ignore[arg-type]
        pool.poison(list(range(pool.local_pages)))

    monkeypatch.setattr(PagePool, "write", write_then_poison)


@pytest.mark.parametrize("index_dtype", ["float32", "fp8"])
@pytest.mark.parametrize("strategy", SPLITS)
def test_a_chunk_without_history_gathers_nothing_and_reads_no_pool_row(
    hot_model: Callable, prompt: Callable, strategy: str, index_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is poisoned behind every write, so a single row read from it would make a logit NaN."""
    _, model = hot_model("glm5", torch.float32)
    prompts = {"a": prompt(100, 1), "b": prompt(41, 2)}
    geometry = model.shape.geometry(16, "float32", index_dtype)
    num_pages = pages_of([100, 41], 16, 4)
    honest = ThreadedRanks(model, geometry, cp_size=4, shared=True, num_pages=num_pages)
    expected = honest.prefill(prompts, chunk_size=200, strategy=strategy)  # type: ignore[arg-type]
    poison_behind_writes(monkeypatch)
    poisoned = ThreadedRanks(model, geometry, cp_size=4, shared=True, num_pages=num_pages)
    trace = poisoned.prefill(prompts, chunk_size=200, strategy=strategy)  # type: ignore[arg-type]
    for name in prompts:
        assert_same_bits(trace.logits[name], expected.logits[name], f"logits of {name}")
    for counters in poisoned.counters:
        assert counters.batches == {"current": 1}
        assert counters.moved_bytes == 0, "a chunk without history gathered pages"
        assert counters.history_bytes == 0
    assert all("pages" not in collective.label for collective in poisoned.sequences[0])


def test_a_chunk_that_does_read_the_pool_is_seen(
    hot_model: Callable, prompt: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poison of the test above is one that shows: a view of the pool brings it to a score or a logit."""
    _, model = hot_model("glm5", torch.float32)
    poison_behind_writes(monkeypatch)
    for kind in (MIXED, FULL, UNIFIED, BLOCKED):
        with pytest.raises(NumericsError, match="NaN"):
            run_pool(
                model,
                {"a": prompt(100)},
                shared=True,
                dtype="float32",
                index_dtype="float32",
                page_size=16,
                cp_size=4,
                chunk_size=70,
                strategy="zigzag",
                kind=kind,
            )


def test_turning_current_reuse_off_changes_no_bit(hot_model: Callable, prompt: Callable) -> None:
    """`--no-current-reuse`: the same logits through another view, and the counters say so."""
    _, model = hot_model("glm52", torch.float32)
    prompts = {"a": prompt(90, 1), "b": prompt(17, 2)}
    kinds = (ViewKind(), ViewKind(current_reuse=False), FULL)
    runs, _ = check_views(
        model,
        prompts,
        kinds,
        dtype="float32",
        index_dtype="fp8",
        page_size=16,
        cp_size=3,
        chunk_size=200,
        strategy="zigzag",
    )
    counters = [run.ranks.counters[0] for run in runs]
    assert [counter.batches for counter in counters] == [{"current": 1}, {"mixed": 1}, {"full": 1}]
    assert [counter.moved_bytes for counter in counters] == [0, 0, 0], "there is no history to gather"
    held = [counter.scratch_bytes for counter in counters]
    assert held[0] < held[1] < held[2]


@pytest.mark.parametrize(("page_size", "cp_size"), list(product((1, 16, 64), (1, 3, 8))))
def test_the_ranks_hold_one_copy_and_a_trash_page_each(hot_model: Callable, page_size: int, cp_size: int) -> None:
    """Kind 36: the sum of the allocated bytes is what the formula says, index keys included."""
    _, model = hot_model("glm52", torch.float32)
    shape: ModelShape = model.shape
    geometry = shape.geometry(page_size, "float32", "fp8")
    pages = 5 * cp_size
    ranks = ThreadedRanks(model, geometry, cp_size=cp_size, shared=True, num_pages=pages + cp_size)
    allocated = sum(pool.allocated_bytes for pool in ranks.pools)
    width = shape.kv_lora_rank + shape.rope_dim
    slots = sum(shape.has_indexer)
    bytes_per_page = page_size * (shape.num_layers * width * 4 + slots * (shape.index_dim + 4))
    assert allocated == pages * bytes_per_page + cp_size * bytes_per_page


def alive_tensors() -> dict[int, torch.Tensor]:
    """Every tensor that something still holds, by identity."""
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if type(thing) is torch.Tensor}


def test_nothing_holds_a_full_copy_at_rest(hot_model: Callable, prompt: Callable) -> None:
    """After a prefill with history, what is alive beside the pools is less than one layer of one copy."""
    _, model = hot_model("glm5", torch.float32)
    before = alive_tensors()
    ranks = ThreadedRanks(
        model, model.shape.geometry(16, "float32", "float32"), cp_size=4, shared=True, num_pages=pages_of([400], 16, 4)
    )
    trace = ranks.prefill({"a": prompt(400)}, chunk_size=150)
    pages = len(trace.pages["a"])
    del trace
    own = {id(memory) for pool in ranks.pools for memory in (pool.latent, pool.index)}
    own |= {id(scratch._memory) for scratch in ranks.scratches}
    left = [t for key, t in alive_tensors().items() if key not in before and key not in own]
    copy = pages * ranks.pools[0].geometry.page_bytes
    held = sum(tensor.numel() * tensor.element_size() for tensor in left)
    assert held < copy / model.shape.num_layers, f"{held} bytes are held at rest, and a full copy has {copy}"
    for pool in ranks.pools:
        assert pool.allocated_bytes < copy / 2, "a pool is as large as a full copy"


@pytest.mark.parametrize("kind", [MIXED, MIXED._replace(prefetch=False)], ids=str)
def test_scratch_is_counted_and_holds_one_layer(hot_model: Callable, prompt: Callable, kind: ViewKind) -> None:
    """The same prompt through two and through four layers holds the same scratch: a layer's, not a model's.

    Two of them where the next layer is gathered ahead.
    """
    scratch = []
    for layers in (2, 4):
        _, model = hot_model("glm5", torch.float32, shape=TinyShape(num_hidden_layers=layers))
        geometry = model.shape.geometry(16, "float32", "float32")
        ranks = ThreadedRanks(
            model, geometry, cp_size=4, shared=True, num_pages=pages_of([800], 16, 4), options=kind.options
        )
        ranks.prefill({"a": prompt(800)}, chunk_size=150, view=kind.view)
        scratch.append([counters.scratch_bytes for counters in ranks.counters])
    latent, index = 800 * (64 + 16) * 4, 800 * 32 * 4
    buffers = 2 if kind.prefetch else 1
    # Index keys as blocks and in position order; the exchange and the current index keys are those of 150 tokens.
    one_layer = buffers * latent + 2 * index
    assert scratch[0] == scratch[1]
    assert all(0.9 * one_layer <= held <= 1.6 * one_layer for held in scratch[0]), f"{scratch[0]} for {one_layer}"
