"""The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556): scores, and the exact choice.

score(q, k) = sum over heads h of  w_h * relu(q_h . k)          w already holds heads^-0.5 * dim^-0.5
"""

from __future__ import annotations

import torch

from cpkv.errors import NumericsError

KEY_TILE = 512


def indexer_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Score a block of queries against every key that one of them may see.

    Keys are read in tiles of a fixed, zero-padded shape in position order, so no shape and no rounding depends on
    where the keys came from.

    Args:
        queries: [queries, heads, dim].
        weights: [queries, heads], may be negative.
        keys: [tokens, dim] in position order, at least max(limits) of them.
        limits: int64 [queries] how many keys, from position 0 on, each query may see.

    Returns:
        [queries, max(limits)] scores; -inf where a query may not look.
    """
    num_queries, heads, dim = queries.shape
    width = int(limits.max())
    flat_queries = queries.reshape(num_queries * heads, dim)
    scores = queries.new_empty(num_queries, -(-width // KEY_TILE) * KEY_TILE)
    for start in range(0, width, KEY_TILE):
        tile = keys[start : start + KEY_TILE]
        if tile.shape[0] < KEY_TILE:
            tile = torch.cat([tile, tile.new_zeros(KEY_TILE - tile.shape[0], dim)])
        products = torch.mm(flat_queries, tile.T).relu_().view(num_queries, heads, KEY_TILE)
        torch.bmm(weights.unsqueeze(1), products, out=scores[:, start : start + KEY_TILE].unsqueeze(1))
    scores = scores[:, :width]
    hidden = torch.arange(width) >= limits.unsqueeze(1)
    return scores.masked_fill_(hidden, float("-inf"))


def exact_topk(scores: torch.Tensor, limits: torch.Tensor, k: int) -> torch.Tensor:
    """Choose each query's k best keys: score descending, then lowest position; -0.0 ties with +0.0.

    Args:
        scores: [queries, tokens], -inf at and beyond each query's limit.
        limits: int64 [queries] how many keys each query may see.
        k: how many to choose.

    Returns:
        int64 [queries, min(k, tokens)] chosen positions, ascending; -1 behind the last one of a query that sees
        fewer than k keys.

    Raises:
        NumericsError: a score is NaN.
    """
    num_queries, tokens = scores.shape
    width = min(k, tokens)
    wanted = limits.clamp(max=width)
    threshold = scores.topk(width, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    # topk ranks NaN above everything and amin keeps it, so one look at the thresholds finds any NaN of the block.
    if bool(threshold.isnan().any()):
        raise NumericsError("an indexer score is NaN, so no choice of keys is right; a weight or a stored key is NaN")
    chosen = scores >= threshold
    some_short = int(limits.min()) < width
    if some_short:
        chosen &= torch.arange(tokens) < limits.unsqueeze(1)
    queries, positions = chosen.nonzero(as_tuple=True)
    if len(positions) > int(wanted.sum()):
        tied = (torch.bincount(queries, minlength=num_queries) > wanted).nonzero().flatten()
        chosen[tied] = _lowest_of_ties(scores[tied], threshold[tied], wanted[tied])
        positions = chosen.nonzero(as_tuple=True)[1]
    if not some_short:
        return positions.view(num_queries, width)
    padded = positions.new_full((num_queries, width), -1)
    padded[torch.arange(width) < wanted.unsqueeze(1)] = positions
    return padded


def _lowest_of_ties(scores: torch.Tensor, threshold: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Everything above a finite threshold, and of what equals it the lowest positions, `wanted` in all per query."""
    above = scores > threshold
    equal = scores == threshold
    room = (wanted - above.sum(dim=-1)).unsqueeze(1)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
