"""DSA attention for the tokens of one rank, in blocks of queries, so that no [tokens, tokens] array ever exists.

per block of queries     scores [block, keys] -> chosen pos [block, k] -> rows [block, k, width] -> out
several blocks of keys   the best k of each block are merged with the best so far: the same choice, exactly
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cpkv.attention.choice import Choice, IndexInputs, SparseAttention
from cpkv.layout.plan import BatchPlan, LocalTokens
from cpkv.layout.query_blocks import QueryBlocks
from cpkv.layout.row_format import RowFormat
from cpkv.ops.reference.index_keys import decode_index_keys
from cpkv.ops.reference.indexer import indexer_scores
from cpkv.ops.reference.latent_rows import decode_latent_rows
from cpkv.ops.reference.sparse_mla import sparse_mla
from cpkv.ops.reference.topk import exact_topk, merge_topk
from cpkv.views.view import LayerRows

# Keys are decoded once for all blocks of queries up to this many, and tile by tile for each block beyond: never a
# decoded copy of a long context. Values and tiles are the same either way.
DECODED_TOKENS = 1 << 16


@dataclass(frozen=True)
class DsaAttention(SparseAttention):
    """By plain torch.

    Attributes:
        row_format: of the stored rows.
        blocks: how queries are blocked, and how many keys each chooses.
        scale: softmax scale.
        compute_dtype: of scores, softmax and outputs: float64, else float32.
    """

    row_format: RowFormat
    blocks: QueryBlocks
    scale: float
    compute_dtype: torch.dtype

    def choose(self, plan: BatchPlan, rows: LayerRows, local: LocalTokens, index: IndexInputs) -> list[Choice]:
        """Choose in blocks of queries and of keys."""
        by_segment: dict[int, list[tuple[int, int]]] = {}
        for number, first, last in self.blocks.of(plan, local):
            by_segment.setdefault(number, []).append((first, last))
        positions = torch.from_numpy(local.positions).to(index.queries.device)
        choices: list[Choice] = []
        for number, segment in enumerate(plan.spec.segments):
            ranges = by_segment.get(number, [])
            chosen: dict[tuple[int, int], torch.Tensor] = {}
            if segment.end > self.blocks.topk:
                # Every rank asks, also one without a query here, since a view may gather what it is asked for.
                chosen = self._scored(rows, number, ranges, positions, index)
            for first, last in ranges:
                found = chosen.get((first, last))
                if found is None:
                    limits = positions[first:last] + 1
                    everything = torch.arange(int(limits[-1]), device=limits.device).expand(last - first, -1)
                    found = torch.where(everything < limits.unsqueeze(1), everything, -1)
                choices.append(Choice(number, first, last, found))
        return choices

    def _scored(
        self,
        rows: LayerRows,
        segment: int,
        ranges: list[tuple[int, int]],
        positions: torch.Tensor,
        index: IndexInputs,
    ) -> dict[tuple[int, int], torch.Tensor]:
        """The choices of the blocks of queries that see more than topk keys."""
        scored = [(first, last) for first, last in ranges if int(positions[last - 1]) + 1 > self.blocks.topk]
        best: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        end_of_last = 0
        for start, stored in rows.key_blocks(segment):
            assert start == end_of_last, "key blocks must come in position order"
            end_of_last = start + len(stored)
            keys = stored
            if scored and len(stored) <= DECODED_TOKENS:
                keys = decode_index_keys(stored, self.row_format.index_dtype, self.compute_dtype)
            for first, last in scored:
                limits = positions[first:last] + 1
                if int(limits[-1]) <= start:
                    continue
                limits_here = (limits - start).clamp(max=len(stored))
                scores = indexer_scores(
                    index.queries[first:last],
                    index.weights[first:last],
                    keys,
                    limits_here,
                    dtype=self.row_format.index_dtype,
                )
                if start == 0 and int(limits[-1]) <= len(stored):
                    # The scores of all blocks of queries together would be [tokens, tokens].
                    best[first, last] = scores.new_empty(0), exact_topk(scores, limits, self.blocks.topk)
                    continue
                known = best.get((first, last), (scores[:, :0], limits.new_empty(last - first, 0)))
                best[first, last] = merge_topk(*known, scores, limits_here, self.blocks.topk, start=start)
        return {block: chosen for block, (_, chosen) in best.items()}

    def attend(self, rows: LayerRows, queries: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
        """Attend to copies of the chosen rows, block by block."""
        out = queries.new_empty(*queries.shape[:2], self.row_format.kv_lora_rank)
        for choice in choices:
            # A missing token reads the row of the query's first chosen one: finite, and masked out of the softmax.
            readable = torch.where(choice.positions < 0, choice.positions[:, :1], choice.positions)
            chosen_rows = rows.chosen_rows(choice.segment, readable)
            out[choice.first : choice.last] = sparse_mla(
                queries[choice.first : choice.last],
                decode_latent_rows(chosen_rows, self.row_format, self.compute_dtype),
                choice.positions,
                scale=self.scale,
                kv_lora_rank=self.row_format.kv_lora_rank,
            )
        return out
