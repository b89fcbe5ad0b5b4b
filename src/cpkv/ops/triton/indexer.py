"""The indexer's scores of fp8 queries and keys, as DeepSeek Sparse Attention defines them (arXiv 2512.02556).

score(q, k) = scale_k * sum over heads h of  w_h * relu(q_h . k)

program = a few queries, many keys      keys of a tile [64, dim] x queries [dim, queries * heads]
                                       -> products [64, queries, heads] -> weighted sum over heads -> scores
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_KEYS = 64
# Queries times heads of one product. Of the shapes tried on an H200 this one was fastest.
BLOCK_PRODUCTS = 128
KEYS_PER_PROGRAM = 4096
ROW_SCORES = 64
NUM_WARPS = 4
NUM_STAGES = 3


def fp8_indexer_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scales: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Score queries against every key that one of them may see.

    Args:
        queries: float8_e4m3fn [queries, heads, dim]; heads and dim are powers of two.
        weights: fp32 [queries, heads], may be negative; each holds the scale of its quantised query.
        keys: float8_e4m3fn [tokens, dim] in position order.
        key_scales: fp32 [tokens].
        limits: int64 [queries] how many keys, from the first on, each query may see; at most `tokens`.

    Returns:
        fp32 [queries, tokens], rows perhaps apart; -inf where a query may not look.
    """
    num_queries, heads, dim = queries.shape
    tokens = len(keys)
    # Rows start at multiples of 256 bytes, so that whoever reads them can do so in words of 16.
    stride = triton.cdiv(tokens, ROW_SCORES) * ROW_SCORES
    scores = torch.empty(num_queries, stride, dtype=torch.float32, device=queries.device)[:, :tokens]
    if not num_queries or not tokens:
        return scores
    block_queries = max(1, BLOCK_PRODUCTS // heads)
    grid = (triton.cdiv(num_queries, block_queries), triton.cdiv(tokens, KEYS_PER_PROGRAM))
    _scores[grid](
        queries.contiguous(),
        weights.contiguous(),
        keys.contiguous(),
        key_scales.contiguous(),
        limits.contiguous(),
        scores,
        stride,
        num_queries,
        tokens,
        QUERIES=block_queries,
        HEADS=heads,
        DIM=dim,
        KEYS=BLOCK_KEYS,
        SPAN=KEYS_PER_PROGRAM,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return scores


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    queries,
    weights,
    keys,
    key_scales,
    limits,
    scores,
    stride,
    num_queries,
    tokens,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
):
    first_query = tl.program_id(0).to(tl.int64) * QUERIES
    first_key = tl.program_id(1) * SPAN
    query = load_queries(queries, first_query, num_queries, QUERIES, HEADS, DIM)
    weight = load_weights(weights, first_query, num_queries, QUERIES, HEADS)
    numbers = first_query + tl.arange(0, QUERIES)
    limit = tl.load(limits + numbers, mask=numbers < num_queries, other=0)
    furthest = tl.max(limit, axis=0)
    end = tl.minimum(first_key + SPAN, tokens)
    # Behind the last key that one of these queries may see, nothing is computed.
    hidden = (
        tl.minimum(tl.cdiv(tl.minimum(furthest, end).to(tl.int32) - first_key, KEYS), SPAN // KEYS) * KEYS + first_key
    )
    for start in range(first_key, hidden, KEYS):
        positions = start + tl.arange(0, KEYS)
        inside = positions < tokens
        total = score_tile(query, weight, keys, key_scales, positions, inside, QUERIES, HEADS, DIM, KEYS)
        total = tl.where(positions[:, None] < limit[None, :], total, float("-inf"))
        places = scores + numbers[None, :] * stride + positions[:, None]
        tl.store(places, total, mask=inside[:, None] & (numbers < num_queries)[None, :])
    for start in range(tl.maximum(hidden, first_key), end, KEYS):
        positions = start + tl.arange(0, KEYS)
        places = scores + numbers[None, :] * stride + positions[:, None]
        writable = (positions < tokens)[:, None] & (numbers < num_queries)[None, :]
        tl.store(places, tl.full([KEYS, QUERIES], float("-inf"), tl.float32), mask=writable)


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    queries, first_query, num_queries, QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):
    """Queries as columns [DIM, QUERIES * HEADS]; 0 behind the last query."""
    columns = first_query * HEADS + tl.arange(0, QUERIES * HEADS)
    dims = tl.arange(0, DIM)
    return tl.load(
        queries + columns[None, :] * DIM + dims[:, None], mask=columns[None, :] < num_queries * HEADS, other=0.0
    )


@triton.jit
def load_weights(weights, first_query, num_queries, QUERIES: tl.constexpr, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of their heads [QUERIES * HEADS]."""
    columns = first_query * HEADS + tl.arange(0, QUERIES * HEADS)
    return tl.load(weights + columns, mask=columns < num_queries * HEADS, other=0.0)


@triton.jit
def score_tile(  # type: ignore[no-untyped-def]
    query,
    weight,
    keys,
    key_scales,
    positions,
    inside,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Scores [KEYS, QUERIES] of the keys at these positions, 0 for those outside; whoever scores has these bits."""
    dims = tl.arange(0, DIM)
    key = tl.load(keys + positions[:, None].to(tl.int64) * DIM + dims[None, :], mask=inside[:, None], other=0.0)
    scale = tl.load(key_scales + positions, mask=inside, other=0.0)
    product = tl.maximum(tl.dot(key, query), 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    return tl.sum(tl.reshape(product, [KEYS, QUERIES, HEADS]), axis=2) * scale[:, None]
