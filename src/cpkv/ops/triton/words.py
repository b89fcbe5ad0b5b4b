"""Bytes moved by words as wide as addresses and distances allow, 16 bytes at most.

A word of 16 bytes is two int64 side by side, which the compiler joins into one access; the kernels count in words.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Word(NamedTuple):
    """What a kernel moves at a time: `lanes` values of an integer type."""

    num_bytes: int
    dtype: tl.dtype
    lanes: int

    def over(self, memory: torch.Tensor) -> Any:
        """The memory of a tensor, from its first element on, as a kernel's argument."""
        return triton.reinterpret(memory, self.dtype)


def widest_word(*places: int) -> Word:
    """The widest word that divides all addresses and distances, in bytes."""
    num_bytes = math.gcd(16, *places)
    dtype = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}[num_bytes]
    return Word(num_bytes, dtype, 2 if num_bytes == 16 else 1)


def rows_contiguous(values: torch.Tensor) -> torch.Tensor:
    """The same values, each row's side by side."""
    return values if values.stride(-1) == 1 else values.contiguous()
