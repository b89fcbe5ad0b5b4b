"""Views that read pages: from buffers gathered from the owners (`full`), or from a pool that holds them all.

`full` over 4 ranks, a batch of pages 4 5 6 8 9; every rank contributes max_pages = 2 and pads with its trash page:

    view page   0    1    2    3    4    5    6    7
    page        4    8    5    9    6    -    -    -
    owner       0    0    1    1    2    2    3    3
"""

from __future__ import annotations

import torch

from cpkv.comm.communicator import Communicator
from cpkv.layout.plan import BatchPlan
from cpkv.ops.reference.index_keys import unpack_index_keys
from cpkv.pool.page_pool import PagePool
from cpkv.views.view import CurrentRows, LayerRows, View, ViewCounters


class PagedLayerRows(LayerRows):
    """Latent rows and index blocks of one layer, wherever they lie."""

    def __init__(
        self, view: FullView | ReplicatedView, latent: torch.Tensor, blocks: torch.Tensor | None, held_bytes: int
    ) -> None:
        self.latent = latent
        self._view = view
        self._blocks = blocks
        self.held_bytes = held_bytes

    def index_keys(self, segment: int) -> torch.Tensor:
        """Unpack a request's keys from its blocks."""
        assert self._blocks is not None
        geometry = self._view.pool.geometry
        keys = unpack_index_keys(
            self._blocks,
            self._view.segment_blocks[segment],
            tokens=self._view.plan.spec.segments[segment].end,
            page_size=geometry.page_size,
            key_bytes=geometry.row_format.index_key_bytes,
        )
        self._view.counters.hold(self.held_bytes + keys.numel())
        return keys


def _token_rows(page_rows: torch.Tensor, tokens: int, page_size: int) -> torch.Tensor:
    """First row of each page [pages] -> row of each position [tokens]."""
    return (page_rows.unsqueeze(1) + torch.arange(page_size)).flatten()[:tokens]


class FullView(View):
    """The batch's pages, gathered layer by layer from their owners into a compact buffer."""

    name = "full"

    def __init__(self, plan: BatchPlan, pool: PagePool, comm: Communicator, counters: ViewCounters) -> None:
        self.pool = pool
        self.counters = counters
        self._comm = comm
        self._gather = plan.page_gather()
        page_size = pool.geometry.page_size
        self.segment_blocks = tuple(torch.from_numpy(pages) for pages in self._gather.view_pages)
        position_rows = tuple(
            _token_rows(pages * page_size, segment.end, page_size)
            for pages, segment in zip(self.segment_blocks, plan.spec.segments, strict=True)
        )
        super().__init__(plan, position_rows)
        own = torch.from_numpy(self._gather.local_pages[comm.rank])
        padding = own.new_zeros(self._gather.max_pages - len(own))
        self._contributed = torch.cat([own, padding])

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Gather one layer's pages; the pool already holds the current rows."""
        geometry = self.pool.geometry
        latent = self._comm.all_gather(self.pool.latent_pages(layer, self._contributed), f"latent pages {layer}")
        moved = latent.numel()
        history = self._gather.history_pages * geometry.page_size * geometry.row_format.latent_row_bytes
        blocks = None
        if geometry.slots[layer] >= 0:
            blocks = self._comm.all_gather(self.pool.index_pages(layer, self._contributed), f"index pages {layer}")
            blocks = blocks.flatten(0, 1)
            moved += blocks.numel()
            history += self._gather.history_pages * geometry.index_block_bytes
        self.counters.moved_bytes += moved
        self.counters.history_bytes += history
        held = current.num_bytes + moved + moved // self._comm.size
        self.counters.hold(held)
        return PagedLayerRows(self, latent.view(-1, geometry.row_format.latent_row_bytes), blocks, held)


class ReplicatedView(View):
    """A pool that holds every page, read where it lies: the baseline, and the decode worker's view."""

    name = "replicated"

    def __init__(self, plan: BatchPlan, pool: PagePool, counters: ViewCounters) -> None:
        self.pool = pool
        self.counters = counters
        geometry = pool.geometry
        position_rows, blocks = [], []
        for segment in plan.spec.segments:
            pages = torch.tensor(segment.pages[: plan.placement.pages_for(segment.end)])
            local_pages = plan.placement.local_page(pages)
            rows = geometry.latent_row(local_pages, torch.zeros_like(local_pages))
            position_rows.append(_token_rows(rows, segment.end, geometry.page_size))
            blocks.append(geometry.index_block(local_pages))
        self.segment_blocks = tuple(blocks)
        super().__init__(plan, tuple(position_rows))

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Nothing moves: the layer's base is shifted."""
        has_indexer = self.pool.geometry.slots[layer] >= 0
        blocks = self.pool.index_blocks(layer) if has_indexer else None
        self.counters.hold(current.num_bytes)
        return PagedLayerRows(self, self.pool.latent_rows(layer), blocks, current.num_bytes)
