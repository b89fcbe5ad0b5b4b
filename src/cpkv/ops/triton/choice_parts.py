"""Parts of the kernels that choose: scores as integers of the same order, and positions written in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sortable(scores):  # type: ignore[no-untyped-def]
    """Integers that order like fp32 scores; adding 0.0 makes -0.0 the +0.0 that it ties with."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(scores == scores, ordered, 0x7FFFFFFF)


@triton.jit
def put_positions(take, positions, first, out, rows, position_rows, base, WITH_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the positions that are taken, in order, from place `first` on; how many they were."""
    places = base + first + tl.cumsum(take.to(tl.int32), axis=0) - 1
    tl.store(out + places, positions.to(out.dtype.element_ty), mask=take)
    if WITH_ROWS:
        tl.store(rows + places, tl.load(position_rows + positions, mask=take, other=-1), mask=take)
    return tl.sum(take.to(tl.int32), axis=0)


@triton.jit
def put_padding(first, width, out, rows, base, TILE: tl.constexpr, WITH_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """-1 behind the last."""
    for start in range(first, width, TILE):
        places = start + tl.arange(0, TILE)
        none = tl.full([TILE], -1, tl.int32)
        tl.store(out + base + places, none.to(out.dtype.element_ty), mask=places < width)
        if WITH_ROWS:
            tl.store(rows + base + places, none, mask=places < width)
