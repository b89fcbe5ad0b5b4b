"""Sparse attention over chosen latent rows, in the absorbed form of MLA (DeepSeek-V2, arXiv 2405.04434).

q_absorbed = [ q_nope W_UK | q_rope ]      one row serves all heads as key, its first kv_lora_rank values as value
"""

from __future__ import annotations

import torch

from cpkv.layout.row_format import RowFormat
from cpkv.ops.reference.latent_rows import decode_latent_rows


def sparse_mla(
    queries: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, *, scale: float, kv_lora_rank: int
) -> torch.Tensor:
    """Attend from a block of queries to the rows chosen for each.

    Args:
        queries: [queries, heads, latent_width], absorbed.
        rows: [queries, chosen, latent_width] in the dtype of the queries; where `chosen` is -1 any finite row.
        chosen: int64 [queries, chosen]; -1 is no token. Every query has at least one token.
        scale: softmax scale.
        kv_lora_rank: how many values of a row are the value.

    Returns:
        [queries, heads, kv_lora_rank].
    """
    logits = torch.bmm(queries, rows.transpose(1, 2)) * scale
    missing = chosen < 0
    if bool(missing.any()):
        logits.masked_fill_(missing.unsqueeze(1), float("-inf"))
    return torch.bmm(torch.softmax(logits, dim=-1), rows[:, :, :kv_lora_rank])


def sparse_mla_rows(
    queries: torch.Tensor, latent: torch.Tensor, view_rows: torch.Tensor, *, scale: float, kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from queries to chosen rows of a view; computed in fp32, or in fp64 for fp64 queries.

    Args:
        queries: [queries, heads, latent_width], absorbed.
        latent: [view rows, latent_width] in the dtype of the queries; each row contiguous.
        view_rows: int32 [queries, chosen]; -1 is no token, wherever it stands.
        scale: softmax scale.
        kv_lora_rank: how many values of a row are the value.

    Returns:
        Outputs [queries, heads, kv_lora_rank] in the dtype of the queries, and the natural logarithm of the sum of
        exponentials, fp32 or fp64 [queries, heads]. A query without a token has zeros, and -inf.
    """
    rows = latent[view_rows.clamp(min=0)].to(_compute_dtype(queries))
    return _attend(queries, rows, view_rows < 0, scale, kv_lora_rank)


def sparse_mla_pages(
    queries: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, *, scale: float, kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from queries to chosen rows of packed pages; computed in fp32, or in fp64 for fp64 queries.

    Args:
        queries: [queries, heads, latent_width], absorbed.
        pages: uint8 [pages, page_size, latent_row_bytes] packed fp8 rows of one layer, each page contiguous; pages
            may lie apart, as one layer of a page-major pool has them.
        rows: int32 [queries, chosen]: page * page_size + offset; -1 is no token, wherever it stands.
        scale: softmax scale.
        kv_lora_rank: how many values of a row are the value.

    Returns:
        As of `sparse_mla_rows`.
    """
    page_size = pages.shape[1]
    row_format = RowFormat("fp8", kv_lora_rank, queries.shape[2] - kv_lora_rank, "fp8", 0)
    readable = rows.clamp(min=0).to(torch.int64)
    stored = pages[readable // page_size, readable % page_size]
    values = decode_latent_rows(stored, row_format, _compute_dtype(queries))
    return _attend(queries, values, rows < 0, scale, kv_lora_rank)


def merge_attention(outs: torch.Tensor, log_sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint parts of the rows into attention over all of them.

    Args:
        outs: [parts, queries, heads, kv_lora_rank].
        log_sums: fp32 or fp64 [parts, queries, heads]; -inf for a part without a token.

    Returns:
        Output and logarithm of the sum, as `sparse_mla_rows` over all rows would, but for rounding.
    """
    weights = _weights(log_sums, dim=0).to(_compute_dtype(outs))
    out = (weights.unsqueeze(3) * outs).sum(dim=0)
    return out.to(outs.dtype), torch.logsumexp(log_sums, dim=0)


def _compute_dtype(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _weights(logits: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Softmax in which nothing but -inf makes zeros."""
    nothing = (logits == float("-inf")).all(dim=dim, keepdim=True)
    return torch.softmax(logits, dim=dim).masked_fill_(nothing, 0.0)


def _attend(
    queries: torch.Tensor, rows: torch.Tensor, missing: torch.Tensor, scale: float, kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the rows of each query [queries, chosen, latent_width], but for those that are missing."""
    # Also a row that nobody chose may hold NaN, which a weight of 0 would not hide.
    rows = rows.masked_fill_(missing.unsqueeze(2), 0.0)
    logits = torch.bmm(queries.to(rows.dtype), rows.transpose(1, 2)) * scale
    logits.masked_fill_(missing.unsqueeze(1), float("-inf"))
    out = torch.bmm(_weights(logits, dim=2), rows[:, :, :kv_lora_rank]).to(queries.dtype)
    return out, torch.logsumexp(logits, dim=2)
