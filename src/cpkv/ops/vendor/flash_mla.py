"""FlashMLA's sparse kernels, which read rows of a view, or of pages, where they lie."""

from __future__ import annotations

import importlib

import torch

from cpkv.ops.vendor.hopper import VendorCall, why_not_hopper

HEADS_AT_A_TIME = 64
CHOSEN_AT_A_TIME = 128
PAGE_CHOSEN_AT_A_TIME = 64
LATENT_WIDTH, VALUE_WIDTH = 576, 512
ROWS_CALLS = (VendorCall("flash_mla_sparse_fwd", 5, ("use_legacy",)),)
PAGES_CALLS = (
    VendorCall("get_mla_metadata"),
    VendorCall("flash_mla_with_kvcache", 6, ("softmax_scale", "is_fp8_kvcache", "indices", "use_legacy")),
)


def why_not(device: torch.device, heads: int, latent_width: int, kv_lora_rank: int) -> str | None:
    """Say why `sparse_mla_rows` cannot attend with these heads and rows on a device; None when it can."""
    reason = why_not_hopper("flash_mla", ROWS_CALLS, device)
    return reason or _why_not_shape(heads, latent_width, kv_lora_rank)


def why_not_pages(device: torch.device, heads: int, latent_width: int, kv_lora_rank: int) -> str | None:
    """Say why `sparse_mla_pages` cannot attend with these heads and rows on a device; None when it can."""
    if reason := why_not_hopper("flash_mla", PAGES_CALLS, device):
        return reason
    if heads > 2 * HEADS_AT_A_TIME:
        return f"it takes {HEADS_AT_A_TIME} or {2 * HEADS_AT_A_TIME} heads, not {heads}"
    return _why_not_shape(heads, latent_width, kv_lora_rank)


def sparse_mla_rows(
    queries: torch.Tensor, latent: torch.Tensor, view_rows: torch.Tensor, *, scale: float, kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from queries to chosen rows of a view; see `cpkv.ops.triton.sparse_mla`.

    Args:
        queries: bfloat16 [queries, heads, 576], absorbed, contiguous.
        latent: bfloat16 [view rows, 576].
        view_rows: int32 [queries, chosen], contiguous; -1 is no token.
        scale: softmax scale.
        kv_lora_rank: 512.

    Returns:
        Outputs bfloat16 [queries, heads, 512], and the natural logarithm of the sum of exponentials, fp32
        [queries, heads]. A query without a token has zeros, and -inf.
    """
    flash_mla = importlib.import_module("flash_mla")
    chosen = _padded(view_rows, CHOSEN_AT_A_TIME)
    out, _, log_sums = flash_mla.flash_mla_sparse_fwd(
        queries, latent.unsqueeze(1), chosen.unsqueeze(1), scale, kv_lora_rank, use_legacy=True
    )
    return out, _none_is_lowest(log_sums)


def sparse_mla_pages(
    queries: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, *, scale: float, kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from queries to chosen rows of packed pages; see `cpkv.ops.reference.sparse_mla`.

    The kernel rounds scales, and the values that it makes with them, to bfloat16.

    Args:
        queries: bfloat16 [queries, heads, 576], absorbed, contiguous.
        pages: uint8 [pages, page_size, 656] packed rows of one layer, each page contiguous, at an address that is a
            multiple of 16; pages may lie apart by a multiple of 16 bytes.
        rows: int32 [queries, chosen], contiguous: page * page_size + offset; -1 is no token.
        scale: softmax scale.
        kv_lora_rank: 512.

    Returns:
        Outputs bfloat16 [queries, heads, 512], and the natural logarithm of the sum of exponentials, fp32
        [queries, heads]. A query without a token has zeros, and -inf.
    """
    flash_mla = importlib.import_module("flash_mla")
    out, log_sums = flash_mla.flash_mla_with_kvcache(
        queries.unsqueeze(1),
        pages.unsqueeze(2),
        None,
        None,
        kv_lora_rank,
        # Empty, so that the call makes a schedule of its own.
        flash_mla.get_mla_metadata()[0],
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=_padded(rows, PAGE_CHOSEN_AT_A_TIME).unsqueeze(1),
        use_legacy=True,
    )
    return out.squeeze(1), _none_is_lowest(log_sums.squeeze(2))


def _why_not_shape(heads: int, latent_width: int, kv_lora_rank: int) -> str | None:
    if heads % HEADS_AT_A_TIME:
        return f"it takes a multiple of {HEADS_AT_A_TIME} heads, not {heads}"
    if (latent_width, kv_lora_rank) != (LATENT_WIDTH, VALUE_WIDTH):
        return f"it takes rows of {LATENT_WIDTH} values, {VALUE_WIDTH} latent, not {latent_width} and {kv_lora_rank}"
    return None


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """As many rows for each query as the kernel takes at a time, or a multiple of that."""
    missing = -rows.shape[1] % multiple
    return torch.nn.functional.pad(rows, (0, missing), value=-1) if missing else rows


def _none_is_lowest(log_sums: torch.Tensor) -> torch.Tensor:
    """Of a query without a token the kernels say +inf."""
    return torch.where(log_sums == float("inf"), float("-inf"), log_sums)
