"""FlashMLA's sparse prefill kernel, which reads rows of a view where they lie."""

from __future__ import annotations

import importlib

import torch

from cpkv.ops.vendor.hopper import why_not_hopper

HEADS_AT_A_TIME = 64
CHOSEN_AT_A_TIME = 128
LATENT_WIDTH, VALUE_WIDTH = 576, 512


def why_not(device: torch.device, heads: int, latent_width: int, kv_lora_rank: int) -> str | None:
    """Say why the kernel cannot attend with these heads and rows on a device; None when it can."""
    if reason := why_not_hopper("flash_mla", device):
        return reason
    if heads % HEADS_AT_A_TIME:
        return f"it takes a multiple of {HEADS_AT_A_TIME} heads, not {heads}"
    if (latent_width, kv_lora_rank) != (LATENT_WIDTH, VALUE_WIDTH):
        return f"it takes rows of {LATENT_WIDTH} values, {VALUE_WIDTH} latent, not {latent_width} and {kv_lora_rank}"
    return None


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
    missing = -view_rows.shape[1] % CHOSEN_AT_A_TIME
    padded = torch.nn.functional.pad(view_rows, (0, missing), value=-1) if missing else view_rows
    out, _, log_sums = flash_mla.flash_mla_sparse_fwd(
        queries, latent.unsqueeze(1), padded.unsqueeze(1), scale, kv_lora_rank, use_legacy=True
    )
    # Of a query without a token the kernel says +inf.
    return out, torch.where(log_sums == float("inf"), float("-inf"), log_sums)
