"""DSA attention for the tokens of one rank, in blocks of queries, so that no [tokens, tokens] array ever exists.

per block of queries     scores [block, keys] -> chosen pos [block, k] -> rows [block, k, width] -> out
several blocks of keys   the best k of each block are merged with the best so far: the same choice, exactly
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
class IndexInputs:
    """What the indexer of one layer makes of this rank's tokens.

    Attributes:
        queries: [tokens, index_heads, index_dim], rotated.
        weights: [tokens, index_heads], scaled by heads^-0.5 * dim^-0.5.
    """

    queries: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """What one layer makes of this rank's tokens.

    Attributes:
        queries: [tokens, heads, latent_width], absorbed, in the compute dtype.
        index: None on a layer that reuses the last choice.
    """

    queries: torch.Tensor
    index: IndexInputs | None


@dataclass(frozen=True)
class Choice:
    """The keys that one block of queries chose.

    Attributes:
        segment: number of the segment in the plan.
        first: first token of the block among this rank's tokens.
        last: one behind the last.
        positions: int64 [last - first, chosen], ascending, -1 behind the last.
    """

    segment: int
    first: int
    last: int
    positions: torch.Tensor


@dataclass(frozen=True)
class DsaAttention:
    """Sparse attention of one model shape.

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
        """Choose the keys of each of this rank's tokens, exactly.

        Args:
            plan: of the batch.
            rows: one layer of the view.
            local: this rank's tokens.
            index: what the indexer made of them.
        """
        by_segment: dict[int, list[tuple[int, int]]] = {}
        for number, first, last in self.blocks.of(plan, local):
            by_segment.setdefault(number, []).append((first, last))
        positions = torch.from_numpy(local.positions)
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
                    everything = torch.arange(int(limits[-1])).expand(last - first, -1)
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
        """Attend from this rank's tokens to the rows that they chose.

        Args:
            rows: one layer of the view.
            queries: [tokens, heads, latent_width], absorbed.
            choices: of this layer, or of the last layer that has an indexer.

        Returns:
            [tokens, heads, kv_lora_rank] in the compute dtype.
        """
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
