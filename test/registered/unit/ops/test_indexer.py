"""Scores of the indexer against a naive loop in float64."""

from __future__ import annotations

import pytest
import torch

from cpkv.config.names import IndexDtype
from cpkv.layout.query_blocks import KEY_TILE
from cpkv.ops.reference.index_keys import encode_index_keys
from cpkv.ops.reference.indexer import indexer_scores
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

NEG_INF = float("-inf")
NAN_BYTES = {torch.float32: 4, torch.float64: 8}


def poison(dtype: torch.dtype) -> torch.Tensor:
    """The NaN of a poisoned pool: every byte 0xFF, so with its sign set."""
    return torch.full((NAN_BYTES[dtype],), 0xFF, dtype=torch.uint8).view(dtype)[0]


def naive_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, limits: list[int]
) -> list[list[float]]:
    """score(q, k) = sum over heads of w_h * relu(q_h . k), one product at a time."""
    rows = []
    for query, weight, limit in zip(queries.tolist(), weights.tolist(), limits, strict=True):
        row = []
        for pos, key in enumerate(keys.tolist()[: max(limits)]):
            products = [sum(a * b for a, b in zip(head, key, strict=True)) for head in query]
            score = sum(w * max(product, 0.0) for w, product in zip(weight, products, strict=True))
            row.append(score if pos < limit else NEG_INF)
        rows.append(row)
    return rows


def scores_of(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Scores of float keys, stored as they are."""
    dtype: IndexDtype = "float64" if keys.dtype == torch.float64 else "float32"
    return indexer_scores(queries, weights, keys.view(torch.uint8), limits, dtype=dtype)


def make_inputs(
    tokens: int, *, queries: int = 3, heads: int = 2, dim: int = 5, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return values(queries, heads, dim), values(queries, heads), values(tokens, dim)


@pytest.mark.parametrize("tokens", [1, 2, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 2 * KEY_TILE + 1])
@pytest.mark.parametrize("heads", [1, 4])
def test_scores_are_those_of_a_naive_loop_at_every_edge_of_a_tile(tokens: int, heads: int) -> None:
    """Weights may be negative; what a query may not see is -inf."""
    queries, weights, keys = make_inputs(tokens, heads=heads)
    limits = [tokens, max(1, tokens // 2), 1]
    scores = scores_of(queries, weights, keys, torch.tensor(limits))
    naive = torch.tensor(naive_scores(queries, weights, keys, limits), dtype=torch.float64)
    assert scores.shape == (3, max(limits))
    torch.testing.assert_close(scores, naive, rtol=0, atol=1e-13)
    assert bool((weights < 0).any())


@pytest.mark.parametrize("width", [1, 7, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, KEY_TILE + 100])
def test_keys_beyond_the_last_limit_change_no_bit(width: int) -> None:
    """What nobody may see is NaN: behind the limit in the same tile, in the next one, or not there at all."""
    queries, weights, keys = make_inputs(width)
    limits = torch.tensor([width, max(1, width - 1), 1])
    alone = scores_of(queries, weights, keys, limits)
    for surplus in (1, KEY_TILE - 1, KEY_TILE + 3):
        poisoned = torch.cat([keys, poison(torch.float64).expand(surplus, 5)])
        scores = scores_of(queries, weights, poisoned, limits)
        assert_same_bits(scores, alone, f"{surplus} NaN keys behind the limit")
    assert not bool(alone.isnan().any())


def test_a_nan_key_that_a_query_may_see_reaches_its_score_and_no_other() -> None:
    """Kind 8: the poison of a row that should not be read is not hidden by the ReLU."""
    queries, weights, keys = make_inputs(20)
    keys[11] = poison(torch.float64)
    scores = scores_of(queries, weights, keys, torch.tensor([20, 12, 11]))
    assert scores.isnan().nonzero().tolist() == [[0, 11], [1, 11]]


@pytest.mark.parametrize("dim", [5, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_do_not_depend_on_where_the_keys_lie(dim: int, dtype: torch.dtype) -> None:
    """Views hand out slices of larger buffers: the same keys at any row of one give the same bits."""
    queries, weights, keys = (part.to(dtype) for part in make_inputs(700, queries=9, heads=4, dim=dim))
    limits = torch.arange(692, 701)
    alone = scores_of(queries, weights, keys, limits)
    for first in (1, 2, 3, 17):
        buffer = poison(dtype).repeat(first + 700 + 5, dim)
        buffer[first : first + 700] = keys
        scores = scores_of(queries, weights, buffer[first : first + 700], limits)
        assert_same_bits(scores, alone, f"keys at row {first} of a buffer")


def test_a_query_scores_the_same_bits_for_any_history_behind_it() -> None:
    """Tiles start at position 0 and have one shape, so a longer neighbour in the block moves no bit."""
    queries, weights, keys = (part.to(torch.float32) for part in make_inputs(1500, queries=4, heads=4, dim=32))
    short = scores_of(queries, weights, keys, torch.tensor([300, 300, 300, 300]))
    long = scores_of(queries, weights, keys, torch.tensor([300, 300, 300, 1500]))
    assert_same_bits(long[:3, :300].contiguous(), short[:3].contiguous(), "with a longer neighbour")
    assert bool((long[:3, 300:] == NEG_INF).all())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("cut", [KEY_TILE, 2 * KEY_TILE, 3 * KEY_TILE])
def test_scores_are_the_same_bits_however_the_stored_keys_are_cut_into_whole_tiles(dtype: IndexDtype, cut: int) -> None:
    """A view that gathers a block of keys at a time scores what one that holds them all scores."""
    compute = torch.float64 if dtype == "float64" else torch.float32
    queries, weights, keys = (part.to(compute) for part in make_inputs(1700, queries=5, heads=3, dim=32))
    stored = encode_index_keys(keys, dtype)
    limits = torch.tensor([1700, 1, KEY_TILE, KEY_TILE + 1, 1600])
    whole = indexer_scores(queries, weights, stored, limits, dtype=dtype)
    for start in range(0, 1700, cut):
        block = stored[start : start + cut].clone()
        here = (limits - start).clamp(max=len(block))
        scores = indexer_scores(queries, weights, block, here, dtype=dtype)
        assert_same_bits(scores, whole[:, start : start + cut].contiguous(), f"the block from {start} on")
