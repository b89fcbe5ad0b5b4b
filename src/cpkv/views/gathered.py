"""The views that gather the history's pages into buffers of one layer: `mixed` and `full`.

4 ranks; the batch's chunk begins inside page 9, page 6 holds no history:

    mixed   | 4 | - | 9 | - | - | - | - | - |   c c c c c c      gathered pages, then the current rows by packed token
              0   0   1   1   2   2   3   3
    full    | 4 | - | 9'| - | - | - | - | - | 6'|                gathered pages, then the pages without history;
                                                                 ' the current rows are copied into both
"""

from __future__ import annotations

import torch

from cpkv.layout.plan import BatchPlan
from cpkv.ops.reference.pages import token_rows
from cpkv.views.history_gather import HistoryGather
from cpkv.views.index_blocks import PagedLayerRows
from cpkv.views.view import CurrentRows, LayerRows, View, ViewContext


class GatheredLayerRows(PagedLayerRows):
    """Rows of one layer, and the gather that is told when its keys have been read."""

    def __init__(self, view: GatheredView, layer: int, current: CurrentRows) -> None:
        has_indexer = view.context.geometry.slots[layer] >= 0
        blocks = view.gather.index_blocks() if has_indexer else None
        super().__init__(view, view.latent_buffer(layer), blocks, view.blocks, view.starts, current)
        self._gather = view.gather
        self._layer = layer

    def keys_done(self) -> None:
        """The next layer's index blocks may come."""
        self._gather.keys_done(self._layer)


class GatheredView(View):
    """What `mixed` and `full` have in common."""

    gather_class: type[HistoryGather] = HistoryGather

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        geometry = context.geometry
        self._gathered_rows = plan.history.padded_pages * geometry.page_size
        row_bytes = geometry.row_format.latent_row_bytes
        names = [name for name in ("latent 0", "latent 1") if name in self.buffers]
        self._latent = [self.buffers[name].view(-1, row_bytes) for name in names]
        self.starts = tuple(segment.start for segment in plan.spec.segments)
        self.blocks = tuple(context.tensor(pages) for pages in plan.history.gathered_pages)
        self.gather = self.gather_class(
            plan, context, [rows[: self._gathered_rows] for rows in self._latent], self.buffers.get("index blocks")
        )

    def latent_buffer(self, layer: int) -> torch.Tensor:
        """The buffer of a layer, uint8 [rows, latent_row_bytes]."""
        return self._latent[layer % len(self._latent)]

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Wait for the layer's history."""
        self.gather.open_layer(layer)
        return GatheredLayerRows(self, layer, current)

    def close(self, *, abandon: bool = False) -> None:
        """End the gather's thread."""
        self.gather.close(abandon=abandon)


class MixedView(GatheredView):
    """History from the gathered pages, current rows from where they were put for writing."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        page_size = context.geometry.page_size
        self._position_rows = tuple(
            torch.cat(
                [
                    token_rows(pages * page_size, segment.start, page_size),
                    self._gathered_rows + context.arange(first, first + segment.length),
                ]
            )
            for pages, segment, first in zip(self.blocks, plan.spec.segments, plan.offsets, strict=False)
        )

    def current_target(self, layer: int) -> CurrentRows:
        """Behind the gathered pages."""
        return CurrentRows(self.latent_buffer(layer)[self._gathered_rows :], self._index_target(layer))


class FullView(GatheredView):
    """All pages of the batch in one buffer, current rows included: what a kernel that reads whole pages wants."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        page_size = context.geometry.page_size
        position_rows, fresh = [], plan.history.padded_pages
        for pages, segment in zip(self.blocks, plan.spec.segments, strict=True):
            count = plan.placement.pages_for(segment.end) - len(pages)
            all_pages = torch.cat([pages, context.arange(fresh, fresh + count)])
            position_rows.append(token_rows(all_pages * page_size, segment.end, page_size))
            fresh += count
        self._position_rows = tuple(position_rows)
        self._current = torch.cat(
            [rows[segment.start : segment.end] for rows, segment in zip(position_rows, plan.spec.segments, strict=True)]
        )

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Wait for the layer's history and copy the current rows into the pages."""
        rows = super().open_layer(layer, current)
        self.context.kernels.store_rows(rows.latent, self._current, current.latent)
        return rows
