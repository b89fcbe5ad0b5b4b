"""Rows of real size: 512 + 64 latent values, index keys of 128, the best 2048, 5,000 tokens.

Two layers and four heads keep it affordable; the widths that the cache and the choice see are those of the models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from test_shared_replicated import check_same_bits

from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.oracle import TransformersOracle
from cpkv.testing.ranks import ThreadedRanks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=75, suite="models")

TOKENS = 5000


def test_shared_equals_replicated_with_bfloat16_rows_and_fp8_keys(hot_model: Callable, prompt: Callable) -> None:
    """5,000 tokens over 4 ranks, the second chunk with history, bit for bit."""
    _, model = hot_model("glm5", torch.bfloat16, 4, TinyShape.real_rows())
    assert model.shape.topk == 2048
    ranks, _ = check_same_bits(
        model,
        {"r": prompt(TOKENS)},
        dtype="bfloat16",
        index_dtype="fp8",
        page_size=64,
        cp_size=4,
        chunk_size=3000,
        strategy="zigzag",
    )
    row_format = ranks.pools[0].geometry.row_format
    assert (row_format.latent_row_bytes, row_format.index_row_bytes) == (1152, 132)
    assert ranks.counters[0].batches == {"current": 1, "full": 1}


def test_float32_equals_transformers_where_keys_are_left_out(hot_model: Callable, prompt: Callable) -> None:
    """2,500 tokens, so that the last 452 queries leave keys out; logits of all positions within 1e-4."""
    checkpoint, model = hot_model("deepseek-v32", torch.float32, 4, TinyShape.real_rows())
    ids = prompt(2500)
    geometry = model.shape.geometry(64, "float32", "float32")
    ranks = ThreadedRanks(model, geometry, cp_size=3, shared=True, num_pages=45)
    ours = ranks.prefill({"r": ids}, chunk_size=1700, strategy="interleave")
    replay = [ours.choices["r"][layer].int() for layer in range(model.shape.num_layers)]
    assert int((replay[0][-1] >= 0).sum()) == 2048
    theirs = TransformersOracle(checkpoint).forward(ids, 256, replay=replay)
    assert float((ours.logits["r"] - theirs).abs().max()) <= 1e-4
