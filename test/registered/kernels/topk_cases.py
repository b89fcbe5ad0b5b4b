"""Rows of scores for the exact choice, the choice by Python's sort, and a check of both kernels against it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from poison import guarded, poisoned_outputs

from cpkv.ops.reference import topk as reference
from cpkv.ops.triton import topk
from cpkv.testing.bits import assert_same_bits

NEG_INF = float("-inf")
FEW_VALUES = (-1.5, -0.0, 0.0, 0.0, 0.25, 1.0, 3.0, NEG_INF, math.inf, 1e-45, -1e-45, 1e-40, 3e38, -3e38)
GARBAGE = (math.nan, math.inf, 3e38)


@dataclass(frozen=True)
class ScoreBlock:
    """Scores of some queries.

    Attributes:
        rows: one list of scores for each query, all equally long.
        limits: how many of its row each query may see.
        k: how many to choose.
    """

    rows: list[list[float]]
    limits: list[int]
    k: int


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with which rows of a few hundred scores take every path, since the interpreter is slow."""
    # No tile has fewer scores than a program has threads.
    sizes = {"CANDIDATES": 512, "MOST_CANDIDATES": 1024, "TILE": 256, "SAMPLE": 256}
    # One query is split into up to four parts, two are into two.
    for name, size in {**sizes, "PROGRAMS": 4, "LEAST_PART": 256}.items():
        monkeypatch.setattr(topk, name, size)


def few_valued_block(random_: random.Random, most_tokens: int) -> ScoreBlock:
    """Few values, so that ties at the boundary are the rule; any limit, k on either side of it."""
    tokens = random_.randint(1, most_tokens)
    values = random_.choice([(0.0, -0.0), random_.sample(FEW_VALUES, random_.randint(1, 6))])
    queries = random_.randint(1, 3)
    rows = [random_.choices(values, k=tokens) for _ in range(queries)]
    return ScoreBlock(rows, [random_.randint(0, tokens) for _ in rows], random_.randint(1, tokens + 3))


def by_sorting(row: list[float], limit: int, k: int) -> list[int]:
    """By the rule: score descending, then lowest position; Python knows that -0.0 == 0.0."""
    best = sorted(range(limit), key=lambda position: (-row[position], position))[:k]
    return sorted(best) + [-1] * (min(k, len(row)) - len(best))


def scores_with_garbage(block: ScoreBlock) -> torch.Tensor:
    """Scores as fp32; beyond each limit stands what would win, or break, every comparison."""
    scores = torch.tensor(block.rows, dtype=torch.float32)
    tokens = scores.shape[1]
    garbage = torch.tensor(GARBAGE).repeat(tokens // len(GARBAGE) + 1)[:tokens]
    return torch.where(torch.arange(tokens) < torch.tensor(block.limits).unsqueeze(1), scores, garbage)


def check_choice(block: ScoreBlock, device: torch.device) -> None:
    """Both kernels and the reference choose what Python's sort chooses, and the rows are those of the positions."""
    scores, limits = scores_with_garbage(block), torch.tensor(block.limits)
    tokens = scores.shape[1]
    wanted = torch.tensor(
        [by_sorting(row, limit, block.k) for row, limit in zip(scores.tolist(), block.limits, strict=True)]
    )
    position_rows = 3 * torch.randperm(tokens + 2, generator=torch.Generator().manual_seed(tokens)).to(torch.int32) + 7
    wanted_rows = torch.where(wanted < 0, -1, position_rows[wanted.clamp(min=0)])
    assert_same_bits(reference.exact_topk(scores, limits, block.k), wanted, "positions of the reference")

    there = guarded(scores, device)
    with poisoned_outputs():
        first = topk.exact_topk(there[:1], limits[:1].to(device), block.k)
        positions, rows = topk.topk_rows(there, limits.to(device), block.k, position_rows.to(device), debug=True)
    what = f"limits {block.limits} of {tokens}, k {block.k}"
    assert_same_bits(positions.cpu(), wanted.to(torch.int32), f"positions, {what}")
    assert_same_bits(first.cpu(), wanted[:1], f"positions of the first query alone, {what}")
    assert_same_bits(rows.cpu(), wanted_rows, f"view rows, {what}")
    for ours, theirs in zip(
        reference.topk_rows(scores, limits, block.k, position_rows), (positions, rows), strict=True
    ):
        assert_same_bits(ours, theirs.cpu(), f"the reference's, {what}")


TOKENS, K = 1000, 120
MISLEADING = {
    "all equal": lambda at, sampled: 1.25,
    "all minus infinity": lambda at, sampled: -math.inf,
    "zeros of either sign": lambda at, sampled: -0.0 if at % 2 else 0.0,
    "ascending": lambda at, sampled: at / 7,
    "descending": lambda at, sampled: -at / 7,
    "best where no sample falls": lambda at, sampled: float(at % 97 - 200 if sampled else at % 89),
    "best where samples fall": lambda at, sampled: float(at if sampled else -at),
    "best at the end": lambda at, sampled: float(at % 5 + (at >= TOKENS - K) * 100),
}


def sampled_places(kernel: ModuleType) -> set[int]:
    """Where a kernel looks for the bound of a query that sees `TOKENS` keys."""
    runs, run = kernel.SAMPLE // kernel.SAMPLE_RUN, kernel.SAMPLE_RUN
    apart = (TOKENS - run) // (runs - 1)
    return {number * apart // run * run + offset for number in range(runs) for offset in range(run)}
