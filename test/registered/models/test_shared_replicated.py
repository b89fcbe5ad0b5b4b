"""Shared equals replicated bit for bit: the same requests, chunks and batches through either pool, in one run.

Logits of every position, chosen positions, and every stored byte of every token. Pools start poisoned with NaN bytes,
and page ids are shuffled, so whatever reads a byte that nobody wrote, or a page of someone else, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.model.shape import ModelShape
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.testing.bits import StoredRequest, assert_same_bits, assert_same_rows
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.ranks import PrefillTrace, ThreadedRanks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=60, suite="models")

FORMATS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "fp8"), ("bfloat16", "fp8"))
SMALL = TinyShape(num_hidden_layers=2, index_topk=16)


def enough_pages(prompts: dict[str, list[int]], page_size: int, owners: int) -> int:
    """Logical pages for the prompts, reserved ones included, a multiple of `owners`."""
    return (-(-sum(-(-len(ids) // page_size) for ids in prompts.values()) // owners) + 1) * owners


def check_same_bits(
    model: object,
    prompts: dict[str, list[int]],
    *,
    dtype: str,
    index_dtype: str,
    page_size: int,
    cp_size: int,
    chunk_size: int,
    strategy: str,
    current_reuse: bool = True,
) -> tuple[ThreadedRanks, PrefillTrace]:
    """Run both kinds of pool and compare everything; returns the shared run."""
    geometry = model.shape.geometry(page_size, dtype, index_dtype)  # type: ignore[attr-defined]
    runs = []
    for shared in (True, False):
        owners = cp_size if shared else 1
        num_pages = enough_pages(prompts, page_size, owners)
        ranks = ThreadedRanks(model, geometry, cp_size=cp_size, shared=shared, num_pages=num_pages)  # type: ignore[arg-type]
        trace = ranks.prefill(prompts, chunk_size=chunk_size, strategy=strategy, current_reuse=current_reuse)  # type: ignore[arg-type]
        runs.append((ranks, trace))
    (shared_ranks, shared_trace), (replicated_ranks, replicated_trace) = runs
    for name, ids in prompts.items():
        assert_same_bits(shared_trace.logits[name], replicated_trace.logits[name], f"logits of {name}")
        assert not shared_trace.logits[name].isnan().any(), f"logits of {name} hold NaN"
        assert_same_bits(shared_trace.last_logits[name], replicated_trace.last_logits[name], f"last logits of {name}")
        for layer, chosen in shared_trace.choices[name].items():
            assert_same_bits(chosen, replicated_trace.choices[name][layer], f"choice of {name} in layer {layer}")
        stored = [StoredRequest(ranks.pools, ranks.placement, trace.pages[name], len(ids)) for ranks, trace in runs]
        assert_same_rows(*stored, f"stored rows of {name}")
    assert all(sequence == shared_ranks.sequences[0] for sequence in shared_ranks.sequences), "collectives differ"
    return shared_ranks, shared_trace


@pytest.mark.parametrize(("dtype", "index_dtype"), FORMATS)
@pytest.mark.parametrize(
    ("family", "cp_size", "strategy", "page_size", "chunk_size"),
    [
        ("glm5", 4, "zigzag", 16, 77),
        ("glm52", 3, "interleave", 3, 50),
        ("deepseek-v32", 2, "zigzag", 64, 1000),
        ("glm52", 8, "zigzag", 1, 61),
        ("glm5", 7, "interleave", 64, 33),
    ],
)
def test_a_batch_of_requests_has_the_same_bits(
    hot_model: Callable,
    prompt: Callable,
    family: str,
    cp_size: int,
    strategy: str,
    page_size: int,
    chunk_size: int,
    dtype: str,
    index_dtype: str,
) -> None:
    """Kinds 16, 20, 24, 25: requests of different history in one batch, a long batch and then a short one."""
    _, model = hot_model(family, torch_dtype(dtype))
    prompts = {"long": prompt(150, 1), "one": prompt(1, 2), "short": prompt(37, 3)}
    check_same_bits(
        model,
        prompts,
        dtype=dtype,
        index_dtype=index_dtype,
        page_size=page_size,
        cp_size=cp_size,
        chunk_size=chunk_size,
        strategy=strategy,
    )


@settings(max_examples=60)
@given(data=st.data())
def test_any_batch_has_the_same_bits(hot_model: Callable, prompt: Callable, data: st.DataObject) -> None:
    """Any lengths of at most 300 tokens in all, ranks, split, chunk, page, with and without current reuse."""
    dtype, index_dtype = data.draw(st.sampled_from(FORMATS), "formats")
    family = data.draw(st.sampled_from(("glm5", "glm52", "deepseek-v32")), "family")
    _, model = hot_model(family, torch_dtype(dtype), 4, SMALL)
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=3), "lengths")
    check_same_bits(
        model,
        {f"r{i}": prompt(length, i) for i, length in enumerate(lengths)},
        dtype=dtype,
        index_dtype=index_dtype,
        page_size=data.draw(st.sampled_from((1, 3, 16, 64)), "page_size"),
        cp_size=data.draw(st.integers(1, 8), "cp_size"),
        chunk_size=data.draw(st.integers(1, 120), "chunk_size"),
        strategy=data.draw(st.sampled_from(("zigzag", "interleave")), "strategy"),
        current_reuse=data.draw(st.booleans(), "current_reuse"),
    )


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
def test_a_chunk_without_history_gathers_nothing_and_reads_no_pool_row(
    hot_model: Callable, prompt: Callable, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is poisoned behind every write, so a single row read from it would make a logit NaN."""
    from cpkv.pool.page_pool import PagePool

    _, model = hot_model("glm5", torch.float32)
    prompts = {"a": prompt(100, 1), "b": prompt(41, 2)}
    geometry = model.shape.geometry(16, "float32", "float32")
    honest = ThreadedRanks(model, geometry, cp_size=4, shared=True, num_pages=enough_pages(prompts, 16, 4))
    expected = honest.prefill(prompts, chunk_size=200, strategy=strategy)
    write = PagePool.write

    def write_then_poison(pool: PagePool, *arguments: object) -> None:
        write(pool, *arguments)  # type: ignore[arg-type]
        pool.poison(list(range(pool.local_pages)))

    monkeypatch.setattr(PagePool, "write", write_then_poison)
    poisoned = ThreadedRanks(model, geometry, cp_size=4, shared=True, num_pages=enough_pages(prompts, 16, 4))
    trace = poisoned.prefill(prompts, chunk_size=200, strategy=strategy)
    for name in prompts:
        assert_same_bits(trace.logits[name], expected.logits[name], f"logits of {name}")
    for counters in poisoned.counters:
        assert counters.batches == {"current": 1}
        assert counters.moved_bytes == 0, "a chunk without history gathered pages"
        assert counters.history_bytes == 0
    assert all("pages" not in collective.label for collective in poisoned.sequences[0])


