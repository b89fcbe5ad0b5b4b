"""In which blocks a rank's queries are scored and attended: by the plan alone, never by the view.

rank's tokens, by request    |  A: pos 0 1 14 15  |  B: pos 3 4 5  |
blocks of queries            | [0 1 14] | [15]    | [3 4 5]        |     block size from the workspace
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cpkv.layout.plan import BatchPlan, LocalTokens

DEFAULT_WORKSPACE_BYTES = 32 << 20
MAX_BLOCK = 128
KEY_TILE = 512
"""Index keys are scored in zero-padded tiles of this many, in position order."""


@dataclass(frozen=True)
class QueryBlocks:
    """Sizes from which blocks of queries follow.

    Attributes:
        topk: keys chosen per query (index_topk).
        latent_width: values of a latent row.
        index_heads: heads of the indexer.
        item_bytes: bytes of a value while it is computed with: 8 in float64, else 4.
        workspace_bytes: bounds the temporary arrays of a block.
    """

    topk: int
    latent_width: int
    index_heads: int
    item_bytes: int
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES

    def size(self, tokens: int) -> int:
        """Queries of a block of a request of that many tokens."""
        chosen_bytes = min(self.topk, tokens) * self.latent_width * self.item_bytes
        scored_bytes = (3 * tokens + self.index_heads * KEY_TILE) * self.item_bytes
        return max(1, min(MAX_BLOCK, self.workspace_bytes // max(chosen_bytes, scored_bytes)))

    def most_rows(self, tokens: int) -> int:
        """The most rows that a block of a request of up to that many tokens can choose."""
        chosen = min(self.topk, tokens)
        fitting = self.workspace_bytes // (self.latent_width * self.item_bytes)
        return min(MAX_BLOCK * chosen, max(chosen, fitting))

    def of(self, plan: BatchPlan, local: LocalTokens) -> Iterator[tuple[int, int, int]]:
        """(segment, first, last + 1) of each block of a rank's tokens; every rank blocks a request alike."""
        for segment, first, last in local.runs:
            block = self.size(plan.spec.segments[segment].end)
            for start in range(first, last, block):
                yield segment, start, min(start + block, last)
