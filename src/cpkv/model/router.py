"""The MoE router of DeepSeek-V3 (arXiv 2412.19437): sigmoid scores, a bias for the choice only, groups."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from cpkv.model.norms import compute_dtype_of


def route_tokens(gate: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for tokens; transformers' router computes in float32 always, this one keeps float64.

    Args:
        gate: transformers' router module of the layer.
        hidden: [tokens, hidden_size].

    Returns:
        weights [tokens, experts per token] in the compute dtype, and expert numbers of the same shape.
    """
    wide = compute_dtype_of(hidden.dtype)
    scores = functional.linear(hidden.to(wide), gate.weight.to(wide)).sigmoid()
    biased = scores + gate.e_score_correction_bias.to(wide)
    grouped = biased.unflatten(-1, (gate.num_group, -1))
    group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    groups = group_scores.topk(gate.topk_group, dim=-1).indices
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, groups, True)
    eligible = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = eligible.topk(gate.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * gate.routed_scaling_factor, experts


def feed_forward(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A layer's MLP or MoE over tokens [tokens, hidden_size]; modules and expert weights are transformers'."""
    if not hasattr(mlp, "experts"):
        return mlp(hidden)
    weights, experts = route_tokens(mlp.gate, hidden)
    return mlp.experts(hidden, experts, weights) + mlp.shared_experts(hidden)
