"""The exact choice of the best keys, in about one read of the scores.

    scores of a query   | limit keys that it may see ..................................... | hidden |
    bounds              a sample, evenly spread, gives three values that about CANDIDATES, fewer, and k of all reach
    mark                one read of all scores: how many of the bounds each reaches, in 2 bits -> 1/16 of the bytes
    choose              the highest bound that k reach: its positions, in order, and their scores; the k-th best of them
                        by bisection, ties by position -> out. Short rows are their own candidates
    or by digits        where no bound is reached by k to CANDIDATES: four more reads for the k-th best, one to write

A score becomes an integer that orders like it (-0.0 as +0.0, NaN above all), so the choice is exact whatever the
bounds were. With three of them, the sample may be wrong by a factor of sqrt(CANDIDATES / k) either way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cpkv.errors import NumericsError
from cpkv.ops.triton.choice_parts import put_padding, put_positions, sortable
from cpkv.ops.triton.topk_digits import choose_by_digits
from cpkv.ops.triton.words import rows_contiguous

CANDIDATES = 4096
TILE = 4096
# Samples come in runs of 8, the 32 bytes that memory gives at least.
SAMPLE_RUN = 8
LEAST_SAMPLE, MOST_SAMPLE = 2048, 32768
# A sample of a sixteenth holds 128 of the 2048 best on average, with a deviation of 9% where scores are independent.
SAMPLE_PART = 16
MARK_WARPS = 8
CHOOSE_WARPS = 4


def exact_topk(scores: torch.Tensor, limits: torch.Tensor, k: int, *, debug: bool = False) -> torch.Tensor:
    """Choose each query's k best keys: score descending, then lowest position; -0.0 ties with +0.0.

    Args:
        scores: fp32 [queries, tokens], anything at and beyond each query's limit. Rows should be contiguous and start
            at multiples of 16 bytes: others are copied, or read in smaller words.
        limits: int64 [queries] how many keys each query may see.
        k: how many to choose. More than 4096 are chosen by digits, which takes five reads.
        debug: look for NaN, which waits for the device.

    Returns:
        int64 [queries, min(k, tokens)] chosen positions, ascending; -1 behind the last one of a query that sees
        fewer than k keys.

    Raises:
        NumericsError: with `debug`, a score is NaN. Without, NaN counts as the best of all.
    """
    out = torch.empty(len(scores), min(k, scores.shape[1]), dtype=torch.int64, device=scores.device)
    _choose(scores, limits, k, out, None, None, debug=debug)
    return out


def topk_rows(
    scores: torch.Tensor, limits: torch.Tensor, k: int, position_rows: torch.Tensor, *, debug: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`exact_topk`, and the view row of each chosen position by the same kernel.

    Args:
        scores: as for `exact_topk`.
        limits: likewise.
        k: likewise.
        position_rows: int32 [tokens or more] view row of each position of the request.
        debug: look for NaN, which waits for the device.

    Returns:
        Positions and view rows, int32 [queries, min(k, tokens)] each, padded with -1.

    Raises:
        NumericsError: with `debug`, a score is NaN.
    """
    out = torch.empty(len(scores), min(k, scores.shape[1]), dtype=torch.int32, device=scores.device)
    rows = torch.empty_like(out)
    _choose(scores, limits, k, out, rows, position_rows.contiguous(), debug=debug)
    return out, rows


