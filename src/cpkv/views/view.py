"""The interface that every view has. A view is made for one batch and asked once per layer.

plan ----> View(plan, pool, comm) -- open_layer(l, current rows) --> LayerRows
                                                                      .latent       rows that kernels read
                                                                      .index_keys   keys in position order
           .position_rows[segment]  pos -> row of .latent, the same for every layer
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import NewType

import torch

from cpkv.layout.placement import keep_none
from cpkv.layout.plan import BatchPlan

ViewRows = NewType("ViewRows", torch.Tensor)


@dataclass(frozen=True)
class CurrentRows:
    """The stored rows of the batch's own tokens, gathered from the ranks that made them, in token order.

    Attributes:
        latent: uint8 [tokens, latent_row_bytes].
        index: uint8 [tokens, index_row_bytes]; None on a layer without an indexer.
    """

    latent: torch.Tensor
    index: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.latent.numel() + (self.index.numel() if self.index is not None else 0)


@dataclass
class ViewCounters:
    """What the batches of one rank cost, by view.

    Attributes:
        batches: view -> batches that used it.
        moved_bytes: bytes that all-gathers of pages brought to this rank, padding and own pages included.
        history_bytes: of the pages brought here, the bytes of those that hold history.
        scratch_bytes: the most that any layer held beside the pool.
    """

    batches: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    history_bytes: int = 0
    scratch_bytes: int = 0

    def count_batch(self, view: str) -> None:
        """Count one batch."""
        self.batches[view] = self.batches.get(view, 0) + 1

    def hold(self, num_bytes: int) -> None:
        """Note how much one layer holds."""
        self.scratch_bytes = max(self.scratch_bytes, num_bytes)

    def add(self, other: ViewCounters) -> None:
        """Count what others cost too."""
        for view, batches in other.batches.items():
            self.batches[view] = self.batches.get(view, 0) + batches
        self.moved_bytes += other.moved_bytes
        self.history_bytes += other.history_bytes
        self.scratch_bytes = max(self.scratch_bytes, other.scratch_bytes)


class LayerRows(abc.ABC):
    """The rows of one layer, as attention reads them."""

    latent: torch.Tensor
    """uint8 [view rows, latent_row_bytes]"""

    held_bytes: int
    """Bytes of this layer's buffers beside the pool, the batch's current rows included."""

    @abc.abstractmethod
    def index_keys(self, segment: int) -> torch.Tensor:
        """Stored index keys of a segment's request, uint8 [tokens, index_row_bytes], in position order."""


class View(abc.ABC):
    """What attention reads during one batch."""

    name: str

    def __init__(self, plan: BatchPlan, position_rows: tuple[torch.Tensor, ...]) -> None:
        self.plan = plan
        self._position_rows = position_rows

    def rows_of(self, segment: int, positions: torch.Tensor) -> ViewRows:
        """The rows of positions of a segment's request, in every layer; -1 stays -1.

        Args:
            segment: number of the segment in the plan.
            positions: int64, any shape.
        """
        rows = self._position_rows[segment][positions.clamp(min=0)]
        return ViewRows(keep_none(positions, rows))

    @abc.abstractmethod
    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Make a layer readable. Every rank calls it for every layer, in order, also with no token of its own."""
