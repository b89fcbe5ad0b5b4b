"""FlashMLA and DeepGEMM, unmodified, over every view: shared equals replicated bit for bit, ranks being threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_models import counted, decode_together, load_model, needs_of, one_at_a_time
from pool_comparison import check_views

from cpkv.config.names import LatentDtype
from cpkv.ops.kernels import open_kernels
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.registration import register_cuda_ci

register_cuda_ci(est_time=60, suite="models", num_gpus=1)

# FlashMLA takes 64 heads of 576 values, DeepGEMM 32 heads of 128.
VENDOR = TinyShape(
    num_hidden_layers=2,
    num_attention_heads=64,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=256,
)


@pytest.mark.parametrize("latent_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("cp_size", [4, 8])
def test_vendors_kernels_have_the_bits_of_replicated(
    tmp_path: Path, prompt: Callable, cp_size: int, latent_dtype: LatentDtype
) -> None:
    """Chunks with and without history; bfloat16 rows are read where they lie, packed ones are decoded first."""
    model = load_model(tmp_path, VENDOR, "bfloat16")
    kernels = open_kernels(model.device, "vendor", needs_of(model))
    check_views(
        model,
        {"a": prompt(3100), "b": prompt(400, 1)},
        dtype=latent_dtype,
        index_dtype="fp8",
        page_size=64,
        cp_size=cp_size,
        chunk_size=1000,
        strategy="interleave",
        kernels=one_at_a_time(kernels),
    )


def test_vendors_decode_by_page_tables(tmp_path: Path, prompt: Callable) -> None:
    """Within their rounding: FlashMLA's decode makes bfloat16 of scales and values."""
    model = load_model(tmp_path, VENDOR, "bfloat16")
    prompts = {"a": prompt(3100), "b": prompt(40, 1), "c": prompt(700, 2)}
    vendor = open_kernels(model.device, "vendor", needs_of(model))
    assert vendor.paged_page_size == 64
    calls: list[str] = []
    paged = counted(vendor, "sparse_mla_pages", calls)
    runs = [
        decode_together(model, one_at_a_time(kernels), prompts, 64, 1000)
        for kernels in (paged, replace(vendor, paged_page_size=None))
    ]
    assert len(calls) == model.shape.num_layers
    assert torch.equal(runs[0][0][0], runs[1][0][0])
    for name, logits in runs[1][1].items():
        assert (runs[0][1][name] - logits).norm() < 0.05 * logits.norm()
