"""Latent rows: conversion at the origin rank, store into the own pool, gather for the chosen tokens, values.

program of a copy         BLOCK words, whatever row they belong to, so that no lane is idle with rows of 41 words
program of a conversion   a few rows | lines of 128 values, one scale each | rope keys |

Scales and rope keys of packed rows are moved by bytes: they lie behind any number of values, so nothing says that they
are aligned. Where they are, the compiler joins the bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cpkv.config.names import LatentDtype
from cpkv.layout.row_format import FP8_SCALE_BYTES, LATENT_SCALE_GROUP, RowFormat
from cpkv.ops.reference import latent_rows as reference
from cpkv.ops.triton.float_codes import e4m3_codes, e4m3_values, nearest
from cpkv.ops.triton.words import rows_contiguous, widest_word

BLOCK_WORDS = 512
BLOCK_VALUES = 1024
ROWS_PER_PROGRAM = 4
NUM_WARPS = 4


def encode_latent_rows(latent: torch.Tensor, rope_key: torch.Tensor, dtype: LatentDtype) -> torch.Tensor:
    """Convert rows to their stored form, once, where the tokens originate.

    In fp8 a NaN or an infinity makes all values of its 128 NaN.

    Args:
        latent: [tokens, kv_lora_rank] normed latents, of any float dtype.
        rope_key: [tokens, rope_dim] rotated keys, likewise.
        dtype: of the stored row.

    Returns:
        uint8 [tokens, latent_row_bytes].
    """
    tokens, rank = latent.shape
    rope_dim = rope_key.shape[1]
    row_format = RowFormat(dtype, rank, rope_dim, "fp8", 0)
    latent, rope_key = rows_contiguous(latent), rows_contiguous(rope_key)
    sources = (latent, latent.stride(0), rope_key, rope_key.stride(0))
    if dtype == "fp8":
        packed = torch.empty(tokens, row_format.latent_row_bytes, dtype=torch.uint8, device=latent.device)
        if tokens:
            _pack[_rows_grid(tokens)](*sources, packed, tokens, **_row_shape(row_format), num_warps=NUM_WARPS)
        return packed
    rows = torch.empty(tokens, rank + rope_dim, dtype=reference.torch_dtype(dtype), device=latent.device)
    if tokens:
        grid = (triton.cdiv(rows.numel(), BLOCK_VALUES),)
        _join[grid](*sources, rows, tokens, RANK=rank, ROPE=rope_dim, BLOCK=BLOCK_VALUES, num_warps=NUM_WARPS)
    return rows.view(torch.uint8)


def decode_latent_rows(stored: torch.Tensor, row_format: RowFormat, compute_dtype: torch.dtype) -> torch.Tensor:
    """Read the values of stored rows; a row's values do not depend on where it lies or on its neighbours.

    Args:
        stored: uint8 [..., latent_row_bytes], each row contiguous; rows may lie anywhere, aligned or not.
        row_format: how they are stored.
        compute_dtype: float dtype of the values. A packed value is multiplied by its scale in fp32 before.

    Returns:
        [..., latent_width] in `compute_dtype`; the same memory for aligned float rows that are in that dtype already.
    """
    if row_format.latent_dtype != "fp8":
        return reference.decode_latent_rows(stored, row_format, compute_dtype)
    rows = stored.flatten(0, -2)
    values = torch.empty(len(rows), row_format.latent_width, dtype=compute_dtype, device=stored.device)
    if len(rows):
        grid = _rows_grid(len(rows))
        _unpack[grid](rows, rows.stride(0), values, len(rows), **_row_shape(row_format), num_warps=NUM_WARPS)
    return values.view(*stored.shape[:-1], row_format.latent_width)


def store_rows(pool_rows: torch.Tensor, rows: torch.Tensor, stored: torch.Tensor) -> None:
    """Write stored rows into a pool of rows of the same size.

    Args:
        pool_rows: uint8 [pool rows, row_bytes], each row contiguous.
        rows: int64 [tokens] rows of the pool, contiguous, each at most once; what belongs to -1 is written nowhere.
        stored: uint8 [tokens, row_bytes], each row contiguous.
    """
    _copy(stored, pool_rows, rows, gather=False)


def gather_rows(rows: torch.Tensor, row_numbers: torch.Tensor) -> torch.Tensor:
    """Copy chosen rows.

    Args:
        rows: uint8 [rows, row_bytes], each row contiguous.
        row_numbers: int32 or int64, any shape. For -1 nothing is read, and the row is zeros.

    Returns:
        uint8 [*row_numbers.shape, row_bytes], contiguous.
    """
    chosen = torch.empty(row_numbers.numel(), rows.shape[1], dtype=rows.dtype, device=rows.device)
    _copy(rows, chosen, row_numbers.reshape(-1), gather=True)
    return chosen.view(*row_numbers.shape, rows.shape[1])


def _copy(source: torch.Tensor, target: torch.Tensor, numbers: torch.Tensor, *, gather: bool) -> None:
    """Copy rows: `numbers` says which of the source come, or which of the target are written."""
    row_bytes = source.shape[1]
    if not len(numbers) or not row_bytes:
        return
    word = widest_word(row_bytes, source.stride(0), target.stride(0), source.data_ptr(), target.data_ptr())
    words = row_bytes // word.num_bytes
    _copy_rows[(triton.cdiv(len(numbers) * words, BLOCK_WORDS),)](
        word.over(source),
        source.stride(0) // word.num_bytes,
        word.over(target),
        target.stride(0) // word.num_bytes,
        numbers,
        len(numbers),
        GATHER=gather,
        WORDS=words,
        LANES=word.lanes,
        BLOCK=BLOCK_WORDS,
        num_warps=NUM_WARPS,
    )


def _rows_grid(rows: int) -> tuple[int]:
    return (triton.cdiv(rows, ROWS_PER_PROGRAM),)


def _row_shape(row_format: RowFormat) -> dict[str, int]:
    """The constants of the kernels that know packed rows."""
    return {
        "RANK": row_format.kv_lora_rank,
        "ROPE": row_format.rope_dim,
        "SCALES": row_format.latent_scales,
        "SCALE_BYTES": FP8_SCALE_BYTES,
        "ROW_BYTES": row_format.latent_row_bytes,
        "GROUP": LATENT_SCALE_GROUP,
        "LINES": triton.next_power_of_2(row_format.latent_scales),
        "ROPES": triton.next_power_of_2(row_format.rope_dim),
        "ROWS": ROWS_PER_PROGRAM,
    }


@triton.jit
def _copy_rows(  # type: ignore[no-untyped-def]
    source,
    source_stride,
    target,
    target_stride,
    numbers,
    rows,
    GATHER: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = places // WORDS
    word = places % WORDS
    there = row < rows
    number = tl.load(numbers + row, mask=there, other=-1).to(tl.int64)
    named = there & (number >= 0)
    lanes = tl.arange(0, LANES)[None, :]
    if GATHER:
        sources = number * source_stride + word
        targets = row * target_stride + word
        written = there
    else:
        sources = row * source_stride + word
        targets = number * target_stride + word
        written = named
    values = tl.load(source + sources[:, None] * LANES + lanes, mask=named[:, None], other=0)
    tl.store(target + targets[:, None] * LANES + lanes, values, mask=written[:, None])


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    latent,
    latent_stride,
    rope_key,
    rope_stride,
    out,
    tokens,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = places // (RANK + ROPE)
    column = places % (RANK + ROPE)
    there = row < tokens
    ranks = tl.load(latent + row * latent_stride + column, mask=there & (column < RANK), other=0.0)
    ropes = tl.load(rope_key + row * rope_stride + column - RANK, mask=there & (column >= RANK), other=0.0)
    dtype = out.dtype.element_ty
    tl.store(out + places, tl.where(column < RANK, nearest(ranks, dtype), nearest(ropes, dtype)), mask=there)


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    latent,
    latent_stride,
    rope_key,
    rope_stride,
    packed,
    tokens,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    ROPES: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    lines = tl.arange(0, ROWS * LINES)
    group = lines % LINES
    row = first + lines // LINES
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = (row < tokens)[:, None] & (columns < RANK)
    values = nearest(tl.load(latent + row[:, None] * latent_stride + columns, mask=there, other=0.0), tl.float32)
    # At least a normal number: zeros then divide by no zero, and no device flushes the scale.
    scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(values), axis=1), 448.0), 1.1754943508222875e-38)
    # The maximum of a device may leave NaN out.
    unknown = tl.max((values != values).to(tl.int32), axis=1) > 0
    scale = tl.where(unknown, float("nan"), scale)
    codes = e4m3_codes(tl.math.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)))
    tl.store(packed + row[:, None] * ROW_BYTES + columns, codes, mask=there)
    parts = tl.arange(0, SCALE_BYTES)[None, :]
    places = row * ROW_BYTES + RANK + group * SCALE_BYTES
    scale_bytes = (scale.to(tl.int32, bitcast=True)[:, None] >> (8 * parts)).to(tl.uint8)
    tl.store(packed + places[:, None] + parts, scale_bytes, mask=((row < tokens) & (group < SCALES))[:, None])
    ropes = tl.arange(0, ROWS * ROPES)
    row = first + ropes // ROPES
    column = ropes % ROPES
    there = (row < tokens) & (column < ROPE)
    key = nearest(tl.load(rope_key + row * rope_stride + column, mask=there, other=0.0), tl.bfloat16)
    halves = tl.arange(0, 2)[None, :]
    places = row * ROW_BYTES + RANK + SCALES * SCALE_BYTES + column * 2
    key_bytes = (key.to(tl.int16, bitcast=True)[:, None] >> (8 * halves)).to(tl.uint8)
    tl.store(packed + places[:, None] + halves, key_bytes, mask=there[:, None])


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    stored,
    stride,
    values,
    rows,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    ROPES: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    lines = tl.arange(0, ROWS * LINES)
    group = lines % LINES
    row = first + lines // LINES
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = (row < rows)[:, None] & (columns < RANK)
    codes = tl.load(stored + row[:, None] * stride + columns, mask=there, other=0)
    parts = tl.arange(0, SCALE_BYTES)[None, :]
    places = row * stride + RANK + group * SCALE_BYTES
    known = ((row < rows) & (group < SCALES))[:, None]
    scale_bytes = tl.load(stored + places[:, None] + parts, mask=known, other=0).to(tl.int32)
    scale = tl.sum(scale_bytes << (8 * parts), axis=1).to(tl.float32, bitcast=True)
    value = e4m3_values(codes) * scale[:, None]
    tl.store(values + row[:, None] * (RANK + ROPE) + columns, nearest(value, values.dtype.element_ty), mask=there)
    ropes = tl.arange(0, ROWS * ROPES)
    row = first + ropes // ROPES
    column = ropes % ROPES
    there = (row < rows) & (column < ROPE)
    halves = tl.arange(0, 2)[None, :]
    places = row * stride + RANK + SCALES * SCALE_BYTES + column * 2
    key_bytes = tl.load(stored + places[:, None] + halves, mask=there[:, None], other=0).to(tl.int32)
    # A bfloat16 is the upper half of an fp32.
    key = tl.sum(key_bytes << (16 + 8 * halves), axis=1).to(tl.float32, bitcast=True)
    targets = row * (RANK + ROPE) + RANK + column
    tl.store(values + targets, nearest(key, values.dtype.element_ty), mask=there)
