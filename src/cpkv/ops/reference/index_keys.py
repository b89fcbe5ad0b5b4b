"""Index keys: conversion at the origin rank, store into index pages, unpacking in position order.

A stored row of a token is its key, followed in fp8 by its fp32 scale. A page (block) of float keys is its rows one
after another; an fp8 block is all keys of the page, then all scales, which is what scoring kernels read:

    row    | key, dim e4m3 | scale |
    block  | key 0 | key 1 | ... | key page_size-1 | scale 0 | scale 1 | ... | scale page_size-1 |
"""

from __future__ import annotations

import torch

from cpkv.config.names import IndexDtype
from cpkv.layout.row_format import FP8_SCALE_BYTES
from cpkv.ops.reference.latent_rows import torch_dtype

FP8_MAX = 448.0
SMALLEST_AMAX = 1e-4
UNPACK_PAGES = 256


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is at least amax / 448 (ue8m0 as in DeepSeek-V3.2's published code), fp32."""
    mantissa, exponent = torch.frexp(amax.to(torch.float32).clamp_min(SMALLEST_AMAX) / FP8_MAX)
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype))


def encode_index_keys(keys: torch.Tensor, dtype: IndexDtype) -> torch.Tensor:
    """Convert index keys to their stored form, once, where the tokens originate.

    Args:
        keys: [tokens, index_dim], rotated.
        dtype: of the stored key.

    Returns:
        uint8 [tokens, index_row_bytes].
    """
    if dtype != "fp8":
        return keys.to(torch_dtype(dtype)).contiguous().view(torch.uint8)
    scale = power_of_two_scale(keys.abs().amax(dim=-1, keepdim=True))
    quantised = (keys.to(torch.float32) / scale).to(torch.float8_e4m3fn)
    # One token's scale can come out with a stride of 0, which cannot be seen as bytes.
    scale_bytes = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.cat([quantised.view(torch.uint8), scale_bytes], dim=-1)


def decode_index_keys(stored: torch.Tensor, dtype: IndexDtype, compute_dtype: torch.dtype) -> torch.Tensor:
    """Stored rows uint8 [tokens, index_row_bytes] as keys [tokens, index_dim] in the dtype of scoring."""
    if dtype != "fp8":
        # Always a copy: tiles of it are then aligned alike whatever view they came from.
        return stored.view(torch_dtype(dtype)).to(compute_dtype, copy=True)
    keys = stored[:, :-FP8_SCALE_BYTES].view(torch.float8_e4m3fn)
    # A fresh buffer, since a slice of one row counts as contiguous wherever it starts and floats must be aligned.
    scale = torch.empty(len(stored), 1, dtype=torch.float32, device=stored.device)
    scale.view(torch.uint8).copy_(stored[:, -FP8_SCALE_BYTES:])
    return keys.to(compute_dtype) * scale.to(compute_dtype)


def split_index_blocks(blocks: torch.Tensor, page_size: int, key_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of blocks uint8 [blocks, block_bytes]: keys [blocks, page_size, key_bytes] and scales [.., .., 4 or 0]."""
    keys = blocks[:, : page_size * key_bytes].unflatten(1, (page_size, key_bytes))
    scales = blocks[:, page_size * key_bytes :]
    return keys, scales.unflatten(1, (page_size, -1)) if scales.shape[1] else scales


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
        blocks: uint8 [blocks, block_bytes].
        block_numbers: int64 [tokens] block of each token.
        offsets: int64 [tokens] place of each token in its page.
        stored: uint8 [tokens, index_row_bytes].
        page_size: tokens of a block.
        key_bytes: bytes of a key without its scale.
    """
    keys, scales = split_index_blocks(blocks, page_size, key_bytes)
    keys[block_numbers, offsets] = stored[:, :key_bytes]
    if stored.shape[1] > key_bytes:
        scales[block_numbers, offsets] = stored[:, key_bytes:]


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
        blocks: uint8 [blocks, block_bytes].
        block_numbers: int64 [pages] the request's blocks by logical page position.
        tokens: how many tokens to unpack; the rest of the last block is not read.
        page_size: tokens of a block.
        key_bytes: bytes of a key without its scale.
        out: uint8 [tokens, index_row_bytes] contiguous, where to put them; made when left out.

    Returns:
        Stored rows, uint8 [tokens, index_row_bytes].
    """
    if out is None:
        out = blocks.new_empty(tokens, blocks.shape[1] // page_size)
    # A few pages at a time, so that no second copy of all keys exists.
    for first_page in range(0, -(-tokens // page_size), UNPACK_PAGES):
        first = first_page * page_size
        last = min(tokens, first + UNPACK_PAGES * page_size)
        pages = blocks.index_select(0, block_numbers[first_page : first_page + UNPACK_PAGES])
        keys, scales = split_index_blocks(pages, page_size, key_bytes)
        out[first:last, :key_bytes] = keys.flatten(0, 1)[: last - first]
        if scales.shape[1]:
            out[first:last, key_bytes:] = scales.flatten(0, 1)[: last - first]
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
        blocks: uint8 [blocks, block_bytes].
        block_numbers: int64 [pages] the request's blocks by logical page position.
        tokens: how many tokens to unpack; the rest of the last block is not read.
        page_size: tokens of a block.
        key_bytes: bytes of a key without its scale.
        out: where to put them, contiguous, shaped as what is returned; made when left out.

    Returns:
        Keys uint8 [tokens, key_bytes], and scales fp32 [tokens].
    """
    stored = unpack_index_keys(blocks, block_numbers, tokens=tokens, page_size=page_size, key_bytes=key_bytes)
    if out is None:
        out = blocks.new_empty(tokens, key_bytes), torch.empty(tokens, dtype=torch.float32, device=blocks.device)
    out[0].copy_(stored[:, :key_bytes])
    out[1].unsqueeze(1).view(torch.uint8).copy_(stored[:, key_bytes:])
    return out
