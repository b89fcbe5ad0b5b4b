"""The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556): scores, and the exact choice.

score(q, k) = sum over heads h of  w_h * relu(q_h . k)          w already holds heads^-0.5 * dim^-0.5
"""

from __future__ import annotations

import torch

from cpkv.config.names import IndexDtype
from cpkv.errors import NumericsError
from cpkv.layout.query_blocks import KEY_TILE
from cpkv.ops.reference.index_keys import decode_index_keys


def indexer_scores(
    queries: torch.Tensor, weights: torch.Tensor, stored: torch.Tensor, limits: torch.Tensor, *, dtype: IndexDtype
) -> torch.Tensor:
    """Score a block of queries against every key that one of them may see.

    Keys are decoded and read in tiles of a fixed, zero-padded shape in position order, so no shape and no rounding
    depends on where the keys came from or on how many lie beside them.

    Args:
        queries: [queries, heads, dim].
        weights: [queries, heads], may be negative.
        stored: uint8 [tokens, index_row_bytes] stored keys in position order, at least max(limits) of them; or the
            same keys decoded already, [tokens, dim] in the dtype of the queries.
        limits: int64 [queries] how many keys, from the first of `stored` on, each query may see; one sees at least 1.
        dtype: of the stored keys.

    Returns:
        [queries, max(limits)] scores; -inf where a query may not look.
    """
    num_queries, heads, dim = queries.shape
    width = int(limits.max())
    flat_queries = queries.reshape(num_queries * heads, dim)
    scores = queries.new_empty(num_queries, -(-width // KEY_TILE) * KEY_TILE)
    for start in range(0, width, KEY_TILE):
        tile = stored[start : start + KEY_TILE]
        if not stored.is_floating_point():
            tile = decode_index_keys(tile, dtype, queries.dtype)
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
    tokens = scores.shape[1]
    allowed = None if int(limits.min()) >= min(k, tokens) else torch.arange(tokens) < limits.unsqueeze(1)
    return _best_columns(scores, allowed, limits.clamp(max=min(k, tokens)), k)


def merge_topk(
    best_scores: torch.Tensor, best: torch.Tensor, scores: torch.Tensor, limits: torch.Tensor, k: int, *, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the scores of one more block of keys into the best so far: in the end the choice of `exact_topk`.

    Args:
        best_scores: [queries, n] scores of the best so far, -inf where there is none.
        best: int64 [queries, n] their positions, ascending, all below `start`; -1 behind the last.
        scores: [queries, tokens] of the keys from position `start` on, -inf at and beyond each query's limit.
        limits: int64 [queries] how many keys of this block each query may see; 0 or less for none.
        k: how many to choose.
        start: position of the block's first key.

    Returns:
        Scores and positions of the best so far, [queries, min(k, n + tokens)], positions ascending, -1 padded.

    Raises:
        NumericsError: a score is NaN.
    """
    tokens = scores.shape[1]
    all_scores = torch.cat([best_scores, scores], dim=1)
    positions = torch.cat([best, torch.arange(start, start + tokens).expand(len(best), -1)], dim=1)
    allowed = torch.cat([best >= 0, torch.arange(tokens) < limits.unsqueeze(1)], dim=1)
    wanted = allowed.sum(dim=1).clamp(max=k)
    # Columns are in order of position, so the lowest column among ties is the lowest position.
    columns = _best_columns(all_scores, allowed, wanted, k)
    missing = columns < 0
    readable = columns.clamp(min=0)
    merged_scores = all_scores.gather(1, readable).masked_fill_(missing, float("-inf"))
    return merged_scores, positions.gather(1, readable).masked_fill_(missing, -1)


def _best_columns(scores: torch.Tensor, allowed: torch.Tensor | None, wanted: torch.Tensor, k: int) -> torch.Tensor:
    """The `wanted` best columns of each row among those allowed (None: all), ascending, -1 behind the last."""
    num_queries, tokens = scores.shape
    width = min(k, tokens)
    threshold = scores.topk(width, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    # topk ranks NaN above everything and amin keeps it, so one look at the thresholds finds any NaN of the block.
    if bool(threshold.isnan().any()):
        raise NumericsError("an indexer score is NaN, so no choice of keys is right; a weight or a stored key is NaN")
    chosen = scores >= threshold
    if allowed is not None:
        chosen &= allowed
    queries, columns = chosen.nonzero(as_tuple=True)
    if len(columns) > int(wanted.sum()):
        tied = (torch.bincount(queries, minlength=num_queries) > wanted).nonzero().flatten()
        chosen[tied] = _lowest_of_ties(scores[tied], threshold[tied], wanted[tied])
        columns = chosen.nonzero(as_tuple=True)[1]
    if allowed is None:
        return columns.view(num_queries, width)
    padded = columns.new_full((num_queries, width), -1)
    padded[torch.arange(width) < wanted.unsqueeze(1)] = columns
    return padded


def _lowest_of_ties(scores: torch.Tensor, threshold: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Everything above a finite threshold, and of what equals it the lowest positions, `wanted` in all per query."""
    above = scores > threshold
    equal = scores == threshold
    room = (wanted - above.sum(dim=-1)).unsqueeze(1)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
