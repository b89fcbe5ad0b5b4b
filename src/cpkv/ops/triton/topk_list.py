"""The exact choice in one read of the scores: a program a query, which keeps a list of candidates.

    sample      a few thousand scores, evenly spread: a bound that k scores and a few more should exceed
    read        what exceeds the bound is appended to the list, in order of position
                list full: only its k best stay, of equals the first, and the last of them is the bound from now on;
                           a later score that equals it has k before it
    choose      of the list the k best by bisection, ties by position -> out, with view rows where asked for

Where fewer than k exceed the sample's bound, the row is read once more, with no bound to start with. Rows that the list
holds whole have no bound. Where there are few queries, a program lists a part of a row; the last one joins the lists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpkv.ops.triton.choice_parts import (
    are_best,
    before_each,
    how_many,
    in_fours,
    note_nan,
    put_padding,
    put_positions,
    reached_by,
    score_of,
    sortable,
)


@triton.jit
def choose_from_list(  # type: ignore[no-untyped-def]
    scores,
    stride,
    limits,
    tokens,
    k,
    out,
    rows,
    position_rows,
    nan_seen,
    parts,
    lists,
    counts,
    come,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
    SPREAD: tl.constexpr,
    FIND_NAN: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Choose for one query, or list one part of its scores: the last part to be listed chooses.

    Args as `exact_topk` and `topk_rows` have them, and: `out`, `rows` [queries, k]; `nan_seen` int32 [1], 0;
    `lists` int32 [queries, parts, 2, CANDIDATES], positions and bits of scores, with room for k + TILE of each;
    `counts` int32 [queries, parts], how many are listed; `come` int32 [queries], 0: how many parts are listed.
    """
    query = tl.program_id(0).to(tl.int64)
    row = scores + query * stride
    limit = tl.maximum(tl.minimum(tl.load(limits + query), tokens), 0).to(tl.int32)
    wanted = tl.minimum(limit, k)
    own = lists + query * parts * 2 * CANDIDATES
    bound = _exceeded_by_all()
    if limit > CANDIDATES:
        bound = _sampled_bound(row, limit, k, SAMPLE, RUN, SPREAD)
    last_to_come = True
    if SPLIT:
        part = tl.program_id(1)
        each = tl.cdiv(tl.cdiv(limit, parts), TILE) * TILE
        listed = own + part * 2 * CANDIDATES
        first, end = part * each, tl.minimum((part + 1) * each, limit)
        count, _ = _list(row, first, end, k, bound, listed, nan_seen, CANDIDATES, TILE, FIND_NAN)
        tl.store(counts + query * parts + part, count)
        # What all threads wrote is there before this program counts as come.
        tl.debug_barrier()
        last_to_come = tl.atomic_add(come + query, 1) == parts - 1
        count = limit * 0
    if last_to_come:
        if SPLIT:
            count, risen = join_lists(own, counts + query * parts, parts, k, bound, CANDIDATES, TILE)
            bound = _exceeded_by_all()
        else:
            count = limit * 0
            risen = bound
        while count < wanted:
            count, risen = _list(row, limit * 0, limit, k, bound, own, nan_seen, CANDIDATES, TILE, FIND_NAN)
            bound = _exceeded_by_all()
        choose_listed(own, count, wanted, risen, k, query * k, out, rows, position_rows, CANDIDATES, TILE, WITH_ROWS)


@triton.jit
def choose_listed(  # type: ignore[no-untyped-def]
    listed,
    count,
    wanted,
    bound,
    k,
    base,
    out,
    rows,
    position_rows,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    WITH_ROWS: tl.constexpr,
):
    """Write the `wanted` best of a list."""
    # The list was written by other threads of this program.
    tl.debug_barrier()
    last, room = _last_of_best(listed, count, wanted, bound, CANDIDATES)
    written = 0
    ties = 0
    for start in range(0, count, TILE):
        places = start + in_fours(TILE)
        keys = sortable(_listed_scores(listed, places, CANDIDATES))
        take, ties = are_best(keys, places < count, last, ties, room)
        positions = tl.load(listed + places)
        put_positions(take, positions, written, out, rows, position_rows, base, WITH_ROWS)
        written += how_many(take)
    put_padding(wanted, k, out, rows, base, TILE, WITH_ROWS)


@triton.jit
def _list(  # type: ignore[no-untyped-def]
    row, start, end, k, bound, listed, nan_seen, CANDIDATES: tl.constexpr, TILE: tl.constexpr, FIND_NAN: tl.constexpr
):
    """List what exceeds the bound, which rises when the list is full; how many are listed, and what they exceed."""
    count = start * 0
    while start < end:
        ahead = _tile(row, start, end, TILE)
        fits = start < end
        while fits:
            # The next tile is on its way while this one is looked at.
            values = ahead
            ahead = _tile(row, start + TILE, end, TILE)
            if FIND_NAN:
                note_nan(values, nan_seen)
            positions = start + in_fours(TILE)
            exceeds = exceeding(values, bound) & (positions < end)
            more = how_many(exceeds)
            fits = count + more <= CANDIDATES
            if fits:
                append(positions, values, exceeds, listed + count, CANDIDATES)
                count += more
                start += TILE
                fits = start < end
        if start < end:
            bound = keep_best(listed, count, k, bound, CANDIDATES, TILE)
            count = tl.minimum(count, k)
    return count, bound


