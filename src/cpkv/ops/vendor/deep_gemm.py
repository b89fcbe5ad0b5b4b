"""DeepGEMM's indexer scores over keys in position order, and over index blocks where they lie."""

from __future__ import annotations

import importlib

import torch

from cpkv.ops.vendor.hopper import VendorCall, why_not_hopper

INDEX_DIM = 128
PAGE_SIZE = 64
KEY_CALLS = (VendorCall("fp8_mqa_logits", 5, ("clean_logits",)),)
BLOCK_CALLS = (
    VendorCall("get_num_sms"),
    VendorCall("get_paged_mqa_logits_metadata", 3),
    VendorCall("fp8_paged_mqa_logits", 7, ("clean_logits",)),
)


def why_not(device: torch.device, heads: int, index_dim: int) -> str | None:
    """Say why `fp8_indexer_scores` cannot score with these heads on a device; None when it can."""
    return why_not_hopper("deep_gemm", KEY_CALLS, device) or _why_not_shape(heads, index_dim)


def why_not_paged(device: torch.device, heads: int, index_dim: int, page_size: int) -> str | None:
    """Say why `fp8_paged_indexer_scores` cannot score with these heads and pages on a device; None when it can."""
    if reason := why_not_hopper("deep_gemm", BLOCK_CALLS, device):
        return reason
    if page_size != PAGE_SIZE:
        return f"it takes pages of {PAGE_SIZE} tokens, not {page_size}"
    return _why_not_shape(heads, index_dim)


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


def fp8_paged_indexer_scores(
    queries: torch.Tensor, weights: torch.Tensor, blocks: torch.Tensor, page_table: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Score one query per request against the keys in its index blocks; see `cpkv.ops.reference.indexer`.

    Args:
        queries: float8_e4m3fn [requests, heads, 128], contiguous.
        weights: fp32 [requests, heads], contiguous.
        blocks: uint8 [blocks, 64 * 132], all keys of a page, then all scales; each block contiguous, at an address
            that is a multiple of 16; blocks may lie apart by a multiple of 16 bytes.
        page_table: int32 [requests, pages] blocks of each request by page position, each row contiguous; anything
            behind the last block that holds keys of the request.
        limits: int64 [requests] how many keys each query may see.

    Returns:
        fp32 [requests, pages * 64], rows perhaps apart; anything where a query may not look.
    """
    deep_gemm = importlib.import_module("deep_gemm")
    # One query per request, in a dimension of its own.
    ends = limits.to(torch.int32).unsqueeze(1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(ends, PAGE_SIZE, deep_gemm.get_num_sms())
    scores: torch.Tensor = deep_gemm.fp8_paged_mqa_logits(
        queries.unsqueeze(1),
        blocks.unflatten(1, (PAGE_SIZE, 1, -1)),
        weights,
        ends,
        page_table,
        schedule,
        page_table.shape[1] * PAGE_SIZE,
        clean_logits=False,
    )
    return scores


def _why_not_shape(heads: int, index_dim: int) -> str | None:
    if heads not in (32, 64) or index_dim != INDEX_DIM:
        return f"it takes 32 or 64 heads of {INDEX_DIM} values, not {heads} of {index_dim}"
    return None
