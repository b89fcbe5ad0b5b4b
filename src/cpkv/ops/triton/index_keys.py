"""Index keys: conversion at the origin rank, store into index pages, unpacking in position order.

program of a store      BLOCK words of stored rows, whatever row they belong to
program of an unpack    a piece of one block's keys, read as they lie; the first piece takes the block's scales along

Keys and scales have words of their own: in fp8 a stored row of 132 bytes is moved by 4, and a key alone by 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cpkv.config.names import IndexDtype
from cpkv.layout.row_format import FP8_SCALE_BYTES
from cpkv.ops.reference import index_keys as reference
from cpkv.ops.triton.float_codes import e4m3_codes, nearest
from cpkv.ops.triton.words import rows_contiguous, widest_word

BLOCK_WORDS = 512
KEYS_PER_PROGRAM = 16
NUM_WARPS = 4


def encode_index_keys(keys: torch.Tensor, dtype: IndexDtype) -> torch.Tensor:
    """Convert index keys to their stored form, once, where the tokens originate.

    In fp8 a NaN or an infinity makes the whole key NaN, its scale too.

    Args:
        keys: [tokens, index_dim], rotated, of any float dtype.
        dtype: of the stored key.

    Returns:
        uint8 [tokens, index_row_bytes].
    """
    if dtype != "fp8":
        return reference.encode_index_keys(keys, dtype)
    tokens, dim = keys.shape
    keys = rows_contiguous(keys)
    stored = torch.empty(tokens, dim + FP8_SCALE_BYTES, dtype=torch.uint8, device=keys.device)
    if tokens:
        _encode[(triton.cdiv(tokens, KEYS_PER_PROGRAM),)](
            keys,
            keys.stride(0),
            stored,
            tokens,
            DIM=dim,
            DIMS=triton.next_power_of_2(dim),
            SCALE_BYTES=FP8_SCALE_BYTES,
            SMALLEST=reference.SMALLEST_AMAX,
            KEYS=KEYS_PER_PROGRAM,
            num_warps=NUM_WARPS,
        )
    return stored


def store_index_keys(
    blocks: torch.Tensor,
    block_numbers: torch.Tensor,
    offsets: torch.Tensor,
    stored: torch.Tensor,
    *,
    page_size: int,
    key_bytes: int,
) -> None:
    """Write stored rows into index blocks.

    Args:
        blocks: uint8 [blocks, block_bytes], each block contiguous; they may lie apart.
        block_numbers: int64 [tokens] block of each token, contiguous; what belongs to -1 is written nowhere.
        offsets: int64 [tokens] place of each token in its page, contiguous.
        stored: uint8 [tokens, index_row_bytes], each row contiguous.
        page_size: tokens of a block.
        key_bytes: bytes of a key without its scale.
    """
    tokens, row_bytes = stored.shape
    if not tokens:
        return
    word = widest_word(key_bytes, row_bytes, stored.stride(0), blocks.stride(0), stored.data_ptr(), blocks.data_ptr())
    _store[(triton.cdiv(tokens * (row_bytes // word.num_bytes), BLOCK_WORDS),)](
        word.over(blocks),
        blocks.stride(0) // word.num_bytes,
        block_numbers,
        offsets,
        word.over(stored),
        stored.stride(0) // word.num_bytes,
        tokens,
        PAGE_SIZE=page_size,
        KEY_WORDS=key_bytes // word.num_bytes,
        SCALE_WORDS=(row_bytes - key_bytes) // word.num_bytes,
        LANES=word.lanes,
        BLOCK=BLOCK_WORDS,
        num_warps=NUM_WARPS,
    )


def unpack_index_keys(
    blocks: torch.Tensor,
    block_numbers: torch.Tensor,
    *,
    tokens: int,
    page_size: int,
    key_bytes: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy a request's index keys out of its blocks, in position order.

    Args:
        blocks: uint8 [blocks, block_bytes], each block contiguous; they may lie apart.
        block_numbers: int64 [pages] the request's blocks by logical page position, contiguous. For -1 nothing is
            read, and zeros are written.
        tokens: how many tokens to unpack; the rest of the last block is not read.
        page_size: tokens of a block.
        key_bytes: bytes of a key without its scale.
        out: uint8 [tokens, index_row_bytes] contiguous, where to put them; made when left out.

    Returns:
        Stored rows, uint8 [tokens, index_row_bytes].
    """
    if out is None:
        out = torch.empty(tokens, blocks.shape[1] // page_size, dtype=blocks.dtype, device=blocks.device)
    _unpack(blocks, block_numbers, out[:, :key_bytes], out[:, key_bytes:], tokens, page_size)
    return out


def unpack_keys_and_scales(
    blocks: torch.Tensor,
    block_numbers: torch.Tensor,
    *,
    tokens: int,
    page_size: int,
    key_bytes: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a request's fp8 index keys out of its blocks in position order, as scoring kernels take them.

    Args:
        blocks: uint8 [blocks, block_bytes]; see `unpack_index_keys`.
        block_numbers: likewise.
        tokens: likewise.
        page_size: likewise.
        key_bytes: likewise.
        out: where to put them, contiguous, shaped as what is returned; made when left out.

    Returns:
        Keys uint8 [tokens, key_bytes], and scales fp32 [tokens].
    """
    if out is None:
        keys = torch.empty(tokens, key_bytes, dtype=blocks.dtype, device=blocks.device)
        out = keys, torch.empty(tokens, dtype=torch.float32, device=blocks.device)
    _unpack(blocks, block_numbers, out[0], out[1].unsqueeze(1).view(torch.uint8), tokens, page_size)
    return out


def _unpack(
    blocks: torch.Tensor,
    block_numbers: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    tokens: int,
    page_size: int,
) -> None:
    """Keys uint8 [tokens, key_bytes] and scales uint8 [tokens, 4 or 0] out of blocks, rows of either anywhere."""
    if not tokens:
        return
    block_keys, block_scales = blocks, blocks[:, page_size * keys.shape[1] :]
    key_word = widest_word(keys.shape[1], keys.stride(0), blocks.stride(0), keys.data_ptr(), blocks.data_ptr())
    # Without scales there is nothing to read, whatever the word.
    scale_word = widest_word(
        scales.shape[1], scales.stride(0), blocks.stride(0), scales.data_ptr(), block_scales.data_ptr()
    )
    key_words = keys.shape[1] // key_word.num_bytes
    pieces = triton.cdiv(page_size * key_words, BLOCK_WORDS)
    _unpack_blocks[(triton.cdiv(tokens, page_size) * pieces,)](
        key_word.over(block_keys),
        blocks.stride(0) // key_word.num_bytes,
        scale_word.over(block_scales),
        blocks.stride(0) // scale_word.num_bytes,
        block_numbers,
        key_word.over(keys),
        keys.stride(0) // key_word.num_bytes,
        scale_word.over(scales),
        scales.stride(0) // scale_word.num_bytes,
        tokens,
        PAGE_SIZE=page_size,
        PIECES=pieces,
        KEY_WORDS=key_words,
        KEY_LANES=key_word.lanes,
        SCALE_WORDS=scales.shape[1] // scale_word.num_bytes,
        BLOCK=BLOCK_WORDS,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    keys,
    stride,
    stored,
    tokens,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    SMALLEST: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    columns = tl.arange(0, DIMS)[None, :]
    there = (row < tokens)[:, None] & (columns < DIM)
    values = nearest(tl.load(keys + row[:, None] * stride + columns, mask=there, other=0.0), tl.float32)
    # As integers the magnitudes order alike, and NaN is above all.
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = tl.maximum(tl.where(bits < 0x7F800000, bits.to(tl.float32, bitcast=True), 0.0), SMALLEST)
    # Any bit of the mantissa carries into the exponent: the next power of two.
    power = (tl.math.div_rn(amax, 448.0).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale_bits = tl.where(bits < 0x7F800000, power, 0x7FC00000)
    scale = scale_bits.to(tl.float32, bitcast=True)
    codes = e4m3_codes(tl.math.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)))
    first = row[:, None] * (DIM + SCALE_BYTES)
    tl.store(stored + first + columns, codes, mask=there)
    parts = tl.arange(0, SCALE_BYTES)[None, :]
    scale_bytes = (scale_bits[:, None] >> (8 * parts)).to(tl.uint8)
    tl.store(stored + first + DIM + parts, scale_bytes, mask=(row < tokens)[:, None])


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    blocks,
    block_stride,
    block_numbers,
    offsets,
    stored,
    stored_stride,
    tokens,
    PAGE_SIZE: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = places // (KEY_WORDS + SCALE_WORDS)
    word = places % (KEY_WORDS + SCALE_WORDS)
    number = tl.load(block_numbers + token, mask=token < tokens, other=-1).to(tl.int64)
    named = number >= 0
    offset = tl.load(offsets + token, mask=named, other=0).to(tl.int64)
    in_scale = PAGE_SIZE * KEY_WORDS + offset * SCALE_WORDS + word - KEY_WORDS
    targets = number * block_stride + tl.where(word < KEY_WORDS, offset * KEY_WORDS + word, in_scale)
    sources = token * stored_stride + word
    lanes = tl.arange(0, LANES)[None, :]
    values = tl.load(stored + sources[:, None] * LANES + lanes, mask=named[:, None], other=0)
    tl.store(blocks + targets[:, None] * LANES + lanes, values, mask=named[:, None])


@triton.jit
def _unpack_blocks(  # type: ignore[no-untyped-def]
    block_keys,
    key_block_stride,
    block_scales,
    scale_block_stride,
    block_numbers,
    keys,
    key_stride,
    scales,
    scale_stride,
    tokens,
    PAGE_SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    KEY_LANES: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = (tl.program_id(0) // PIECES).to(tl.int64)
    piece = tl.program_id(0) % PIECES
    number = tl.load(block_numbers + page).to(tl.int64)
    readable = tl.where(number >= 0, tokens, 0)
    words = piece * BLOCK + tl.arange(0, BLOCK)
    token = page * PAGE_SIZE + words // KEY_WORDS
    there = (words < PAGE_SIZE * KEY_WORDS) & (token < tokens)
    lanes = tl.arange(0, KEY_LANES)[None, :]
    sources = (number * key_block_stride + words)[:, None] * KEY_LANES + lanes
    targets = (token * key_stride + words % KEY_WORDS)[:, None] * KEY_LANES + lanes
    values = tl.load(block_keys + sources, mask=(there & (token < readable))[:, None], other=0)
    tl.store(keys + targets, values, mask=there[:, None])
    if SCALE_WORDS > 0:
        if piece == 0:
            for start in range(0, PAGE_SIZE * SCALE_WORDS, BLOCK):
                parts = start + tl.arange(0, BLOCK)
                owners = page * PAGE_SIZE + parts // SCALE_WORDS
                inside = (parts < PAGE_SIZE * SCALE_WORDS) & (owners < tokens)
                places = number * scale_block_stride + parts
                scale = tl.load(block_scales + places, mask=inside & (owners < readable), other=0)
                tl.store(scales + owners * scale_stride + parts % SCALE_WORDS, scale, mask=inside)
