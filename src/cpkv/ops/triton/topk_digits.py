"""The exact choice where no sample helps: the k-th best by its digits. Any scores, all equal ones too; five reads.

reads 1 to 4    of the scores that begin like the k-th best, how many have which next 8 bits -> its next 8 bits
read 5          what is better, and of its equals the first -> out
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpkv.ops.triton.choice_parts import put_padding, put_positions, sortable


@triton.jit
def choose_by_digits(  # type: ignore[no-untyped-def]
    scores,
    stride,
    limits,
    tokens,
    k,
    counts,
    out,
    rows,
    position_rows,
    width,
    CANDIDATES: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Choose for each query of which fewer than `wanted` or more than CANDIDATES candidates were found."""
    query = tl.program_id(0).to(tl.int64)
    row = scores + query * stride
    base = query * width
    count = tl.load(counts + query)
    limit = tl.maximum(tl.minimum(tl.load(limits + query), tokens), 0).to(tl.int32)
    wanted = tl.minimum(limit, k)
    if (count < wanted) | (count > CANDIDATES):
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
            positions = start + tl.arange(0, TILE)
            seen = positions < limit
            keys = _unsigned(sortable(tl.load(row + positions, mask=seen, other=0.0)))
            tied = seen & (keys == kth)
            take = (seen & (keys > kth)) | (tied & (ties + tl.cumsum(tied.to(tl.int32), axis=0) <= room))
            written += put_positions(take, positions, written, out, rows, position_rows, base, WITH_ROWS)
            ties += tl.sum(tied.to(tl.int32), axis=0)
        put_padding(wanted, width, out, rows, base, TILE, WITH_ROWS)


@triton.jit
def _unsigned(keys):  # type: ignore[no-untyped-def]
    """The same order without a sign."""
    return (keys ^ -2147483648).to(tl.uint32, bitcast=True)
