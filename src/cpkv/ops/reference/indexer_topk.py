"""The choice of the best keys straight from fp8 queries and keys."""

from __future__ import annotations

import torch

from cpkv.ops.reference.indexer import fp8_indexer_scores
from cpkv.ops.reference.topk import topk_rows

SCORE_BYTES = 256 << 20


def fp8_indexer_topk(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor,
    limits: torch.Tensor,
    k: int,
    position_rows: torch.Tensor,
    *,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_rows` of `fp8_indexer_scores`, a few queries at a time, so that scores are never more than `SCORE_BYTES`.

    Args:
        queries: float8_e4m3fn [queries, heads, dim].
        weights: fp32 [queries, heads], may be negative; each holds the scale of its quantised query.
        keys: float8_e4m3fn [tokens, dim] in position order.
        key_scales: fp32 [tokens].
        limits: int64 [queries] how many keys, from the first on, each query may see; at most `tokens`.
        k: how many to choose.
        position_rows: int32 [tokens or more] view row of each position of the request.
        debug: as of the kernel; NaN is looked for either way.

    Returns:
        Positions and view rows, int32 [queries, min(k, tokens)] each, ascending, padded with -1.

    Raises:
        NumericsError: a score is NaN.
    """
    size = max(1, SCORE_BYTES // (4 * max(1, len(keys))))
    chosen = [
        topk_rows(
            fp8_indexer_scores(queries[own], weights[own], keys, key_scales, limits[own]),
            limits[own],
            k,
            position_rows,
            debug=debug,
        )
        for start in range(0, max(1, len(queries)), size)
        for own in (slice(start, start + size),)
    ]
    return torch.cat([positions for positions, _ in chosen]), torch.cat([rows for _, rows in chosen])
