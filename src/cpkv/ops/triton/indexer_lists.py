"""Lists of the keys that exceed a bound, written while keys are scored: the kernels of indexer_topk.

A list is what it is in topk_list: positions and bits of scores, in order of position; full, only its k best stay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpkv.ops.triton.choice_parts import how_many, in_fours, note_nan, sortable
from cpkv.ops.triton.indexer import load_queries, load_weights, score_tile
from cpkv.ops.triton.topk_list import append, bound_of_sample, choose_listed, exceeding, join_lists, keep_best


@triton.jit
def sampled_bounds(  # type: ignore[no-untyped-def]
    queries,
    weights,
    keys,
    key_scales,
    limits,
    tokens,
    num_queries,
    k,
    scratch,
    bounds,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
    SPREAD: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The bounds [queries] of those queries that see more than a list holds; the others' stay as they are."""
    first_query = tl.program_id(0).to(tl.int64) * QUERIES
    places = tl.arange(0, QUERIES)
    limit = _limits(limits, first_query + places, num_queries, tokens)
    furthest = tl.max(limit, axis=0)
    if furthest > CANDIDATES:
        own = scratch + first_query * SAMPLE
        query = load_queries(queries, first_query, num_queries, QUERIES, HEADS, DIM)
        weight = load_weights(weights, first_query, num_queries, QUERIES, HEADS)
        apart = (furthest - RUN) // (SAMPLE // RUN - 1)
        for start in range(0, SAMPLE, KEYS):
            numbers = start + tl.arange(0, KEYS)
            positions = _sampled(numbers, apart, RUN)
            inside = positions < tokens
            total = score_tile(query, weight, keys, key_scales, positions, inside, QUERIES, HEADS, DIM, KEYS)
            tl.store(own + places[None, :] * SAMPLE + numbers[:, None], total)
        # The scratch was written by other threads of this program.
        tl.debug_barrier()
        for place in range(QUERIES):
            seen = _at(limit, places, place)
            if seen > CANDIDATES:
                numbers = in_fours(SAMPLE)
                counts = _sampled(numbers, apart, RUN) < seen
                keys_of = sortable(tl.load(own + place * SAMPLE + numbers))
                lowest = tl.min(tl.min(tl.where(counts, keys_of, 2147483647), axis=1), axis=0)
                keys_of = tl.where(counts, keys_of, -2147483648)
                bound = bound_of_sample(keys_of, lowest, how_many(counts), seen, k, SPREAD)
                tl.store(bounds + first_query + place, bound)


