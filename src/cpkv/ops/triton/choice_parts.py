"""Parts of the kernels that choose. Tiles have shape [n / 4, 4], so that a thread holds four neighbours, 16 bytes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_fours(TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """0 to TILE - 1."""
    return tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def how_many(take):  # type: ignore[no-untyped-def]
    """How many of a tile are taken."""
    return tl.sum(tl.sum(take.to(tl.int32), axis=1), axis=0)


@triton.jit
def before_each(take):  # type: ignore[no-untyped-def]
    """How many of those before each place of a tile are taken."""
    taken = take.to(tl.int32)
    of_four = tl.sum(taken, axis=1)
    return (tl.cumsum(of_four, axis=0) - of_four)[:, None] + tl.cumsum(taken, axis=1) - taken


@triton.jit
def sortable(scores):  # type: ignore[no-untyped-def]
    """Integers that order like fp32 scores; adding 0.0 makes -0.0 the +0.0 that it ties with; NaN is above all."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(scores == scores, ordered, 0x7FFFFFFF)


@triton.jit
def score_of(keys):  # type: ignore[no-untyped-def]
    """The scores of which `sortable` makes these integers; any NaN for those above infinity."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def reached_by(keys, lowest, highest, least, most):  # type: ignore[no-untyped-def]
    """An integer that `least` to `most` of the keys reach, or where ties leave none the largest that `least` do.

    It lies from `lowest` to `highest`. Bisection is in 64 bits, since keys span 32.
    """
    low = lowest.to(tl.int64)
    high = highest.to(tl.int64) + 1
    reached = how_many(keys >= low.to(tl.int32))
    while (high - low > 1) & (reached > most):
        middle = (low + high) >> 1
        above = how_many(keys >= middle.to(tl.int32))
        enough = above >= least
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reached = tl.where(enough, above, reached)
    return low.to(tl.int32)


@triton.jit
def are_best(keys, there, last, ties, room):  # type: ignore[no-untyped-def]
    """Which keys of a tile are above the last of the best, or of its equals the first `room`, `ties` of them before."""
    take = there & (keys > last)
    if room > 0:
        tied = there & (keys == last)
        take |= tied & (ties + before_each(tied) < room)
        ties += how_many(tied)
    return take, ties


@triton.jit
def put_positions(take, positions, first, out, rows, position_rows, base, WITH_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the positions that are taken, in order, from place `first` on."""
    places = base + first + before_each(take)
    tl.store(out + places, positions.to(out.dtype.element_ty), mask=take)
    if WITH_ROWS:
        tl.store(rows + places, tl.load(position_rows + positions, mask=take, other=-1), mask=take)


@triton.jit
def put_padding(first, width, out, rows, base, TILE: tl.constexpr, WITH_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """-1 behind the last."""
    for start in range(first, width, TILE):
        places = start + tl.arange(0, TILE)
        none = tl.full([TILE], -1, tl.int32)
        tl.store(out + base + places, none.to(out.dtype.element_ty), mask=places < width)
        if WITH_ROWS:
            tl.store(rows + base + places, none, mask=places < width)


@triton.jit
def note_nan(scores, nan_seen):  # type: ignore[no-untyped-def]
    """Remember whether a score of a tile is NaN."""
    tl.atomic_max(nan_seen, tl.minimum(how_many(scores != scores), 1))
