"""Sparse attention over chosen latent rows, in the absorbed form of MLA (DeepSeek-V2, arXiv 2405.04434).

q_absorbed = [ q_nope W_UK | q_rope ]      one row serves all heads as key, its first kv_lora_rank values as value
"""

from __future__ import annotations

import torch


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
