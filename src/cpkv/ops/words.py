"""Byte buffers seen as the widest integers that fit, since moving bytes one by one is several times slower."""

from __future__ import annotations

import torch

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


def as_words(rows: torch.Tensor, *, divides: int = 0) -> torch.Tensor:
    """View uint8 rows [..., bytes] as rows [..., words] of the widest integer that divides every stride.

    Args:
        rows: uint8, last dimension contiguous.
        divides: another row size in bytes that the word must divide, so that two buffers get the same word type.

    Returns:
        The same memory. Bits move unchanged through any integer type.
    """
    for size, dtype in _WORDS:
        sizes = (rows.shape[-1], divides, rows.storage_offset(), *rows.stride()[:-1])
        if all(value % size == 0 for value in sizes):
            return rows.view(dtype)
    return rows


def select_rows(rows: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows uint8 [rows, bytes] by number int64 [n] into `out`, uint8 [n, bytes] contiguous."""
    words = as_words(rows, divides=int(out.storage_offset()))
    torch.index_select(words, 0, numbers, out=out.view(words.dtype))
