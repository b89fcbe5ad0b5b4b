"""Latent rows: conversion at the origin rank, store into the own pool, gather for the chosen tokens, values.

Float rows hold latent and rope key as they are. The packed fp8 row is the one that FlashMLA's sparse kernels read for
DeepSeek-V3.2; `s` is the largest magnitude of its 128 values / 448, not a power of two:

    | 128 e4m3 | 128 e4m3 | ... | s0 | s1 | ... | rope_dim bfloat16 |      value = e4m3 * s, in fp32
"""

from __future__ import annotations

import math

import torch

from cpkv.config.names import LatentDtype, WeightDtype
from cpkv.layout.row_format import FP8_SCALE_BYTES, LATENT_SCALE_GROUP, RowFormat
from cpkv.ops.words import as_words


def torch_dtype(name: WeightDtype) -> torch.dtype:
    """The torch dtype of a float format."""
    return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def encode_latent_rows(latent: torch.Tensor, rope_key: torch.Tensor, dtype: LatentDtype) -> torch.Tensor:
    """Convert rows to their stored form, once, where the tokens originate.

    In fp8 a NaN or an infinity makes all values of its 128 NaN.

    Args:
        latent: [tokens, kv_lora_rank] normed latents.
        rope_key: [tokens, rope_dim] rotated keys.
        dtype: of the stored row.

    Returns:
        uint8 [tokens, latent_row_bytes].
    """
    if dtype == "fp8":
        return _pack_rows(latent.to(torch.float32), rope_key)
    return torch.cat([latent, rope_key], dim=-1).to(torch_dtype(dtype)).contiguous().view(torch.uint8)


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
        return _as_floats(stored, torch_dtype(row_format.latent_dtype)).to(compute_dtype)
    rank = row_format.kv_lora_rank
    scales_end = rank + row_format.latent_scales * FP8_SCALE_BYTES
    scales = _as_floats(stored[..., rank:scales_end], torch.float32)
    values = torch.empty(*stored.shape[:-1], row_format.latent_width, dtype=compute_dtype, device=stored.device)
    for group, first in enumerate(range(0, rank, LATENT_SCALE_GROUP)):
        part = slice(first, min(first + LATENT_SCALE_GROUP, rank))
        quantised = stored[..., part].view(torch.float8_e4m3fn)
        values[..., part] = quantised.to(torch.float32) * scales[..., group : group + 1]
    values[..., rank:] = _as_floats(stored[..., scales_end:], torch.bfloat16)
    return values


def store_rows(pool_rows: torch.Tensor, rows: torch.Tensor, stored: torch.Tensor) -> None:
    """Write stored rows into a pool of rows of the same size.

    Args:
        pool_rows: uint8 [pool rows, row_bytes], contiguous.
        rows: int64 [tokens] rows of the pool, each at most once.
        stored: uint8 [tokens, row_bytes], each row contiguous.
    """
    words = as_words(pool_rows, divides=math.gcd(int(stored.storage_offset()), stored.stride(0)))
    words[rows] = stored.view(words.dtype)


def gather_rows(rows: torch.Tensor, row_numbers: torch.Tensor) -> torch.Tensor:
    """Copy chosen rows.

    Args:
        rows: uint8 [rows, row_bytes], each row contiguous.
        row_numbers: int64, any shape, 0 or more.

    Returns:
        uint8 [*row_numbers.shape, row_bytes], contiguous.
    """
    chosen = as_words(rows).index_select(0, row_numbers.reshape(-1))
    return chosen.view(rows.dtype).view(*row_numbers.shape, rows.shape[-1])


def _pack_rows(latent: torch.Tensor, rope_key: torch.Tensor) -> torch.Tensor:
    """Packed rows uint8 [tokens, latent_row_bytes] of fp32 latents and rope keys."""
    rank = latent.shape[1]
    groups = torch.nn.functional.pad(latent, (0, -rank % LATENT_SCALE_GROUP)).unflatten(1, (-1, LATENT_SCALE_GROUP))
    scales = groups.abs().amax(dim=-1) / torch.finfo(torch.float8_e4m3fn).max
    # At least a normal number: zeros then divide by no zero, and no device flushes the scale.
    scales = scales.clamp_min(torch.finfo(torch.float32).smallest_normal)
    quantised = (groups / scales.unsqueeze(-1)).flatten(1)[:, :rank].to(torch.float8_e4m3fn)
    return torch.cat([_as_bytes(quantised), _as_bytes(scales), _as_bytes(rope_key.to(torch.bfloat16))], dim=-1)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    # Cloned, since only rows whose values lie side by side can be seen as bytes, even where there is one token.
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _as_floats(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [..., n * item] as floats [..., n]: the same memory where it is aligned, else a copy."""
    places = (stored.data_ptr(), stored.storage_offset(), *stored.stride()[:-1])
    if all(place % dtype.itemsize == 0 for place in places):
        return stored.view(dtype)
    # A fresh buffer, since a slice of one row counts as contiguous wherever it starts and floats must be aligned.
    values = torch.empty(*stored.shape[:-1], stored.shape[-1] // dtype.itemsize, dtype=dtype, device=stored.device)
    values.view(torch.uint8).copy_(stored)
    return values
