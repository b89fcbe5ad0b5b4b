"""The interface that every view has. A view is made for one batch and asked once per layer.

plan ----> View(plan, context) -- current_target(l)  --> where the batch's own rows are to be put
                               -- open_layer(l, current rows) --> LayerRows
                                                       .chosen_rows   the rows that queries chose
                                                       .key_blocks    index keys in position order
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NewType

import torch

from cpkv.comm.communicator import Communicator
from cpkv.layout.placement import keep_none
from cpkv.layout.plan import BatchPlan
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.split import IntArray
from cpkv.layout.view_costs import TAIL, BatchSizes, ViewCosts
from cpkv.ops.kernels import Kernels
from cpkv.pool.page_pool import PagePool
from cpkv.views.counters import ViewCounters
from cpkv.views.scratch import Scratch

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


@dataclass(frozen=True)
class ViewContext:
    """What the views of one rank work with.

    Attributes:
        pool: this rank's pages.
        comm: this rank's end of the group.
        costs: which buffers each view takes.
        scratch: where they come from.
        counters: of this batch.
    """

    pool: PagePool
    comm: Communicator
    costs: ViewCosts
    scratch: Scratch
    counters: ViewCounters

    @property
    def geometry(self) -> PoolGeometry:
        """Of a page over all layers, whatever part of it this rank stores."""
        return self.costs.geometry

    @property
    def kernels(self) -> Kernels:
        """What moves bytes on the rank's device."""
        return self.pool.kernels

    def tensor(self, numbers: IntArray) -> torch.Tensor:
        """Numbers of a plan, int64, on the rank's device."""
        return torch.from_numpy(numbers).to(self.pool.device)

    def arange(self, first: int, last: int) -> torch.Tensor:
        """int64 [last - first], on the rank's device."""
        return torch.arange(first, last, device=self.pool.device)


class LayerRows(abc.ABC):
    """The rows of one layer, as attention reads them. Every rank closes it, also with no token of its own."""

    latent: torch.Tensor
    """uint8 [view rows, latent_row_bytes]: what `View.rows_of` numbers. `blocked` has none."""

    def __init__(self, view: View, latent: torch.Tensor) -> None:
        self._view = view
        self.latent = latent

    @abc.abstractmethod
    def key_blocks(self, segment: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Stored index keys of a segment's request: (first position, uint8 [tokens, index_row_bytes]).

        Blocks come in position order and hold whole key tiles, except the last. Each is valid until the next is asked
        for. Every rank must ask for all blocks of every segment with more than topk tokens, in plan order.
        """

    def chosen_rows(self, segment: int, positions: torch.Tensor) -> torch.Tensor:
        """Rows of positions (int64, any shape, each 0 or more): uint8 [*shape, latent_row_bytes]."""
        return self._view.context.kernels.gather_rows(self.latent, self._view.rows_of(segment, positions))

    def position_rows(self, segment: int) -> torch.Tensor | None:
        """Row in `latent` of every position of a segment's request, int64 [tokens]; None where rows are fetched."""
        return self._view.position_rows(segment)

    def keys_done(self) -> None:  # noqa: B027
        """No key block of this layer will be asked for any more."""

    def close(self) -> None:  # noqa: B027
        """This rank has attended to all its tokens in this layer."""


class View(abc.ABC):
    """What attention reads during one batch.

    Args:
        plan: of the batch.
        context: of the rank.
    """

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        self.plan = plan
        self.context = context
        self._position_rows: tuple[torch.Tensor, ...] = ()
        cost = context.costs.cost(plan.spec.view, BatchSizes.of(plan, context.costs.options))
        self.buffers = context.scratch.carve({name: size for name, size in cost.buffers.items() if name != TAIL})
        context.counters.open_batch(plan.spec.view, cost.held_bytes)

    @property
    def name(self) -> str:
        """The view's name in the plan."""
        return self.plan.spec.view

    def exchange(self, row_bytes: int) -> torch.Tensor:
        """Where rows of all ranks arrive: uint8 [cp_size, tokens of a rank, row_bytes]."""
        shape = (self.plan.cp_size, self.plan.split.max_tokens, row_bytes)
        return self.buffers["exchange"][: shape[0] * shape[1] * shape[2]].view(shape)

    def current_target(self, layer: int) -> CurrentRows:
        """Where the current rows of a layer are to be put before it is opened."""
        row_format = self.context.geometry.row_format
        return CurrentRows(
            self.buffers["current rows"].view(-1, row_format.latent_row_bytes), self._index_target(layer)
        )

    def _index_target(self, layer: int) -> torch.Tensor | None:
        if self.context.geometry.slots[layer] < 0:
            return None
        return self.buffers["current index keys"].view(-1, self.context.geometry.row_format.index_row_bytes)

    def current_keys(self, segment: int, current: CurrentRows) -> torch.Tensor:
        """The current index rows of a segment, uint8 [tokens, index_row_bytes]."""
        assert current.index is not None
        return current.index[self.plan.offsets[segment] : self.plan.offsets[segment + 1]]

    def rows_of(self, segment: int, positions: torch.Tensor) -> ViewRows:
        """The rows of positions of a segment's request, in every layer; -1 stays -1.

        Args:
            segment: number of the segment in the plan.
            positions: int64, any shape.
        """
        rows = self._position_rows[segment][positions.clamp(min=0)]
        return ViewRows(keep_none(positions, rows))

    def position_rows(self, segment: int) -> torch.Tensor | None:
        """Row of every position of a segment's request, in every layer; None in a view that has no rows."""
        return self._position_rows[segment] if self._position_rows else None

    @abc.abstractmethod
    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Make a layer readable. Every rank calls it for every layer, in order, also with no token of its own."""

    def close(self, *, abandon: bool = False) -> None:  # noqa: B027
        """The batch is over, or with `abandon` has failed and nothing is waited for."""
