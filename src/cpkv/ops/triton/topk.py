"""The exact choice of the best keys: in one read of the scores (topk_list), or by digits if many are chosen.

A score becomes an integer that orders like it (-0.0 as +0.0, NaN above all). What a sample says costs or saves time;
the choice is exact whatever it was.
"""

from __future__ import annotations

import torch
import triton

from cpkv.errors import NumericsError
from cpkv.ops.triton.topk_digits import choose_by_digits
from cpkv.ops.triton.topk_list import choose_from_list
from cpkv.ops.triton.words import rows_contiguous

# A list holds the k best and a tile; the larger one is for a larger k.
CANDIDATES, MOST_CANDIDATES = 4096, 8192
TILE = 2048
SAMPLE = 4096
# Samples come in runs of 8, the 32 bytes that memory gives at least.
SAMPLE_RUN = 8
# In deviations of a sample of independent scores. Too low a bound fills the list, too high a one reads the row again.
SAMPLE_SPREAD = 4
# Few queries are split, into parts that are worth a program, to fill the device.
PROGRAMS, MOST_PARTS, LEAST_PART = 512, 32, 8192
# Waiting costs more than computing, so many small programs share an SM: five of these.
NUM_WARPS, MAX_REGISTERS = 4, 96


def exact_topk(scores: torch.Tensor, limits: torch.Tensor, k: int, *, debug: bool = False) -> torch.Tensor:
    """Choose each query's k best keys: score descending, then lowest position; -0.0 ties with +0.0.

    Args:
        scores: fp32 [queries, tokens], anything at and beyond each query's limit. Rows should be contiguous and start
            at multiples of 16 bytes: others are copied, or read in smaller words.
        limits: int64 [queries] how many keys each query may see.
        k: how many to choose. More than 6144 are chosen by digits, which takes five reads.
        debug: look for NaN, which waits for the device.

    Returns:
        int64 [queries, min(k, tokens)] chosen positions, ascending; -1 behind the last one of a query that sees
        fewer than k keys.

    Raises:
        NumericsError: with `debug`, a score is NaN. Without, NaN counts as the best of all.
    """
    out = torch.empty(len(scores), min(k, scores.shape[1]), dtype=torch.int64, device=scores.device)
    _choose(scores, limits, out, None, None, debug=debug)
    return out


def topk_rows(
    scores: torch.Tensor, limits: torch.Tensor, k: int, position_rows: torch.Tensor, *, debug: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`exact_topk`, and the view row of each chosen position by the same kernel.

    Args:
        scores: as for `exact_topk`.
        limits: likewise.
        k: likewise.
        position_rows: int32 [tokens or more] view row of each position of the request.
        debug: look for NaN, which waits for the device.

    Returns:
        Positions and view rows, int32 [queries, min(k, tokens)] each, padded with -1.

    Raises:
        NumericsError: with `debug`, a score is NaN.
    """
    out = torch.empty(len(scores), min(k, scores.shape[1]), dtype=torch.int32, device=scores.device)
    rows = torch.empty_like(out)
    _choose(scores, limits, out, rows, position_rows.contiguous(), debug=debug)
    return out, rows


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
        best_scores: fp32 [queries, n] scores of the best so far, -inf where there is none.
        best: int64 [queries, n] their positions, ascending, all below `start`; -1 behind the last. A query that sees
            a key of this block sees all keys before it, so it has n of them.
        scores: fp32 [queries, tokens] of the keys from position `start` on.
        limits: int64 [queries] how many keys of this block each query may see; 0 or less for none.
        k: how many to choose.
        start: position of the block's first key.
        debug: look for NaN, which waits for the device.

    Returns:
        Scores and positions of the best so far, [queries, min(k, n + tokens)], positions ascending, -1 padded.

    Raises:
        NumericsError: with `debug`, a score is NaN.
    """
    known = best.shape[1]
    columns = torch.cat([best_scores, scores], dim=1)
    seen = torch.where(limits > 0, limits.clamp(max=scores.shape[1]) + known, (best >= 0).sum(dim=1))
    chosen = exact_topk(columns, seen, k, debug=debug)
    missing = chosen < 0
    readable = chosen.clamp(min=0)
    merged_scores = columns.gather(1, readable).masked_fill_(missing, float("-inf"))
    late = readable + (start - known)
    positions = late if not known else torch.where(chosen < known, best.gather(1, readable.clamp(max=known - 1)), late)
    return merged_scores, positions.masked_fill_(missing, -1)


def _choose(
    scores: torch.Tensor,
    limits: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None,
    position_rows: torch.Tensor | None,
    *,
    debug: bool,
) -> None:
    """Launch the kernel on the current stream."""
    queries, tokens = scores.shape
    if not queries or not tokens:
        return
    scores, limits = rows_contiguous(scores), limits.contiguous()
    device = scores.device
    nan_seen = torch.zeros(1, dtype=torch.int32, device=device)
    outputs = (out, *((rows, position_rows) if rows is not None else (out, out)), nan_seen)
    arguments = (scores, scores.stride(0), limits, tokens, out.shape[1], *outputs)
    kinds = {"TILE": TILE, "FIND_NAN": debug, "WITH_ROWS": rows is not None}
    # The k best stay while a tile is added.
    candidates = max(CANDIDATES, triton.next_power_of_2(out.shape[1] + TILE))
    if candidates <= MOST_CANDIDATES:
        parts = min(max(PROGRAMS // queries, 1), MOST_PARTS, triton.cdiv(tokens, LEAST_PART))
        lists = torch.empty(queries, parts, 2, candidates, dtype=torch.int32, device=device)
        counts = torch.empty(queries, parts, dtype=torch.int32, device=device)
        come = torch.zeros(queries, dtype=torch.int32, device=device)
        sample = {"SAMPLE": SAMPLE, "RUN": SAMPLE_RUN, "SPREAD": SAMPLE_SPREAD}
        options = {"num_warps": NUM_WARPS * candidates // CANDIDATES, "maxnreg": MAX_REGISTERS}
        choose_from_list[(queries, parts)](
            *arguments, parts, lists, counts, come, CANDIDATES=candidates, SPLIT=parts > 1, **sample, **kinds, **options
        )
    else:
        choose_by_digits[(queries,)](*arguments, **kinds, num_warps=NUM_WARPS)
    if debug and bool(nan_seen):
        raise NumericsError("an indexer score is NaN, so no choice of keys is right; a weight or a stored key is NaN")
