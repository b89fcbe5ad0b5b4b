"""Rounding of fp32 to narrower floats by integer arithmetic: the same bits on every device and in the interpreter.

    fp32      | sign | exponent, bias 127: 8 bits | mantissa: 23 bits |
    bfloat16  | sign | exponent, bias 127: 8 bits | mantissa: 7 bits  |
    e4m3      | sign | exponent, bias 7: 4 bits   | mantissa: 3 bits  |     exponent 0: multiples of 2^-9; 0x7F is NaN

Adding half of what is cut off, and the last bit that stays, rounds to the nearest, and to the even one of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_codes(values):  # type: ignore[no-untyped-def]
    """The nearest codes, uint8; NaN for what would be above 448."""
    bits = values.to(tl.int32, bitcast=True)
    # What would be 480 has the code of NaN, and so has all that is more: infinity and NaN too.
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43F00000)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # The values of fp32 from 2^14 on are 2^-9 apart, so the addition rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(magnitude < 0x3C800000, small, normal)
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes):  # type: ignore[no-untyped-def]
    """The values of codes, uint8, in fp32."""
    # The interpreter takes the code of NaN for a number.
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def nearest(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of any float dtype in `dtype`, a float of 16 bits or more; NaN stays NaN."""
    if values.dtype == dtype:
        return values
    elif values.dtype == tl.bfloat16:
        # Widened by hand, since the interpreter makes other numbers of subnormal ones.
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True).to(dtype)
    elif dtype == tl.bfloat16:
        single = values.to(tl.float32)
        bits = single.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # The carry would make another number of NaN, and a cut could make an infinity of it.
        codes = tl.where(single == single, rounded, (bits >> 16) | 0x40)
        return codes.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)