@triton.jit
def list_scored(  # type: ignore[no-untyped-def]
    queries,
    weights,
    keys,
    key_scales,
    limits,
    tokens,
    num_queries,
    k,
    parts,
    bounds,
    before,
    nan_seen,
    scratch,
    lists,
    counts,
    TILE: tl.constexpr,
    FIND_NAN: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """List what exceeds the bounds in one part of the keys, of those queries for which too few were listed before.

    `scratch` fp32 [programs, QUERIES, TILE]; `before`, `counts` int32 [queries, parts], how many are listed;
    `lists` int32 [queries, parts, 2, CANDIDATES], positions and bits of scores, with room for k + TILE of each.
    """
    first_query = tl.program_id(0).to(tl.int64) * QUERIES
    part = tl.program_id(1)
    places = tl.arange(0, QUERIES)
    numbers = first_query + places
    limit = _limits(limits, numbers, num_queries, tokens)
    limit = tl.where(_sums(before, numbers, num_queries, parts) < tl.minimum(limit, k), limit, 0)
    furthest = tl.max(limit, axis=0)
    each = tl.cdiv(tl.cdiv(furthest, parts), TILE) * TILE
    first, end = part * each, tl.minimum((part + 1) * each, furthest)
    if first < end:
        own = scratch + (part.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * QUERIES * TILE
        query = load_queries(queries, first_query, num_queries, QUERIES, HEADS, DIM)
        bits = tl.load(bounds + numbers, mask=numbers < num_queries, other=0.0).to(tl.int32, bitcast=True)
        listed = tl.zeros([QUERIES], tl.int32)
        for start in range(first, end, TILE):
            # Not kept, since a list that is full needs the registers.
            weight = load_weights(weights, first_query, num_queries, QUERIES, HEADS)
            for tile in range(start, tl.minimum(start + TILE, end), KEYS):
                positions = tile + tl.arange(0, KEYS)
                inside = positions < tokens
                total = score_tile(query, weight, keys, key_scales, positions, inside, QUERIES, HEADS, DIM, KEYS)
                tl.store(own + places[None, :] * TILE + (positions - start)[:, None], total)
            # Other threads of this program wrote what is read now, and will overwrite it.
            tl.debug_barrier()
            where = (lists, first_query, part, parts)
            listed, bits = _list_each(
                own, start, limit, k, listed, bits, where, nan_seen, QUERIES, CANDIDATES, TILE, FIND_NAN
            )
            tl.debug_barrier()
        tl.store(counts + numbers * parts + part, listed, mask=numbers < num_queries)


@triton.jit
def _list_each(  # type: ignore[no-untyped-def]
    scratch,
    start,
    limit,
    k,
    listed,
    bits,
    where,
    nan_seen,
    QUERIES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    FIND_NAN: tl.constexpr,
):
    """List the tile of each query; how many are listed then, and the bits of the bounds, [QUERIES] each.

    `where`: lists, the program's first query, its part and how many there are.
    """
    lists, first_query, part, parts = where
    places = tl.arange(0, QUERIES)
    for place in range(QUERIES):
        seen = _at(limit, places, place)
        if start < seen:
            scores = tl.load(scratch + place * TILE + in_fours(TILE))
            count = _at(listed, places, place)
            bound = _at(bits, places, place).to(tl.float32, bitcast=True)
            own = lists + ((first_query + place) * parts + part) * 2 * CANDIDATES
            count, bound = _list_tile(scores, start, seen, k, count, bound, own, nan_seen, CANDIDATES, TILE, FIND_NAN)
            listed = tl.where(places == place, count, listed)
            bits = tl.where(places == place, bound.to(tl.int32, bitcast=True), bits)
    return listed, bits


@triton.jit
def _list_tile(  # type: ignore[no-untyped-def]
    scores,
    start,
    limit,
    k,
    count,
    bound,
    listed,
    nan_seen,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    FIND_NAN: tl.constexpr,
):
    """Append what exceeds the bound, which rises when the list is full; how many are listed then, and the bound."""
    positions = start + in_fours(TILE)
    there = positions < limit
    if FIND_NAN:
        note_nan(tl.where(there, scores, 0.0), nan_seen)
    exceeds = exceeding(scores, bound) & there
    more = how_many(exceeds)
    if count + more > CANDIDATES:
        bound = keep_best(listed, count, k, bound, CANDIDATES, TILE)
        count = tl.minimum(count, k)
        exceeds = exceeding(scores, bound) & there
        more = how_many(exceeds)
    append(positions, scores, exceeds, listed + count, CANDIDATES)
    return count + more, bound


@triton.jit
def choose_from_parts(  # type: ignore[no-untyped-def]
    limits,
    tokens,
    num_queries,
    k,
    parts,
    bounds,
    counts,
    lists,
    out,
    rows,
    position_rows,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Choose for one query from the lists of its parts: those of the second pass, where the first has too few."""
    query = tl.program_id(0).to(tl.int64)
    wanted = tl.minimum(tl.maximum(tl.minimum(tl.load(limits + query), tokens), 0).to(tl.int32), k)
    listed = wanted * 0
    for part in range(0, parts):
        listed += tl.load(counts + query * parts + part)
    turn = (listed < wanted).to(tl.int64)
    bound = tl.load(bounds + turn * num_queries + query)
    own = lists + query * parts * 2 * CANDIDATES
    own_counts = counts + (turn * num_queries + query) * parts
    count, risen = join_lists(own, own_counts, parts, k, bound, CANDIDATES, TILE)
    choose_listed(own, count, wanted, risen, k, query * k, out, rows, position_rows, CANDIDATES, TILE, True)


@triton.jit
def _limits(limits, numbers, num_queries, tokens):  # type: ignore[no-untyped-def]
    """How many keys these queries see; 0 behind the last query."""
    limit = tl.load(limits + numbers, mask=numbers < num_queries, other=0)
    return tl.maximum(tl.minimum(limit, tokens), 0).to(tl.int32)


@triton.jit
def _sums(counts, numbers, num_queries, parts):  # type: ignore[no-untyped-def]
    """How many are listed for these queries in all parts."""
    sums = numbers.to(tl.int32) * 0
    for part in range(0, parts):
        sums += tl.load(counts + numbers * parts + part, mask=numbers < num_queries, other=0)
    return sums


@triton.jit
def _sampled(numbers, apart, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions of the keys that are sampled: runs at even distances."""
    return (numbers // RUN) * apart // RUN * RUN + numbers % RUN


@triton.jit
def _at(values, places, place):  # type: ignore[no-untyped-def]
    """One of a few integers."""
    return tl.sum(tl.where(places == place, values, 0), axis=0)
