"""The exact choice of more than a list holds: the k-th best by its digits. Any scores, all equal ones too; five reads.

reads 1 to 4    of the scores that begin like the k-th best, how many have which next 8 bits -> its next 8 bits
read 5          what is better, and of its equals the first -> out
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpkv.ops.triton.choice_parts import (
    are_best,
    how_many,
    in_fours,
    note_nan,
    put_padding,
    put_positions,
    sortable,
)


@triton.jit
def choose_by_digits(  # type: ignore[no-untyped-def]
    scores,
    stride,
    limits,
    tokens,
    k,
    out,
    rows,
    position_rows,
    nan_seen,
    TILE: tl.constexpr,
    FIND_NAN: tl.constexpr,
    WITH_ROWS: tl.constexpr,
):
    """Choose for one query."""
    query = tl.program_id(0).to(tl.int64)
    row = scores + query * stride
    base = query * k
    limit = tl.maximum(tl.minimum(tl.load(limits + query), tokens), 0).to(tl.int32)
    wanted = tl.minimum(limit, k)
    # The k-th best, 8 bits at a time: of the keys that begin like it, how many have which next digit.
    kth = tl.full([], 0, tl.uint32)
    room = wanted
    for shift in tl.static_range(24, -1, -8):
        have = tl.zeros([256], tl.int32)
        for start in range(0, limit, TILE):
            positions = start + tl.arange(0, TILE)
            seen = positions < limit
            keys = _unsigned(sortable(tl.load(row + positions, mask=seen, other=0.0)))
            if shift < 24:
                seen &= (keys >> (shift + 8)) == (kth >> (shift + 8))
            have += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=seen)
        digits = tl.arange(0, 256)
        # How many begin like it and have this digit or a higher one.
        not_below = tl.sum(have, axis=0) - tl.cumsum(have, axis=0) + have
        digit = tl.max(tl.where(not_below >= room, digits, 0), axis=0)
        room -= tl.sum(tl.where(digits > digit, have, 0), axis=0)
        kth |= digit.to(tl.uint32) << shift
    written = 0
    ties = 0
    for start in range(0, limit, TILE):
        positions = start + in_fours(TILE)
        seen = positions < limit
        values = tl.load(row + positions, mask=seen, other=0.0)
        if FIND_NAN:
            note_nan(values, nan_seen)
        keys = _unsigned(sortable(values))
        take, ties = are_best(keys, seen, kth, ties, room)
        put_positions(take, positions, written, out, rows, position_rows, base, WITH_ROWS)
        written += how_many(take)
    put_padding(wanted, k, out, rows, base, TILE, WITH_ROWS)


@triton.jit
def _unsigned(keys):  # type: ignore[no-untyped-def]
    """The same order without a sign."""
    return (keys ^ -2147483648).to(tl.uint32, bitcast=True)
