"""Latent rows: conversion at the origin rank, store into the own pool, gather for the chosen tokens."""

from __future__ import annotations

import torch

from cpkv.config.names import LatentDtype
from cpkv.ops.words import as_words


def torch_dtype(name: LatentDtype) -> torch.dtype:
    """The torch dtype of a float format."""
    return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def encode_latent_rows(latent: torch.Tensor, rope_key: torch.Tensor, dtype: LatentDtype) -> torch.Tensor:
    """Convert rows to their stored form, once, where the tokens originate.

    Args:
        latent: [tokens, kv_lora_rank] normed latents.
        rope_key: [tokens, rope_dim] rotated keys.
        dtype: of the stored row.

    Returns:
        uint8 [tokens, latent_row_bytes].
    """
    return torch.cat([latent, rope_key], dim=-1).to(torch_dtype(dtype)).contiguous().view(torch.uint8)


def decode_latent_rows(stored: torch.Tensor, dtype: LatentDtype) -> torch.Tensor:
    """Stored rows uint8 [..., latent_row_bytes] as values [..., latent_width]; the same memory."""
    return stored.view(torch_dtype(dtype))


def store_rows(pool_rows: torch.Tensor, rows: torch.Tensor, stored: torch.Tensor) -> None:
    """Write stored rows into a pool of rows of the same size.

    Args:
        pool_rows: uint8 [pool rows, row_bytes], contiguous.
        rows: int64 [tokens] rows of the pool, each at most once.
        stored: uint8 [tokens, row_bytes].
    """
    words = as_words(pool_rows, divides=int(stored.storage_offset()))
    words[rows] = stored.view(words.dtype)


def gather_rows(rows: torch.Tensor, row_numbers: torch.Tensor) -> torch.Tensor:
    """Copy rows [row_numbers.shape..., width] out of [rows, width]; every row number is 0 or more."""
    flat = rows.index_select(0, row_numbers.reshape(-1))
    return flat.view(*row_numbers.shape, rows.shape[-1])
