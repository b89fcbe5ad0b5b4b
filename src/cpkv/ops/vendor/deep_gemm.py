"""DeepGEMM's indexer scores over keys in position order."""

from __future__ import annotations

import importlib

import torch

from cpkv.ops.vendor.hopper import why_not_hopper

INDEX_DIM = 128


def why_not(device: torch.device, heads: int, index_dim: int) -> str | None:
    """Say why the kernel cannot score with these heads on a device; None when it can."""
    if reason := why_not_hopper("deep_gemm", device):
        return reason
    if heads not in (32, 64) or index_dim != INDEX_DIM:
        return f"it takes 32 or 64 heads of {INDEX_DIM} values, not {heads} of {index_dim}"
    return None


def fp8_indexer_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scales: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Score queries against every key that one of them may see; see `cpkv.ops.triton.indexer`.

    Args:
        queries: float8_e4m3fn [queries, heads, 128], contiguous.
        weights: fp32 [queries, heads], contiguous.
        keys: float8_e4m3fn [tokens, 128] in position order, contiguous.
        key_scales: fp32 [tokens].
        limits: int64 [queries] how many keys, from the first on, each query may see.

    Returns:
        fp32 [queries, tokens], rows perhaps apart; anything where a query may not look.
    """
    deep_gemm = importlib.import_module("deep_gemm")
    ends = limits.to(torch.int32)
    starts = torch.zeros_like(ends)
    scores: torch.Tensor = deep_gemm.fp8_mqa_logits(
        queries, (keys, key_scales), weights, starts, ends, clean_logits=False
    )
    return scores
