"""Sparse attention over chosen latent rows, which are read where the view has them: no gathered copy.

program = one query, 64 heads        rows of a tile   | 512 latent | 64 rope |   key: all 576, value: the 512 latent
    q [64, 576] stays                tile after tile: logits [64, tile] -> running max and sum -> out [64, 512]

The order of tiles is the order of the chosen rows, so bits do not depend on where the rows lie.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cpkv.ops.triton.words import rows_contiguous

BLOCK_HEADS = 64
# With 64 rows the two stages fill the shared memory of a Hopper SM; 32 take 1.4 times as long.
BLOCK_ROWS = 64
NUM_WARPS = 8
NUM_STAGES = 2
# fp32 is for comparison, not for speed: what fits.
WIDE_BLOCK = 16


def sparse_mla_rows(
    queries: torch.Tensor, latent: torch.Tensor, view_rows: torch.Tensor, *, scale: float, kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from queries to chosen rows of a view.

    Args:
        queries: [queries, heads, latent_width], absorbed.
        latent: [view rows, latent_width] in the dtype of the queries; each row contiguous, or all are copied.
        view_rows: int32 [queries, chosen]; -1 is no token, wherever it stands.
        scale: softmax scale.
        kv_lora_rank: how many values of a row are the value; a power of two, like the rest of the row.

    Returns:
        Outputs [queries, heads, kv_lora_rank] in the dtype of the queries, and the natural logarithm of the sum of
        exponentials, fp32 [queries, heads]. A query without a token has zeros, and -inf.
    """
    num_queries, heads, width = queries.shape
    out = queries.new_empty(num_queries, heads, kv_lora_rank)
    log_sums = torch.empty(num_queries, heads, dtype=torch.float32, device=queries.device)
    if not num_queries:
        return out, log_sums
    queries, latent, view_rows = queries.contiguous(), rows_contiguous(latent), view_rows.contiguous()
    narrow = queries.dtype.itemsize == 2
    block_heads, block_rows = (BLOCK_HEADS, BLOCK_ROWS) if narrow else (WIDE_BLOCK, WIDE_BLOCK)
    _sparse_mla[(num_queries, triton.cdiv(heads, block_heads))](
        queries,
        latent,
        latent.stride(0),
        view_rows,
        view_rows.shape[1],
        out,
        log_sums,
        heads,
        scale / math.log(2.0),
        RANK=kv_lora_rank,
        ROPE=width - kv_lora_rank,
        HEADS=block_heads,
        ROWS=block_rows,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out, log_sums


def merge_attention(outs: torch.Tensor, log_sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint parts of the rows into attention over all of them.

    Args:
        outs: [parts, queries, heads, kv_lora_rank], contiguous.
        log_sums: fp32 [parts, queries, heads], contiguous; -inf for a part without a token.

    Returns:
        Output and logarithm of the sum, as `sparse_mla_rows` over all rows would, but for rounding.
    """
    parts, num_queries, heads, rank = outs.shape
    out = outs.new_empty(num_queries, heads, rank)
    merged = torch.empty_like(log_sums[0])
    if num_queries:
        _merge[(num_queries * heads,)](
            outs, log_sums, out, merged, num_queries * heads, PARTS=parts, RANK=rank, num_warps=4
        )
    return out, merged


@triton.jit
def _sparse_mla(  # type: ignore[no-untyped-def]
    queries,
    latent,
    row_stride,
    view_rows,
    chosen,
    out,
    log_sums,
    num_heads,
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    ranks = tl.arange(0, RANK)
    ropes = RANK + tl.arange(0, ROPE)
    there = (heads < num_heads)[:, None]
    places = (query * num_heads + heads) * (RANK + ROPE)
    query_latent = tl.load(queries + places[:, None] + ranks[None, :], mask=there, other=0.0)
    query_rope = tl.load(queries + places[:, None] + ropes[None, :], mask=there, other=0.0)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, RANK], tl.float32)
    for start in range(0, chosen, ROWS):
        numbers = start + tl.arange(0, ROWS)
        rows = tl.load(view_rows + query * chosen + numbers, mask=numbers < chosen, other=-1)
        valid = rows >= 0
        # Row numbers fit in 32 bits, and row numbers times 576 do not.
        firsts = latent + rows.to(tl.int64) * row_stride
        row_latent = tl.load(firsts[:, None] + ranks[None, :], mask=valid[:, None], other=0.0)
        row_rope = tl.load(firsts[:, None] + ropes[None, :], mask=valid[:, None], other=0.0)
        logits = tl.dot(query_latent, tl.trans(row_latent), input_precision="ieee")
        logits = tl.dot(query_rope, tl.trans(row_rope), logits, input_precision="ieee")
        logits = tl.where(valid[None, :], logits * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, axis=1))
        # As long as no token was seen the maximum is -inf, of which no difference can be taken.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - finite[:, None])
        before = tl.exp2(highest - finite)
        total = total * before + tl.sum(weights, axis=1)
        sums = sums * before[:, None]
        sums = tl.dot(weights.to(row_latent.dtype), row_latent, sums, input_precision="ieee")
        highest = higher
    # NaN counts as seen, so that it shows.
    seen = total != 0.0
    sums = sums / tl.where(seen, total, 1.0)[:, None]
    places = (query * num_heads + heads) * RANK
    tl.store(out + places[:, None] + ranks[None, :], sums.to(out.dtype.element_ty), mask=there)
    log_sum = tl.where(seen, (highest + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(log_sums + query * num_heads + heads, log_sum, mask=heads < num_heads)


@triton.jit
def _merge(outs, log_sums, out, merged, rows, PARTS: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, RANK)
    highest = tl.load(log_sums + row)
    for part in tl.static_range(1, PARTS):
        highest = tl.maximum(highest, tl.load(log_sums + part * rows + row))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    total = 0.0
    sums = tl.zeros([RANK], tl.float32)
    for part in tl.static_range(PARTS):
        weight = tl.exp(tl.load(log_sums + part * rows + row) - finite)
        total += weight
        sums += weight * tl.load(outs + (part * rows + row) * RANK + ranks).to(tl.float32)
    # NaN counts as seen, so that it shows.
    seen = total != 0.0
    tl.store(out + row * RANK + ranks, (sums / tl.where(seen, total, 1.0)).to(out.dtype.element_ty))
    tl.store(merged + row, tl.where(seen, finite + tl.log(tl.where(seen, total, 1.0)), float("-inf")))
