"""Shared equals replicated bit for bit: the same requests, chunks and batches through either pool, in one run.

Logits of every position, chosen positions, and every byte of every page. Pools start poisoned with NaN bytes, and page
ids are shuffled, so whatever reads a byte that nobody wrote, or a page of someone else, shows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from allpairspy import AllPairs
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_comparison import (
    BLOCKED,
    FULL,
    MIXED,
    UNIFIED,
    VIEW_KINDS,
    ViewKind,
    check_same_bits,
    check_views,
    run_pool,
)
from reference_checks import check_float64, pages_of

from cpkv.errors import NumericsError
from cpkv.model.shape import ModelShape
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.pool.page_pool import PagePool
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.ranks import ThreadedRanks
from cpkv.testing.reference import ReferenceModel
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=120, suite="models")

FAMILIES = ("glm5", "glm52", "deepseek-v32")
SPLITS = ("zigzag", "interleave")
# Of the model, its latent rows and its index keys.
FORMATS = (
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float32", "float32", "fp8"),
    ("bfloat16", "bfloat16", "fp8"),
    ("float32", "fp8", "float32"),
    ("float32", "fp8", "fp8"),
    ("bfloat16", "fp8", "bfloat16"),
    ("bfloat16", "fp8", "fp8"),
)
SMALL = TinyShape(num_hidden_layers=2, index_topk=16)


def combinations() -> list[tuple[object, ...]]:
    """Every pair of view, format, ranks, page size, family, chunk size and split occurs; about 90."""
    values: tuple[Sequence[object], ...] = (
        VIEW_KINDS, FORMATS, range(1, 9), (1, 3, 16, 64), FAMILIES, (33, 77, 301), SPLITS,
    )  # fmt: skip
    return [tuple(row) for row in AllPairs(values)]


@pytest.mark.parametrize(
    ("kind", "formats", "cp_size", "page_size", "family", "chunk_size", "strategy"),
    combinations(),
    ids=lambda value: (
        str(value) if isinstance(value, ViewKind) else "-".join(value) if isinstance(value, tuple) else None
    ),
)
def test_a_batch_of_requests_has_the_same_bits(
    hot_model: Callable,
    prompt: Callable,
    kind: ViewKind,
    formats: tuple[str, str, str],
    cp_size: int,
    page_size: int,
    family: str,
    chunk_size: int,
    strategy: str,
) -> None:
    """Kinds 16, 20, 21, 24, 25: requests of different history in one batch, a long batch and then a short one."""
    model_dtype, dtype, index_dtype = formats
    # A layer's index slot is not its number then.
    types = ("full", "shared", "full", "shared") if family == "glm52" else None
    _, model = hot_model(family, torch_dtype(model_dtype), indexer_types=types)  # type: ignore[arg-type]
    check_same_bits(
        model,
        {"long": prompt(150, 1), "one": prompt(1, 2), "short": prompt(37, 3)},
        dtype=dtype,
        index_dtype=index_dtype,
        page_size=page_size,
        cp_size=cp_size,
        chunk_size=chunk_size,
        strategy=strategy,
        kind=kind,
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=67)
@given(data=st.data())
def test_any_batch_equals_replicated_and_the_reference(
    hot_model: Callable, prompt: Callable, family: str, data: st.DataObject
) -> None:
    """float64, at most 300 tokens in all: both pools to the bit, and the reference within 1e-9."""
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=3), "lengths")
    checkpoint, model = hot_model(family, torch.float64, data.draw(st.sampled_from((1, 4, 16)), "heads"), SMALL)
    prompts = {f"r{i}": prompt(length, i) for i, length in enumerate(lengths)}
    shared, _ = check_same_bits(
        model,
        prompts,
        dtype="float64",
        index_dtype="float64",
        page_size=data.draw(st.sampled_from((1, 3, 16, 64)), "page_size"),
        cp_size=data.draw(st.integers(1, 8), "cp_size"),
        chunk_size=-(-sum(lengths) // data.draw(st.integers(1, 12), "batches")),
        strategy=data.draw(st.sampled_from(SPLITS), "strategy"),
        kind=data.draw(st.sampled_from(VIEW_KINDS), "view"),
    )
    reference = ReferenceModel(checkpoint)
    for name, ids in prompts.items():
        check_float64(shared.trace, name, reference.forward(ids, record_indices=True))


@settings(max_examples=25)
@given(data=st.data())
def test_any_batch_has_the_same_bits(hot_model: Callable, prompt: Callable, data: st.DataObject) -> None:
    """The stored formats that are served, with few heads: ties, which no reference in float64 would decide alike."""
    model_dtype, dtype, index_dtype = data.draw(st.sampled_from(FORMATS), "formats")
    family = data.draw(st.sampled_from(FAMILIES), "family")
    _, model = hot_model(family, torch_dtype(model_dtype), 4, SMALL)  # type: ignore[arg-type]
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=3), "lengths")
    check_same_bits(
        model,
        {f"r{i}": prompt(length, i) for i, length in enumerate(lengths)},
        dtype=dtype,
        index_dtype=index_dtype,
        page_size=data.draw(st.sampled_from((1, 3, 16, 64)), "page_size"),
        cp_size=data.draw(st.integers(1, 8), "cp_size"),
        chunk_size=-(-sum(lengths) // data.draw(st.integers(1, 12), "batches")),
        strategy=data.draw(st.sampled_from(SPLITS), "strategy"),
        kind=data.draw(st.sampled_from(VIEW_KINDS), "view"),
    )


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