def merge_topk(
    best_scores: torch.Tensor,
    best: torch.Tensor,
    scores: torch.Tensor,
    limits: torch.Tensor,
    k: int,
    *,
    start: int,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the scores of one more block of keys into the best so far: in the end the choice of `exact_topk`.

    Args:
        best_scores: fp32 [queries, n] scores of the best so far, -inf where there is none.
        best: int64 [queries, n] their positions, ascending, all below `start`; -1 behind the last. A query that sees
            a key of this block sees all keys before it, so it has n of them.
        scores: fp32 [queries, tokens] of the keys from position `start` on.
        limits: int64 [queries] how many keys of this block each query may see; 0 or less for none.
        k: how many to choose.
        start: position of the block's first key.
        debug: look for NaN, which waits for the device.

    Returns:
        Scores and positions of the best so far, [queries, min(k, n + tokens)], positions ascending, -1 padded.

    Raises:
        NumericsError: with `debug`, a score is NaN.
    """
    known = best.shape[1]
    columns = torch.cat([best_scores, scores], dim=1)
    seen = torch.where(limits > 0, limits.clamp(max=scores.shape[1]) + known, (best >= 0).sum(dim=1))
    chosen = exact_topk(columns, seen, k, debug=debug)
    missing = chosen < 0
    readable = chosen.clamp(min=0)
    merged_scores = columns.gather(1, readable).masked_fill_(missing, float("-inf"))
    late = readable + (start - known)
    positions = late if not known else torch.where(chosen < known, best.gather(1, readable.clamp(max=known - 1)), late)
    return merged_scores, positions.masked_fill_(missing, -1)


def _choose(
    scores: torch.Tensor,
    limits: torch.Tensor,
    k: int,
    out: torch.Tensor,
    rows: torch.Tensor | None,
    position_rows: torch.Tensor | None,
    *,
    debug: bool,
) -> None:
    """Launch the kernels on the current stream."""
    queries, tokens = scores.shape
    if not queries or not tokens:
        return
    scores, limits = rows_contiguous(scores), limits.contiguous()
    device = scores.device
    words = triton.cdiv(tokens, TILE) * (TILE // 32)
    bounds = torch.empty(queries, 3, dtype=torch.float32, device=device)
    marks = torch.empty(queries, 2, words, dtype=torch.int32, device=device)
    counts = torch.empty(queries, dtype=torch.int32, device=device)
    candidates = torch.empty(queries, CANDIDATES, dtype=torch.int32, device=device)
    nan_seen = torch.zeros(1, dtype=torch.int32, device=device)
    sample = triton.next_power_of_2(min(max(triton.cdiv(tokens, SAMPLE_PART), LEAST_SAMPLE), MOST_SAMPLE))
    seen = (scores, scores.stride(0), limits, tokens, k)
    outputs = (out, *((rows, position_rows) if rows is not None else (out, out)), out.shape[1])
    short = {"CANDIDATES": CANDIDATES, "WITH_ROWS": rows is not None}
    # 64 keys a thread, so that they stay in registers.
    warps = min(max(CHOOSE_WARPS, sample // 2048), 16)
    _bounds[(queries,)](*seen, bounds, CANDIDATES=CANDIDATES, SAMPLE=sample, RUN=SAMPLE_RUN, num_warps=warps)
    _mark[(queries, triton.cdiv(tokens, TILE))](
        *seen, bounds, marks, nan_seen, words, CANDIDATES=CANDIDATES, TILE=TILE, FIND_NAN=debug, num_warps=MARK_WARPS
    )
    _choose_marked[(queries,)](*seen, marks, words, candidates, counts, *outputs, **short, num_warps=CHOOSE_WARPS)
    choose_by_digits[(queries,)](*seen, counts, *outputs, **short, TILE=TILE, num_warps=CHOOSE_WARPS)
    if debug and bool(nan_seen):
        raise NumericsError("an indexer score is NaN, so no choice of keys is right; a weight or a stored key is NaN")


@triton.jit
def _reached_by(keys, lowest, highest, least, most):  # type: ignore[no-untyped-def]
    """An integer that `least` to `most` of the keys reach, or where ties leave none the largest that `least` do.

    It lies from `lowest` to `highest`. Bisection is in 64 bits, since keys span 32.
    """
    low = lowest.to(tl.int64)
    high = highest.to(tl.int64) + 1
    reached = most + 1
    while (high - low > 1) & (reached > most):
        middle = (low + high) >> 1
        above = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        enough = above >= least
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reached = tl.where(enough, above, reached)
    return low.to(tl.int32)


@triton.jit
def _bounds(  # type: ignore[no-untyped-def]
    scores,
    stride,
    limits,
    tokens,
    k,
    bounds,
    CANDIDATES: tl.constexpr,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    limit = tl.minimum(tl.load(limits + query), tokens).to(tl.int32)
    if limit > CANDIDATES:
        numbers = tl.arange(0, SAMPLE)
        places = (numbers // RUN) * (limit - RUN).to(tl.int64) // (SAMPLE // RUN - 1) + numbers % RUN
        keys = sortable(tl.load(scores + query * stride + places))
        highest = tl.max(keys, axis=0)
        key = tl.min(keys, axis=0)
        # From CANDIDATES down to k, by equal factors.
        expected = CANDIDATES * (SAMPLE / limit)
        factor = tl.sqrt(k * (1.0 / CANDIDATES))
        for number in tl.static_range(3):
            least = tl.maximum(expected.to(tl.int32), 1)
            key = _reached_by(keys, key, highest, least, least + least // 16)
            # A bound that is NaN would be reached by all: the highest number is infinity.
            key = tl.minimum(key, 0x7F800000)
            bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
            tl.store(bounds + query * 3 + number, bits.to(tl.float32, bitcast=True))
            expected *= factor


@triton.jit
def _mark(  # type: ignore[no-untyped-def]
    scores,
    stride,
    limits,
    tokens,
    k,
    bounds,
    marks,
    nan_seen,
    words,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    FIND_NAN: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    limit = tl.minimum(tl.load(limits + query), tokens).to(tl.int32)
    start = tl.program_id(1) * TILE
    lanes = tl.arange(0, 32)
    positions = start + tl.arange(0, TILE // 32)[:, None] * 32 + lanes[None, :]
    row = scores + query * stride
    if (start < limit) & ((limit > CANDIDATES) | FIND_NAN):
        inside = positions < limit
        # Without a mask, lanes read 16 bytes each.
        if start + TILE <= limit:
            values = tl.load(row + positions)
        else:
            values = tl.load(row + positions, mask=inside, other=0.0)
        if FIND_NAN:
            tl.atomic_max(nan_seen, tl.max(tl.max((values != values).to(tl.int32), axis=1), axis=0))
        # Not below, so that NaN reaches every bound.
        reached = ((values < tl.load(bounds + query * 3)) ^ True) & inside
        reached_two = ((values < tl.load(bounds + query * 3 + 1)) ^ True) & inside
        reached_three = ((values < tl.load(bounds + query * 3 + 2)) ^ True) & inside
        bits = (1 << lanes)[None, :]
        places = query * 2 * words + start // 32 + tl.arange(0, TILE // 32)
        # The number of bounds in binary: its second bit says whether two are reached.
        tl.store(marks + places + words, tl.sum(tl.where(reached_two, bits, 0), axis=1))
        tl.store(marks + places, tl.sum(tl.where(reached ^ reached_two ^ reached_three, bits, 0), axis=1))


@triton.jit
def _bits_set(words):  # type: ignore[no-untyped-def]
    """How many bits of each uint32 are set."""
    pairs = words - ((words >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _words_of(marks, numbers, words, limit, bound):  # type: ignore[no-untyped-def]
    """A bit for each position that reaches bound 0, 1 or 2."""
    there = numbers * 32 < limit
    odd = tl.load(marks + numbers, mask=there, other=0).to(tl.uint32, bitcast=True)
    two = tl.load(marks + words + numbers, mask=there, other=0).to(tl.uint32, bitcast=True)
    return tl.where(bound == 0, odd | two, tl.where(bound == 1, two, odd & two))


@triton.jit
def _list_marked(marks, words, limit, wanted, candidates, CANDIDATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The positions of the highest bound that `wanted` reach, in order, as far as there is room; how many there are."""
    bound = 2
    reached = 0
    while (bound >= 0) & (reached < wanted):
        reached = 0
        for first in range(0, tl.cdiv(limit, 32), CANDIDATES):
            numbers = first + tl.arange(0, CANDIDATES)
            reached += tl.sum(_bits_set(_words_of(marks, numbers, words, limit, bound)), axis=0)
        bound -= 1
    bound += 1
    count = 0
    for first in range(0, tl.cdiv(limit, 32), CANDIDATES):
        numbers = first + tl.arange(0, CANDIDATES)
        marked = _words_of(marks, numbers, words, limit, bound)
        bits = _bits_set(marked)
        places = count + tl.cumsum(bits, axis=0) - bits
        count += tl.sum(bits, axis=0)
        while tl.max(marked, axis=0) != 0:
            without_lowest = marked & (marked - 1)
            bit = _bits_set((marked ^ without_lowest) - 1)
            tl.store(candidates + places, numbers * 32 + bit, mask=(marked != 0) & (places < CANDIDATES))
            places += 1
            marked = without_lowest
    return count


@triton.jit
def _choose_marked(  # type: ignore[no-untyped-def]
    scores,
    stride,
    limits,
    tokens,
    k,
    marks,
    words,
    candidates,
    counts,
    out,
    rows,
    position_rows,
    width,
    CANDIDATES: tl.constexpr,
    WITH_ROWS: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    base = query * width
    limit = tl.maximum(tl.minimum(tl.load(limits + query), tokens), 0).to(tl.int32)
    wanted = tl.minimum(limit, k)
    places = tl.arange(0, CANDIDATES)
    count = limit
    listed = candidates + query * CANDIDATES
    if limit > CANDIDATES:
        count = _list_marked(marks + query * 2 * words, words, limit, wanted, listed, CANDIDATES)
    else:
        tl.store(listed + places, places)
    tl.store(counts + query, count)
    # The candidates were written by other threads of this program.
    tl.debug_barrier()
    if (count >= wanted) & (count <= CANDIDATES):
        there = places < count
        positions = tl.load(listed + places, mask=there, other=0)
        keys = sortable(tl.load(scores + query * stride + positions, mask=there, other=0.0))
        lowest = tl.min(tl.where(there, keys, 0x7FFFFFFF), axis=0)
        keys = tl.where(there, keys, -2147483648)
        kth = _reached_by(keys, lowest, tl.max(keys, axis=0), wanted, wanted)
        above = there & (keys > kth)
        tied = there & (keys == kth)
        room = wanted - tl.sum(above.to(tl.int32), axis=0)
        take = above | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= room))
        put_positions(take, positions, 0, out, rows, position_rows, base, WITH_ROWS)
        put_padding(wanted, width, out, rows, base, CANDIDATES, WITH_ROWS)