def test_forcing_the_full_view_changes_no_bit(hot_model: Callable, prompt: Callable) -> None:
    """`--no-current-reuse`: the same logits through another view, and the counters say so."""
    _, model = hot_model("glm52", torch.float32)
    prompts = {"a": prompt(90, 1), "b": prompt(17, 2)}
    check = partial(
        check_same_bits,
        model,
        prompts,
        dtype="float32",
        index_dtype="fp8",
        page_size=16,
        cp_size=3,
        chunk_size=200,
        strategy="zigzag",
    )
    reused_ranks, reused = check()
    forced_ranks, forced = check(current_reuse=False)
    assert reused_ranks.counters[0].batches == {"current": 1}
    assert forced_ranks.counters[0].batches == {"full": 1}
    assert forced_ranks.counters[0].moved_bytes > 0
    assert forced_ranks.counters[0].history_bytes == 0, "a chunk without history has no history to gather"
    for name in prompts:
        assert_same_bits(forced.logits[name], reused.logits[name], f"logits of {name}")


@pytest.mark.parametrize(("page_size", "cp_size"), list(product((1, 16, 64), (1, 3, 8))))
def test_the_ranks_hold_one_copy_and_a_trash_page_each(
    hot_model: Callable, prompt: Callable, page_size: int, cp_size: int
) -> None:
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
