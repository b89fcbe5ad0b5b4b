"""The exact choice of the best keys, in one pass over all scores or block by block."""

from __future__ import annotations

import torch

from cpkv.errors import NumericsError


def exact_topk(scores: torch.Tensor, limits: torch.Tensor, k: int, *, debug: bool = False) -> torch.Tensor:
    """Choose each query's k best keys: score descending, then lowest position; -0.0 ties with +0.0.

    Args:
        scores: [queries, tokens], anything at and beyond each query's limit.
        limits: int64 [queries] how many keys each query may see.
        k: how many to choose.
        debug: as of the kernel; NaN is looked for either way.

    Returns:
        int64 [queries, min(k, tokens)] chosen positions, ascending; -1 behind the last one of a query that sees
        fewer than k keys.

    Raises:
        NumericsError: a score is NaN.
    """
    del debug
    tokens = scores.shape[1]
    if not tokens:
        return limits.new_empty(len(scores), 0)
    everything = bool((limits >= tokens).all())
    allowed = None if everything else torch.arange(tokens, device=scores.device) < limits.unsqueeze(1)
    return _best_columns(scores, allowed, limits.clamp(max=min(k, tokens)), k)


def topk_rows(
    scores: torch.Tensor, limits: torch.Tensor, k: int, position_rows: torch.Tensor, *, debug: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`exact_topk`, and the view row of each chosen position.

    Args:
        scores: as for `exact_topk`.
        limits: likewise.
        k: likewise.
        position_rows: int32 [tokens or more] view row of each position of the request.
        debug: likewise.

    Returns:
        Positions and view rows, int32 [queries, min(k, tokens)] each, padded with -1.

    Raises:
        NumericsError: a score is NaN.
    """
    chosen = exact_topk(scores, limits, k, debug=debug)
    rows = position_rows[chosen.clamp(min=0)].masked_fill_(chosen < 0, -1)
    return chosen.to(torch.int32), rows


def merge_topk(
    best_scores: torch.Tensor,
    best: torch.Tensor,
    scores: torch.Tensor,
    limits: torch.Tensor,
    k: int,
    *,
    start: int,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the scores of one more block of keys into the best so far: in the end the choice of `exact_topk`.

    Args:
        best_scores: [queries, n] scores of the best so far, -inf where there is none.
        best: int64 [queries, n] their positions, ascending, all below `start`; -1 behind the last.
        scores: [queries, tokens] of the keys from position `start` on, anything at and beyond each query's limit.
        limits: int64 [queries] how many keys of this block each query may see; 0 or less for none.
        k: how many to choose.
        start: position of the block's first key.
        debug: as for `exact_topk`.

    Returns:
        Scores and positions of the best so far, [queries, min(k, n + tokens)], positions ascending, -1 padded.

    Raises:
        NumericsError: a score is NaN.
    """
    tokens = scores.shape[1]
    all_scores = torch.cat([best_scores, scores], dim=1)
    here = torch.arange(tokens, device=scores.device)
    positions = torch.cat([best, (here + start).expand(len(best), -1)], dim=1)
    allowed = torch.cat([best >= 0, here < limits.unsqueeze(1)], dim=1)
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
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
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
    padded[torch.arange(width, device=wanted.device) < wanted.unsqueeze(1)] = columns
    return padded


def _lowest_of_ties(scores: torch.Tensor, threshold: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Everything above a finite threshold, and of what equals it the lowest positions, `wanted` in all per query."""
    above = scores > threshold
    equal = scores == threshold
    room = (wanted - above.sum(dim=-1)).unsqueeze(1)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
