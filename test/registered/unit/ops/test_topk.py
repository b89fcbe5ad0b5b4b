"""The exact choice of the best keys against Python's sort, in one pass and merged block by block."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import NumericsError
from cpkv.layout.query_blocks import KEY_TILE
from cpkv.ops.reference.topk import exact_topk, merge_topk, topk_rows
from cpkv.testing.bits import assert_same_bits, first_difference
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

NEG_INF = float("-inf")
NAN_BYTES = {torch.float32: 4, torch.float64: 8}


def poison(dtype: torch.dtype) -> torch.Tensor:
    """The NaN of a poisoned pool: every byte 0xFF, so with its sign set."""
    return torch.full((NAN_BYTES[dtype],), 0xFF, dtype=torch.uint8).view(dtype)[0]


def naive_topk(row: list[float], limit: int, k: int) -> list[int]:
    """By the rule: score descending, then lowest position; Python knows that -0.0 == 0.0."""
    best = sorted(range(limit), key=lambda pos: (-row[pos], pos))[:k]
    width = min(k, len(row))
    return sorted(best) + [-1] * (width - len(best))


def check_topk(rows: list[list[float]], limits: list[int], k: int, dtype: torch.dtype) -> None:
    scores = torch.tensor(rows, dtype=dtype)
    hidden = torch.arange(scores.shape[1]) >= torch.tensor(limits).unsqueeze(1)
    scores.masked_fill_(hidden, NEG_INF)
    chosen = exact_topk(scores, torch.tensor(limits), k)
    assert chosen.dtype == torch.int64
    for query, (row, limit) in enumerate(zip(scores.tolist(), limits, strict=True)):
        wanted = torch.tensor(naive_topk(row, limit, k))
        difference = first_difference(chosen[query], wanted)
        assert not difference, f"query {query} of limit {limit}, k {k}: {difference}"


TIED = st.sampled_from([-1.5, -0.0, 0.0, 0.0, 0.25, 1.0, 3.0, NEG_INF, math.inf])


@st.composite
def score_blocks(draw: st.DrawFn) -> tuple[list[list[float]], list[int], int]:
    """Blocks of few values, so that ties at the boundary are the rule; rows of any limit, k on either side."""
    tokens = draw(st.integers(1, 24))
    queries = draw(st.integers(1, 5))
    values = draw(st.sampled_from([TIED, st.sampled_from([0.0, -0.0]), st.floats(-4, 4, width=32)]))
    rows = draw(st.lists(st.lists(values, min_size=tokens, max_size=tokens), min_size=queries, max_size=queries))
    limits = draw(st.lists(st.integers(1, tokens), min_size=queries, max_size=queries))
    return rows, limits, draw(st.integers(1, tokens + 3))


@given(score_blocks(), st.sampled_from([torch.float32, torch.float64]))
def test_the_choice_is_that_of_a_stable_sort(
    block: tuple[list[list[float]], list[int], int], dtype: torch.dtype
) -> None:
    """Score descending, then lowest position; short rows end in -1; infinite scores are scores."""
    check_topk(*block, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 500, 2048])
def test_the_choice_in_long_rows_full_of_ties(k: int, dtype: torch.dtype) -> None:
    """ReLU makes many scores exactly 0; a block mixes rows shorter than k, rows of ties and rows without."""
    random_ = random.Random(k)
    tokens = 2100
    rows = [random_.choices([0.0, -0.0, 0.5, 1.0, -1.0], k=tokens) for _ in range(3)]
    rows += [[random_.gauss(0, 1) for _ in range(tokens)] for _ in range(3)]
    check_topk(rows, [tokens, 40, 1, tokens, 64, 1999], k, dtype)


def test_positive_and_negative_zero_tie_and_the_lowest_positions_win() -> None:
    check_topk([[-0.0, 0.0, -0.0, 0.0, -1.0, 0.0]], [6], 3, torch.float32)
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0, 0.0]])
    assert exact_topk(scores, torch.tensor([6]), 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("value", [0.0, -3.0, 1e30, NEG_INF])
def test_a_row_of_equal_scores_chooses_its_first_positions(value: float) -> None:
    scores = torch.full((2, 50), value)
    scores[1, 20:] = NEG_INF
    assert exact_topk(scores, torch.tensor([50, 20]), 7).tolist() == [list(range(7))] * 2


def test_a_row_shorter_than_k_is_filled_with_no_token() -> None:
    """Kind 9: -1, never a position beyond the limit, whose score is -inf like that of a visible key may be."""
    scores = torch.full((3, 8), NEG_INF)
    scores[1, :3] = torch.tensor([1.0, NEG_INF, 2.0])
    scores[2] = torch.arange(8.0)
    chosen = exact_topk(scores, torch.tensor([1, 3, 8]), 5)
    assert chosen.tolist() == [[0, -1, -1, -1, -1], [0, 1, 2, -1, -1], [3, 4, 5, 6, 7]]
    assert exact_topk(scores[:1], torch.tensor([1]), 100).shape == (1, 8)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, NEG_INF, 7.0])
@pytest.mark.parametrize("k", [1, 3, 5, 40])
def test_what_lies_beyond_a_limit_is_not_looked_at(garbage: float, k: int) -> None:
    scores, limits = torch.randn(4, 30), torch.tensor([30, 4, 0, 17])
    hidden = torch.arange(30) >= limits.unsqueeze(1)
    wanted = exact_topk(scores.masked_fill(hidden, NEG_INF), limits, k)
    assert_same_bits(exact_topk(scores.masked_fill(hidden, garbage), limits, k), wanted, "chosen")
    assert_same_bits(merged(scores.masked_fill(hidden, garbage), limits, k, [9, 30])[1], wanted, "merged")


def test_rows_are_those_of_the_chosen_positions() -> None:
    scores, limits = torch.randn(3, 9), torch.tensor([9, 2, 0])
    position_rows = torch.arange(100, 111, dtype=torch.int32)
    chosen = exact_topk(scores, limits, 4)
    positions, rows = topk_rows(scores, limits, 4, position_rows)
    assert_same_bits(positions, chosen.to(torch.int32), "positions")
    assert_same_bits(rows, torch.where(chosen < 0, -1, chosen + 100).to(torch.int32), "view rows")


@pytest.mark.parametrize(("queries", "tokens"), [(0, 9), (3, 0), (0, 0)])
def test_no_queries_and_no_tokens_make_empty_choices(queries: int, tokens: int) -> None:
    """Kind 21: a rank without a token."""
    chosen = exact_topk(torch.zeros(queries, tokens), torch.zeros(queries, dtype=torch.int64), 4)
    assert chosen.shape == (queries, min(4, tokens)) and chosen.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [3, 5, 2000, 3000])
def test_a_nan_score_anywhere_is_an_error(limit: int, dtype: torch.dtype) -> None:
    """Also the NaN that a poisoned row gives, which has its sign set, and in a row shorter than k."""
    for at in (0, limit // 2, limit - 1):
        for nan in (torch.tensor(math.nan, dtype=dtype), poison(dtype)):
            scores = torch.randn(3, 3000, dtype=dtype)
            scores[1, limit:] = NEG_INF
            scores[1, at] = nan
            with pytest.raises(NumericsError, match="an indexer score is NaN, so no choice of keys is right"):
                exact_topk(scores, torch.tensor([3000, limit, 3000]), 5)


def merged(scores: torch.Tensor, limits: torch.Tensor, k: int, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of blocks that end at `cuts`, merged block by block."""
    best_scores, best = scores[:, :0], limits.new_empty(len(scores), 0)
    for start, end in pairwise([0, *cuts]):
        best_scores, best = merge_topk(best_scores, best, scores[:, start:end], limits - start, k, start=start)
    return best_scores, best


