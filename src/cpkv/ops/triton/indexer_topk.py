"""The choice of the best keys straight from fp8 queries and keys: no score is kept but those of a tile, and the best.

    bounds      a sample of keys, evenly spread, is scored: per query a bound that k scores and a few more should exceed
    list        program = a few queries x all keys, or a part of them where queries are few. In turn:
                2048 keys are scored into a scratch of the program, which stays in the L2 cache;
                of each query, what exceeds its bound is appended to its list, as topk_list does it
    list again  the queries of which fewer than k exceeded the bound, with none; mostly there are none of these
    choose      program = a query: lists of its parts joined, the k best of them -> out, with view rows

A list again, and the choice, are launches of their own: whether they have work is known on the device alone. A launch
without work takes microseconds, and a query that is listed again has as many programs as in the first pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from cpkv.errors import NumericsError
from cpkv.ops.triton.indexer import BLOCK_KEYS, BLOCK_PRODUCTS, NUM_STAGES, NUM_WARPS, fp8_indexer_scores
from cpkv.ops.triton.indexer_lists import choose_from_parts, list_scored, sampled_bounds
from cpkv.ops.triton.topk import topk_rows

# A list holds the k best and a tile; the larger one is for a larger k.
CANDIDATES, MOST_CANDIDATES = 4096, 8192
TILE = 2048
# Fewer than for a choice from scores, since these must be scored first.
SAMPLE, SAMPLE_RUN = 1024, 8
# In deviations of a sample of independent scores. Too low a bound fills the list, too high a one scores the row again.
SAMPLE_SPREAD = 4
# Few queries are split, into parts that are worth a program, to fill the device.
PROGRAMS, MOST_PARTS, LEAST_PART = 1024, 32, 8192
CHOICE_WARPS, CHOICE_REGISTERS = 4, 96
# Three programs fit an SM, so that two score while one lists. With registers for a fourth, values are spilled.
MAX_REGISTERS = 168
# Lists of the queries of one launch, or scores of those whose choice no list holds.
WORKSPACE_BYTES = 256 << 20


def fp8_indexer_topk(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor,
    limits: torch.Tensor,
    k: int,
    position_rows: torch.Tensor,
    *,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `topk_rows` chooses from `fp8_indexer_scores`, bit for bit, without a matrix of scores.

    Args:
        queries: float8_e4m3fn [queries, heads, dim]; heads and dim are powers of two.
        weights: fp32 [queries, heads], may be negative; each holds the scale of its quantised query.
        keys: float8_e4m3fn [tokens, dim] in position order.
        key_scales: fp32 [tokens].
        limits: int64 [queries] how many keys, from the first on, each query may see; at most `tokens`.
        k: how many to choose. With more than 6144, scores of a few queries at a time are written after all.
        position_rows: int32 [tokens or more] view row of each position of the request.
        debug: look for NaN, which waits for the device.

    Returns:
        Positions and view rows, int32 [queries, min(k, tokens)] each, ascending; -1 behind the last one of a query
        that sees fewer than k keys.

    Raises:
        NumericsError: with `debug`, a score is NaN. Without, NaN counts as the best of all.
    """
    num_queries, tokens = len(queries), len(keys)
    out = torch.empty(num_queries, min(k, tokens), dtype=torch.int32, device=queries.device)
    rows = torch.empty_like(out)
    if not num_queries or not tokens:
        return out, rows
    inputs = _Inputs(*(given.contiguous() for given in (queries, weights, keys, key_scales, limits, position_rows)))
    nan_seen = torch.zeros(1, dtype=torch.int32, device=queries.device)
    candidates = max(CANDIDATES, triton.next_power_of_2(out.shape[1] + TILE))
    listed = candidates <= MOST_CANDIDATES
    bytes_of_query, multiple = (8 * candidates, _queries_of_program(inputs)) if listed else (4 * tokens, 1)
    # As many in each block: a last one of few queries would fill no device.
    blocks = triton.cdiv(num_queries, max(WORKSPACE_BYTES // bytes_of_query, multiple))
    size = triton.cdiv(triton.cdiv(num_queries, blocks), multiple) * multiple
    for start in range(0, num_queries, size):
        own = slice(start, start + size)
        block = inputs._replace(queries=inputs.queries[own], weights=inputs.weights[own], limits=inputs.limits[own])
        if listed:
            _choose_block(block, out[own], rows[own], nan_seen, candidates, debug=debug)
        else:
            scores = fp8_indexer_scores(*block[:5])
            out[own], rows[own] = topk_rows(scores, block.limits, k, block.position_rows, debug=debug)
    if debug and bool(nan_seen):
        raise NumericsError("an indexer score is NaN, so no choice of keys is right; a weight or a stored key is NaN")
    return out, rows


class _Inputs(NamedTuple):
    """What is chosen from, as `fp8_indexer_topk` has it, each contiguous."""

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    key_scales: torch.Tensor
    limits: torch.Tensor
    position_rows: torch.Tensor


def _queries_of_program(inputs: _Inputs) -> int:
    return max(1, BLOCK_PRODUCTS // inputs.queries.shape[1])


def _choose_block(
    inputs: _Inputs, out: torch.Tensor, rows: torch.Tensor, nan_seen: torch.Tensor, candidates: int, *, debug: bool
) -> None:
    """Launch the kernels on the current stream."""
    (num_queries, heads, dim), tokens, device = inputs.queries.shape, len(inputs.keys), out.device
    block_queries = _queries_of_program(inputs)
    programs = triton.cdiv(num_queries, block_queries)
    parts = min(PROGRAMS // programs, MOST_PARTS, triton.cdiv(tokens, LEAST_PART))
    parts = max(min(parts, WORKSPACE_BYTES // (8 * candidates * num_queries)), 1)
    scratch = torch.empty(programs * parts, block_queries, max(TILE, SAMPLE), dtype=torch.float32, device=device)
    lists = torch.empty(num_queries, parts, 2, candidates, dtype=torch.int32, device=device)
    # Before anything is listed, after the first pass, after the second.
    counts = torch.zeros(3, num_queries, parts, dtype=torch.int32, device=device)
    # Of the first pass and of the second, which has none.
    bounds = torch.full((2, num_queries), float("nan"), dtype=torch.float32, device=device)
    arguments = (*inputs[:5], tokens, num_queries, out.shape[1])
    shape = {"QUERIES": block_queries, "HEADS": heads, "DIM": dim, "KEYS": BLOCK_KEYS, "CANDIDATES": candidates}
    options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES, "maxnreg": MAX_REGISTERS}
    sample = {"SAMPLE": SAMPLE, "RUN": SAMPLE_RUN, "SPREAD": SAMPLE_SPREAD}
    sampled_bounds[(programs,)](*arguments, scratch, bounds, **sample, **shape, **options)
    for turn in range(2):
        given = (parts, bounds[turn], counts[turn], nan_seen, scratch, lists, counts[turn + 1])
        list_scored[(programs, parts)](*arguments, *given, TILE=TILE, FIND_NAN=debug, **shape, **options)
    choice = {"num_warps": CHOICE_WARPS * candidates // CANDIDATES, "maxnreg": CHOICE_REGISTERS}
    choose_from_parts[(num_queries,)](
        inputs.limits,
        *arguments[5:],
        parts,
        bounds,
        counts[1],
        lists,
        out,
        rows,
        inputs.position_rows,
        CANDIDATES=candidates,
        TILE=TILE,
        **choice,
    )
