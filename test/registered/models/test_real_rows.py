"""Rows of real size: 512 + 64 latent values, index keys of 128, the best 2048.

Two layers and four heads keep it affordable; the widths that the cache and the choice see are those of the models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pool_comparison import (
    BLOCKED,
    FULL,
    MIXED,
    UNIFIED,
    PoolRun,
    check_same_bits,
    check_views,
    run_pool,
    stored_request,
)
from reference_checks import check_real_rows

from cpkv.layout.plan import BatchPlan
from cpkv.model.dsa_model import DsaModel
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=18, suite="models")

CP_SIZE, PAGE = 4, 64
SERVED: dict[str, Any] = {
    "dtype": "bfloat16",
    "index_dtype": "fp8",
    "page_size": PAGE,
    "cp_size": CP_SIZE,
    "strategy": "zigzag",
}
SCORE_TOLERANCE = 1e-5


def test_shared_equals_replicated_with_bfloat16_rows_and_fp8_keys(hot_model: Callable, prompt: Callable) -> None:
    """The second chunk with history and the best 512: bit for bit, and a few queries worked out by hand."""
    _, model = hot_model("glm5", torch.bfloat16, 4, replace(TinyShape.real_rows(), index_topk=512))
    shared, _ = check_same_bits(model, {"r": prompt(700)}, **SERVED, chunk_size=590)
    row_format = shared.ranks.pools[0].geometry.row_format
    assert (row_format.latent_row_bytes, row_format.index_row_bytes) == (1152, 132)
    assert shared.ranks.counters[0].batches == {"current": 1, "mixed": 1}
    check_some_queries(model, shared)


def test_the_best_2048_over_all_ranks(hot_model: Callable, prompt: Callable) -> None:
    """2,150 tokens, so that the last 102 queries leave keys out."""
    _, model = hot_model("glm5", torch.bfloat16, 4, TinyShape.real_rows())
    assert model.shape.topk == 2048
    run = run_pool(model, {"r": prompt(2150)}, shared=True, **SERVED, chunk_size=2090)
    assert run.ranks.counters[0].batches == {"current": 1, "mixed": 1}
    check_some_queries(model, run)


def test_every_view_of_packed_rows(hot_model: Callable, prompt: Callable) -> None:
    """Latent rows of 656 bytes: 512 e4m3 values, 4 scales and 64 bfloat16 values."""
    _, model = hot_model("glm52", torch.bfloat16, 4, replace(TinyShape.real_rows(), index_topk=128))
    runs, _ = check_views(
        model,
        {"r": prompt(400), "s": prompt(70, 1)},
        (MIXED, FULL, UNIFIED, BLOCKED),
        dtype="fp8",
        index_dtype="fp8",
        page_size=PAGE,
        cp_size=CP_SIZE,
        chunk_size=250,
        strategy="interleave",
    )
    for run in runs:
        row_format = run.ranks.pools[0].geometry.row_format
        assert (row_format.latent_row_bytes, row_format.index_row_bytes) == (656, 132)


@torch.inference_mode()
def check_some_queries(model: DsaModel, run: PoolRun) -> None:
    """Some queries of the second chunk, from the stored bytes and plain formulas in float64.

    The choice of layer 0 must be right; what layer 0 attended to shows in the rows that layer 1 stored.
    """
    plan = BatchPlan.build(run.trace.specs[1], run.ranks.placement, CP_SIZE)
    local = plan.local_tokens(0)
    some = torch.tensor([0, 1, len(local.positions) // 2, len(local.positions) - 1])
    positions = torch.from_numpy(local.positions)
    hidden = model.embed(torch.from_numpy(local.token_ids))
    projected = model.project(0, hidden, model.rotation(positions))
    assert projected.attention.index is not None
    stored = stored_request(run, "r")
    rows = stored.latent_rows()
    keys = stored.index_keys()[0]
    scale = keys[:, 128:].contiguous().view(torch.float32).double()
    index_keys = keys[:, :128].contiguous().view(torch.float8_e4m3fn).double() * scale
    latent = rows[0].contiguous().view(torch.bfloat16).double()
    attended = []
    for number in some.tolist():
        position = int(positions[number])
        weights = projected.attention.index.weights[number].double()
        scores = weights @ (projected.attention.index.queries[number].double() @ index_keys[: position + 1].T).relu()
        chosen = run.trace.choices["r"][0][position]
        assert int((chosen >= 0).sum()) == len(chosen.unique()) == model.shape.topk
        kth = scores.topk(model.shape.topk).values[-1]
        left = torch.ones(position + 1, dtype=torch.bool)
        left[chosen] = False
        assert scores[chosen].min() >= kth - SCORE_TOLERANCE, f"position {position} chose a key that is too low"
        assert scores[left].max() <= kth + SCORE_TOLERANCE, f"position {position} left out a key that is among the best"
        logits = projected.attention.queries[number].double() @ latent[chosen].T * model.shape.softmax_scale
        attended.append(logits.softmax(-1) @ latent[chosen, :512])
    after = model.finish(0, hidden[some], torch.stack(attended).float())
    expected = model.project(1, after, model.rotation(positions[some])).latent.float()
    got = rows[1, positions[some]].contiguous().view(torch.bfloat16)[:, :512].float()
    difference = float((got - expected).abs().max())
    print(f"latent of layer 1: {difference:.2e} of {float(expected.std()):.2f}")
    assert difference <= 0.05 * float(expected.std()), f"layer 1 stored rows that differ by {difference:.3g}"


def test_float32_equals_transformers_where_keys_are_left_out(
    hot_model: Callable, prompt: Callable, oracle: Callable
) -> None:
    """1,200 tokens and the best 512, so that 688 queries leave keys out: choices right, logits within 1e-4."""
    check_real_rows(hot_model, prompt, oracle, tokens=1200, topk=512)
