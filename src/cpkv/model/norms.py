"""Norms that keep float64 and compute in float32 below it, as transformers does."""

from __future__ import annotations

import torch
from torch.nn import functional


def compute_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, rope, router, scores and softmax are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension of [tokens, dim]; result in the dtype of `values`."""
    wide = values.to(compute_dtype_of(values.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(values.dtype)


def layer_norm(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm over the last dimension; result in the compute dtype."""
    wide = compute_dtype_of(values.dtype)
    return functional.layer_norm(values.to(wide), values.shape[-1:], weight.to(wide), bias.to(wide), eps)
