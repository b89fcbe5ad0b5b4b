"""Views read by kernels: shared equals replicated bit for bit on a GPU, and through Triton's interpreter on the CPU.

Ranks are threads; on a GPU they share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_models import ON_CUDA, counted, decode_together, load_model, one_at_a_time
from pool_comparison import BLOCKED, FULL, MIXED, UNIFIED, VIEW_KINDS, ViewKind, check_views, run_pool

from cpkv.config.names import IndexDtype, LatentDtype
from cpkv.ops.kernels import triton_kernels
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.registration import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=24, suite="models")
register_cuda_ci(est_time=60, suite="models", num_gpus=1)

CHUNK, PAGE_SIZE = (1000, 64) if ON_CUDA else (10, 4)
SMALL = TinyShape(
    num_hidden_layers=2,
    num_attention_heads=4,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    index_n_heads=4,
    index_topk=16 if ON_CUDA else 8,
)
EVERY_DAY: dict[tuple[str, LatentDtype, IndexDtype], tuple[ViewKind, ...]] = {
    ("float32", "float32", "fp8"): (UNIFIED, MIXED),
    ("float32", "fp8", "fp8"): (FULL, BLOCKED),
}
FORMATS: tuple[tuple[str, LatentDtype, IndexDtype], ...] = (
    *EVERY_DAY,
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "fp8"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "fp8", "fp8"),
)


@pytest.mark.parametrize("formats", FORMATS if ON_CUDA else EVERY_DAY, ids="-".join)
def test_every_view_has_the_bits_of_replicated(
    tmp_path: Path, prompt: Callable, formats: tuple[str, LatentDtype, IndexDtype]
) -> None:
    """Chunks that begin inside pages, requests with and without history in one batch, poisoned pools and scratch."""
    dtype, latent_dtype, index_dtype = formats
    lengths = (2900, 700, 130) if ON_CUDA else (13, 5, 2)
    check_views(
        load_model(tmp_path, SMALL, dtype),
        {name: prompt(length, seed) for seed, (name, length) in enumerate(zip("abc", lengths, strict=True))},
        VIEW_KINDS if ON_CUDA else EVERY_DAY[formats],
        dtype=latent_dtype,
        index_dtype=index_dtype,
        page_size=PAGE_SIZE,
        cp_size=4 if ON_CUDA else 2,
        chunk_size=CHUNK,
        strategy="zigzag",
        kernels=one_at_a_time(triton_kernels()),
    )


@pytest.mark.parametrize("index_dtype", ["float32", "fp8"])
def test_kernels_compute_what_plain_torch_computes(tmp_path: Path, prompt: Callable, index_dtype: IndexDtype) -> None:
    """Logits within rounding. With fp8 keys queries are rounded to fp8 too, so a few of the chosen keys differ."""
    model = load_model(tmp_path, SMALL, "float32")
    # The first two choose as many keys in one batch, and attend in one launch; the third is cut.
    lengths = (1000, 900, 1200) if ON_CUDA else (10, 9, 12)
    prompts = {name: prompt(length, seed) for seed, (name, length) in enumerate(zip("abc", lengths, strict=True))}
    calls: list[str] = []
    ours_in_turn = counted(one_at_a_time(triton_kernels()), "fp8_indexer_topk", calls)
    runs = [
        run_pool(
            model,
            prompts,
            shared=True,
            dtype="float32",
            index_dtype=index_dtype,
            page_size=PAGE_SIZE,
            cp_size=2,
            chunk_size=2 * CHUNK,
            strategy="zigzag",
            kind=MIXED,
            kernels=kernels,
        ).trace
        for kernels in (ours_in_turn, None)
    ]
    assert bool(calls) == (index_dtype == "fp8"), "fp8 keys are scored and chosen in one, since the view has all rows"
    for name in prompts:
        ours, theirs = (run.choices[name][0] for run in runs)
        if index_dtype == "float32":
            assert (ours == theirs).all(dim=1).float().mean() > 0.999
            logits = [run.logits[name].double() for run in runs]
            assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[1].abs().max()
            continue
        assert torch.equal((ours >= 0).sum(dim=1), (theirs >= 0).sum(dim=1))
        pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
        shared = sum(len(set(row) & set(other) - {-1}) for row, other in pairs)
        assert shared > 0.95 * int((theirs >= 0).sum())


def test_decoding_by_page_tables_is_decoding_one_by_one(tmp_path: Path, prompt: Callable) -> None:
    """Requests on both sides of topk, in one launch of each kernel; the page that a token begins is there."""
    model = load_model(tmp_path, SMALL, "float32")
    lengths = (1100, 15, 700) if ON_CUDA else (13, 3, 10)
    prompts = {name: prompt(length, seed) for seed, (name, length) in enumerate(zip("abc", lengths, strict=True))}
    one_by_one = one_at_a_time(triton_kernels())
    # The references stand for the vendors' paged forms.
    calls: list[str] = []
    paged = counted(replace(one_by_one, paged_page_size=PAGE_SIZE), "sparse_mla_pages", calls)
    (ours, our_logits), (theirs, their_logits) = (
        decode_together(model, kernels, prompts, PAGE_SIZE, CHUNK) for kernels in (paged, one_by_one)
    )
    assert len(calls) == model.shape.num_layers, "each layer attends once, for all requests"
    assert ours.keys() == theirs.keys() == {0}
    assert torch.equal(ours[0], theirs[0])
    for name, logits in their_logits.items():
        assert (our_logits[name] - logits).abs().max() < 1e-4 * logits.abs().max()
