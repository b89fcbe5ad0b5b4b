"""What a layer's attention takes and chooses, whichever kernels compute it."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from cpkv.layout.plan import BatchPlan, LocalTokens
from cpkv.views.view import LayerRows


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
        positions: int64 or int32 [last - first, chosen], ascending, -1 behind the last.
        rows: int32 [last - first, chosen], their rows in the view; None where rows are fetched by position.
    """

    segment: int
    first: int
    last: int
    positions: torch.Tensor
    rows: torch.Tensor | None = None


class SparseAttention(abc.ABC):
    """Sparse attention of one model shape, for the tokens of one rank."""

    @abc.abstractmethod
    def choose(self, plan: BatchPlan, rows: LayerRows, local: LocalTokens, index: IndexInputs) -> list[Choice]:
        """Choose the keys of each of this rank's tokens, exactly.

        Args:
            plan: of the batch.
            rows: one layer of the view.
            local: this rank's tokens.
            index: what the indexer made of them.

        Raises:
            NumericsError: a score is NaN, where that is looked for.
        """

    @abc.abstractmethod
    def attend(self, rows: LayerRows, queries: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
        """Attend from this rank's tokens to the rows that they chose.

        Args:
            rows: one layer of the view.
            queries: [tokens, heads, latent_width], absorbed.
            choices: of this layer, or of the last layer that has an indexer.

        Returns:
            [tokens, heads, kv_lora_rank] in the compute dtype.
        """
