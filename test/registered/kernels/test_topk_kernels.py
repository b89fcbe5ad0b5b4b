"""The exact choice by kernels, against the reference and Python's sort, over rows that take each of its paths."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from guarded_bytes import far_bytes
from poison import guarded, poisoned_outputs
from topk_cases import (
    MISLEADING,
    TOKENS,
    K,
    ScoreBlock,
    check_choice,
    few_valued_block,
    sampled_places,
    scores_with_garbage,
    shrink,
)

from cpkv.errors import NumericsError
from cpkv.ops.reference import topk as reference
from cpkv.ops.triton import topk
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=25, suite="kernels")
register_cuda_ci(est_time=90, suite="kernels", num_gpus=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def gaussian_rows(queries: int, tokens: int, seed: int = 0) -> list[list[float]]:
    return torch.randn(queries, tokens, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("small")
def test_few_values_choose_the_lowest_positions_of_the_ties(device: torch.device, seed: int) -> None:
    """ReLU makes many scores exactly 0; zeros of either sign tie, subnormals are above 0, infinities are scores."""
    random_ = random.Random(seed)
    for _ in range(3):
        check_choice(few_valued_block(random_, 800), device)


@pytest.mark.parametrize("k", [1, 33, 255, 256, 257, 600, 767, 768, 769, 1100])
@pytest.mark.usefixtures("small")
def test_any_k_on_either_side_of_a_limit(device: torch.device, k: int) -> None:
    """Rows shorter than k end in -1; k of 1, k of all; lists of either size, and more than a list holds."""
    random_ = random.Random(k)
    rows = [*gaussian_rows(2, 1060, k), random_.choices([0.0, -0.0, 0.5, 1.0], k=1060)]
    check_choice(ScoreBlock(rows, [1060, 600, k % 1060], k), device)


@pytest.mark.parametrize("edge", ["CANDIDATES", "TILE"])
@pytest.mark.usefixtures("small")
def test_limits_around_the_sizes_of_the_kernels(device: torch.device, edge: str) -> None:
    size = getattr(topk, edge)
    limits = [size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 0]
    check_choice(ScoreBlock(gaussian_rows(len(limits), 2 * size + 7), limits, 20), device)


def test_limits_around_the_sizes_as_they_are(device: torch.device) -> None:
    sizes = [*range(topk.CANDIDATES - 1, topk.CANDIDATES + 2), topk.TILE - 1, topk.TILE + 1, 12000, 0]
    check_choice(ScoreBlock(gaussian_rows(len(sizes), 12003), sizes, 2048), device)
    check_choice(ScoreBlock(gaussian_rows(2, 12003, 1), [11999, 3], 1), device)


@pytest.mark.parametrize("kind", MISLEADING)
@pytest.mark.usefixtures("small")
def test_rows_whose_sample_misleads(device: torch.device, kind: str) -> None:
    """The bound lets too many scores pass, or too few; the choice is exact all the same."""
    sampled = sampled_places(topk)
    assert K < len(sampled) < TOKENS // 2
    row = [MISLEADING[kind](at, at in sampled) for at in range(TOKENS)]
    check_choice(ScoreBlock([row, row[::-1]], [TOKENS, TOKENS - 9], K), device)


@pytest.mark.parametrize("split", [False, True])
def test_rows_of_a_million(device: torch.device, monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    """Sizes as they are; a quarter of a million for the interpreter."""
    tokens = 1 << (20 if device.type == "cuda" else 18)
    scores = torch.randn(2, tokens, generator=torch.Generator().manual_seed(0))
    scores[1] = (scores[1] * 8).round()
    limits = torch.tensor([tokens, tokens - 5])
    monkeypatch.setattr(topk, "PROGRAMS", topk.PROGRAMS if split else 1)
    with poisoned_outputs():
        chosen = topk.exact_topk(scores.to(device), limits.to(device), 2048)
    assert_same_bits(chosen.cpu(), reference.exact_topk(scores, limits, 2048), "chosen of a million")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("values", ["normal", "equal"])
def test_rows_that_lie_two_to_the_31_scores_apart(device: torch.device, values: str) -> None:
    """By bounds and by digits: offsets have 64 bits."""
    tokens, apart = 700, 2**31 + 64
    memory = far_bytes(device, 4 * (apart + tokens)).view(torch.float32)
    scores = memory.as_strided((2, tokens), (apart, 1))
    near = torch.tensor(gaussian_rows(2, tokens)) if values == "normal" else torch.ones(2, tokens)
    scores.copy_(near)
    limits = torch.tensor([650, 699])
    chosen = topk.exact_topk(scores, limits.to(device), 100)
    assert_same_bits(chosen.cpu(), reference.exact_topk(near, limits, 100), "chosen of rows far apart")


@pytest.mark.usefixtures("small")
def test_blocks_merged_choose_what_one_pass_chooses(device: torch.device) -> None:
    """Ties across blocks, and queries that see nothing of a block or but a part of it."""
    for seed in range(4):
        random_ = random.Random(seed)
        block = few_valued_block(random_, 600)
        scores, limits = scores_with_garbage(block).to(device), torch.tensor(block.limits).to(device)
        tokens = scores.shape[1]
        cuts = sorted({random_.randint(1, tokens) for _ in range(2)} | {tokens})
        best_scores, best = scores[:, :0], limits.new_empty(len(scores), 0)
        for start, end in pairwise([0, *cuts]):
            best_scores, best = topk.merge_topk(
                best_scores, best, scores[:, start:end], limits - start, block.k, start=start
            )
        wanted = reference.exact_topk(scores.cpu(), limits.cpu(), block.k).to(device)
        assert_same_bits(best, wanted, f"merged over blocks that end at {cuts}")
        there = wanted >= 0
        assert_same_bits(best_scores[there], scores.gather(1, wanted.clamp(min=0))[there], "scores of the best")
        assert bool((best_scores[~there] == -math.inf).all())


@pytest.mark.parametrize(("limit", "at"), [(3, 0), (3, 2), (300, 140), (600, 0), (600, 599)])
@pytest.mark.usefixtures("small")
def test_a_nan_that_a_query_sees_is_an_error_when_looked_for(device: torch.device, limit: int, at: int) -> None:
    """Also the NaN of poisoned memory, which has its sign set. Beyond the limit it is nobody's."""
    scores = torch.randn(2, 601)
    there, rows = guarded(scores, device), torch.arange(601, dtype=torch.int32, device=device)
    limits = torch.tensor([600, limit], device=device)
    there[1, at] = math.nan
    with pytest.raises(NumericsError, match="an indexer score is NaN, so no choice of keys is right"):
        topk.exact_topk(there, limits, 5, debug=True)
    there[1].view(torch.uint8)[4 * at : 4 * at + 4] = 0xFF
    with pytest.raises(NumericsError, match="an indexer score is NaN, so no choice of keys is right"):
        topk.topk_rows(there, limits, 5, rows, debug=True)
    assert at in topk.exact_topk(there, limits, 5)[1].tolist()
    limits[1] = at
    topk.exact_topk(there, limits, 5, debug=True)


def test_no_queries_and_no_tokens_make_empty_choices(device: torch.device) -> None:
    """Kind 21: a rank without a token."""
    for queries, tokens in ((0, 9), (3, 0), (0, 0)):
        scores, limits = torch.zeros(queries, tokens), torch.zeros(queries, dtype=torch.int64)
        chosen = topk.exact_topk(scores.to(device), limits.to(device), 4, debug=True)
        assert_same_bits(chosen.cpu(), reference.exact_topk(scores, limits, 4), f"{queries} queries, {tokens} tokens")
        assert chosen.shape == (queries, min(4, tokens))
