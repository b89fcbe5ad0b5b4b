"""DSA attention for the tokens of one rank, in blocks of queries, so that no [tokens, tokens] array ever exists.

rank's tokens, by request    |  A: pos 0 1 14 15  |  B: pos 3 4 5  |
blocks of queries            | [0 1 14] | [15]    | [3 4 5]        |     block size from the workspace
  per block                    scores [block, limit] -> chosen pos [block, k] -> rows [block, k, width] -> out
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cpkv.layout.plan import LocalTokens
from cpkv.layout.row_format import RowFormat
from cpkv.ops.reference.index_keys import decode_index_keys
from cpkv.ops.reference.indexer import KEY_TILE, exact_topk, indexer_scores
from cpkv.ops.reference.latent_rows import decode_latent_rows, gather_rows
from cpkv.ops.reference.sparse_mla import sparse_mla
from cpkv.views.view import LayerRows, View

DEFAULT_WORKSPACE_BYTES = 32 << 20


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
        topk: keys chosen per query (index_topk).
        index_heads: heads of the indexer.
        scale: softmax scale.
        compute_dtype: of scores, softmax and outputs: float64, else float32.
        workspace_bytes: bounds the temporary arrays of a block of queries.
    """

    row_format: RowFormat
    topk: int
    index_heads: int
    scale: float
    compute_dtype: torch.dtype
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES

    def query_blocks(self, local: LocalTokens) -> Iterator[tuple[int, int, int]]:
        """(segment, first, last + 1) of each block; depends on the plan alone, never on the view."""
        item = torch.empty((), dtype=self.compute_dtype).element_size()
        for segment, first, last in local.runs:
            tokens = int(local.positions[last - 1]) + 1
            chosen_bytes = min(self.topk, tokens) * self.row_format.latent_width * item
            scored_bytes = (3 * tokens + self.index_heads * KEY_TILE) * item
            block = max(1, min(128, self.workspace_bytes // max(chosen_bytes, scored_bytes)))
            for start in range(first, last, block):
                yield segment, start, min(start + block, last)

    def key_bytes(self, tokens: int) -> int:
        """Bytes that the index keys of a request of that many tokens take while they are scored, stored and decoded."""
        if tokens <= self.topk:
            return 0
        item = torch.empty((), dtype=self.compute_dtype).element_size()
        return tokens * (self.row_format.index_row_bytes + self.row_format.index_dim * item)

    def choose(self, view_rows: LayerRows, local: LocalTokens, index: IndexInputs) -> list[Choice]:
        """Choose the keys of each of this rank's tokens, exactly.

        Args:
            view_rows: one layer of the view.
            local: this rank's tokens.
            index: what the indexer made of them.
        """
        positions = torch.from_numpy(local.positions)
        choices: list[Choice] = []
        keys: torch.Tensor | None = None
        keys_segment = -1
        for segment, first, last in self.query_blocks(local):
            limits = positions[first:last] + 1
            if int(limits[-1]) <= self.topk:
                everything = torch.arange(int(limits[-1])).expand(last - first, -1)
                chosen = torch.where(everything < limits.unsqueeze(1), everything, -1)
            else:
                if keys is None or keys_segment != segment:
                    stored = view_rows.index_keys(segment)
                    keys = decode_index_keys(stored, self.row_format.index_dtype, self.compute_dtype)
                    keys_segment = segment
                scores = indexer_scores(index.queries[first:last], index.weights[first:last], keys, limits)
                chosen = exact_topk(scores, limits, self.topk)
            choices.append(Choice(segment, first, last, chosen))
        return choices

    def attend(self, view: View, view_rows: LayerRows, queries: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
        """Attend from this rank's tokens to the rows that they chose.

        Args:
            view: translates positions to rows.
            view_rows: one layer of it.
            queries: [tokens, heads, latent_width], absorbed.
            choices: of this layer, or of the last layer that has an indexer.

        Returns:
            [tokens, heads, kv_lora_rank] in the compute dtype.
        """
        rows = decode_latent_rows(view_rows.latent, self.row_format.latent_dtype)
        out = queries.new_empty(*queries.shape[:2], self.row_format.kv_lora_rank)
        for choice in choices:
            # A missing token reads the row of the query's first chosen one: finite, and masked out of the softmax.
            readable = torch.where(choice.positions < 0, choice.positions[:, :1], choice.positions)
            chosen_rows = gather_rows(rows, view.rows_of(choice.segment, readable)).to(self.compute_dtype)
            out[choice.first : choice.last] = sparse_mla(
                queries[choice.first : choice.last],
                chosen_rows,
                choice.positions,
                scale=self.scale,
                kv_lora_rank=self.row_format.kv_lora_rank,
            )
        return out