def check_merge(rows: list[list[float]], limits: list[int], k: int, dtype: torch.dtype, cuts: list[int]) -> None:
    scores, sees = torch.tensor(rows, dtype=dtype), torch.tensor(limits)
    tokens = scores.shape[1]
    scores.masked_fill_(torch.arange(tokens) >= sees.unsqueeze(1), NEG_INF)
    best_scores, best = merged(scores, sees, k, [*cuts, tokens])
    wanted = exact_topk(scores, sees, k)
    assert_same_bits(best, wanted, f"merged over blocks that end at {cuts}")
    there = wanted >= 0
    assert_same_bits(best_scores[there], scores.gather(1, wanted.clamp(min=0))[there], "scores of the best")
    assert bool((best_scores[~there] == NEG_INF).all())


@given(score_blocks(), st.sampled_from([torch.float32, torch.float64]), st.data())
def test_merged_blocks_choose_what_the_whole_chooses(
    block: tuple[list[list[float]], list[int], int], dtype: torch.dtype, data: st.DataObject
) -> None:
    """Any partition, also into single keys; ties across blocks, and queries that see nothing of a block."""
    rows, limits, k = block
    tokens = len(rows[0])
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens - 1)))) if tokens > 1 else []
    check_merge(rows, limits, k, dtype, cuts)


@pytest.mark.parametrize("k", [1, 64, 500, 2048])
def test_merged_blocks_of_long_rows_full_of_ties(k: int) -> None:
    random_ = random.Random(k)
    rows = [random_.choices([0.0, -0.0, 0.5, 1.0, -1.0], k=2100) for _ in range(4)]
    rows += [[random_.gauss(0, 1) for _ in range(2100)] for _ in range(2)]
    check_merge(rows, [2100, 40, 1, 1999, 2100, 700], k, torch.float32, [KEY_TILE, 2 * KEY_TILE, 3 * KEY_TILE])


def test_zeros_of_either_sign_tie_across_blocks_and_the_earlier_block_wins() -> None:
    scores = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0, 0.0]])
    assert merged(scores, torch.tensor([6]), 3, [2, 4, 6])[1].tolist() == [[0, 1, 3]]


def test_a_better_key_of_a_later_block_takes_the_place_of_the_last_of_the_ties() -> None:
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0, 2.0, 1.0]])
    assert merged(scores, torch.tensor([6]), 3, [3, 6])[1].tolist() == [[0, 1, 4]]


def test_a_query_that_sees_nothing_of_a_block_keeps_its_best() -> None:
    """Also where the scores of what it may not see are -inf like one that it has chosen."""
    scores = torch.full((2, 8), NEG_INF)
    scores[0, :3] = torch.tensor([NEG_INF, 1.0, NEG_INF])
    scores[1] = torch.arange(8.0)
    best_scores, best = merged(scores, torch.tensor([3, 8]), 5, [4, 6, 8])
    assert best.tolist() == [[0, 1, 2, -1, -1], [3, 4, 5, 6, 7]]
    assert best_scores[0].tolist() == [NEG_INF, 1.0, NEG_INF, NEG_INF, NEG_INF]


@pytest.mark.parametrize("at", [0, 3, 4, 11])
@pytest.mark.parametrize("k", [2, 5, 40])
def test_a_nan_score_in_any_block_is_an_error(at: int, k: int) -> None:
    """Also the NaN that a poisoned row gives, which has its sign set."""
    for nan in (torch.tensor(math.nan), poison(torch.float32)):
        scores = torch.randn(2, 12)
        scores[1, at] = nan
        with pytest.raises(NumericsError, match="an indexer score is NaN, so no choice of keys is right"):
            merged(scores, torch.tensor([12, 12]), k, [4, 8, 12])