@triton.jit
def exceeding(scores, bound):  # type: ignore[no-untyped-def]
    """Whether scores exceed the bound: NaN exceeds any, and all exceed one that is NaN."""
    return (scores <= bound) ^ True


@triton.jit
def append(positions, scores, take, listed, CANDIDATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Put what is taken, in order, where `listed` points to."""
    places = listed + before_each(take)
    tl.store(places, positions, mask=take)
    tl.store(places + CANDIDATES, scores.to(tl.int32, bitcast=True), mask=take)


@triton.jit
def join_lists(own, counts, parts, k, bound, CANDIDATES: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Append the lists of the other parts of a row to that of the first; the same answers as those of `_list`."""
    count = tl.load(counts)
    for part in range(1, parts):
        more = tl.load(counts + part)
        listed = own + part * 2 * CANDIDATES
        for start in range(0, more, TILE):
            places = start + in_fours(TILE)
            scores = _listed_scores(listed, places, CANDIDATES)
            exceeds = exceeding(scores, bound) & (places < more)
            if count + how_many(exceeds) > CANDIDATES:
                bound = keep_best(own, count, k, bound, CANDIDATES, TILE)
                count = tl.minimum(count, k)
                exceeds = exceeding(scores, bound) & (places < more)
            append(tl.load(listed + places), scores, exceeds, own + count, CANDIDATES)
            count += how_many(exceeds)
    return count, bound


@triton.jit
def _tile(row, start, limit, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scores from `start` on, 0 beyond the limit."""
    positions = start + in_fours(TILE)
    # Without a mask, a thread reads 16 bytes at a time. Scores are read once; the lists should stay in the L2 cache.
    if start + TILE <= limit:
        values = tl.load(row + positions, eviction_policy="evict_first")
    else:
        values = tl.load(row + positions, mask=positions < limit, other=0.0, eviction_policy="evict_first")
    return values


@triton.jit
def keep_best(listed, count, k, bound, CANDIDATES: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Leave the k best of the list, in order; a bound that whatever belongs to the k best of all still exceeds."""
    # Barriers, since other threads of this program wrote what is read, and will overwrite it.
    tl.debug_barrier()
    last, room = _last_of_best(listed, count, k, bound, CANDIDATES)
    written = 0
    ties = 0
    for start in range(0, count, TILE):
        places = start + in_fours(TILE)
        positions = tl.load(listed + places)
        scores = _listed_scores(listed, places, CANDIDATES)
        take, ties = are_best(sortable(scores), places < count, last, ties, room)
        tl.debug_barrier()
        append(positions, scores, take, listed + written, CANDIDATES)
        written += how_many(take)
    return _bound(last)


@triton.jit
def _last_of_best(listed, count, wanted, bound, CANDIDATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the `wanted` best of a list, which exceed a bound, are above, and how many of its equals belong to them."""
    places = in_fours(CANDIDATES)
    keys = sortable(_listed_scores(listed, places, CANDIDATES))
    keys = tl.where(places < count, keys, -2147483648)
    lowest = tl.where(bound == bound, sortable(bound), -2147483648)
    highest = tl.max(tl.max(keys, axis=1), axis=0)
    last = reached_by(keys, lowest, highest, wanted, wanted)
    # Mostly there are no more that reach it, so that nobody needs to look for equals.
    exact = how_many(keys >= last) == wanted
    return tl.where(exact, last - 1, last), tl.where(exact, 0, wanted - how_many(keys > last))


@triton.jit
def _listed_scores(listed, places, CANDIDATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scores at these places of a list, anything behind the last."""
    return tl.load(listed + CANDIDATES + places).to(tl.float32, bitcast=True)


@triton.jit
def _sampled_bound(row, limit, k, SAMPLE: tl.constexpr, RUN: tl.constexpr, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A bound that more than k scores should exceed, but not many more."""
    numbers = in_fours(SAMPLE)
    apart = (limit - RUN) // (SAMPLE // RUN - 1)
    firsts = (numbers // RUN) * apart // RUN * RUN
    keys = sortable(tl.load(row + firsts + numbers % RUN))
    return bound_of_sample(keys, tl.min(tl.min(keys, axis=1), axis=0), SAMPLE, limit, k, SPREAD)


@triton.jit
def bound_of_sample(keys, lowest, sampled, limit, k, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """A bound that more than k of `limit` scores should exceed: `sampled` of them have these keys, from `lowest` on."""
    expected = k * (sampled / limit)
    # What a sample of independent scores has of the k best deviates by the root of what is expected.
    least = tl.minimum((expected + SPREAD * tl.sqrt(expected)).to(tl.int32) + SPREAD, sampled)
    highest = tl.max(tl.max(keys, axis=1), axis=0)
    return _bound(reached_by(keys, lowest, highest, least, least + least // 16) - 1)


@triton.jit
def _bound(key):  # type: ignore[no-untyped-def]
    """The score that exactly the scores above a key exceed; infinity for NaN's, exceeded by NaN."""
    # No score has the key -1: it would be that of -0.0, which zeros do not exceed.
    return score_of(tl.where(key == -1, -2, tl.minimum(key, 0x7F800000)))


@triton.jit
def _exceeded_by_all():  # type: ignore[no-untyped-def]
    """NaN, as a bound."""
    return tl.full([], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
