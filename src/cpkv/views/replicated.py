"""The `replicated` view: a pool that holds every page, read where it lies. The baseline, and the decode worker's view.

rank 0    r 1 2 3 4 5 ...        view row = row of the own pool        the same on every rank
"""

from __future__ import annotations

import numpy as np
import torch

from cpkv.layout.plan import BatchPlan
from cpkv.ops.reference.pages import token_rows
from cpkv.views.index_blocks import PagedLayerRows
from cpkv.views.view import CurrentRows, LayerRows, View, ViewContext


class ReplicatedView(View):
    """Reads the pool, current rows included."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        geometry = context.geometry
        position_rows, blocks = [], []
        for segment in plan.spec.segments:
            pages = context.tensor(np.asarray(segment.pages[: plan.placement.pages_for(segment.end)]))
            local_pages = plan.placement.local_page(pages)
            rows = geometry.latent_row(local_pages, torch.zeros_like(local_pages))
            position_rows.append(token_rows(rows, segment.end, geometry.page_size))
            blocks.append(geometry.index_block(local_pages))
        self._position_rows = tuple(position_rows)
        self._blocks = tuple(blocks)
        self._ends = tuple(segment.end for segment in plan.spec.segments)

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Nothing moves: the layer's base is shifted."""
        pool = self.context.pool
        blocks = pool.index_blocks(layer) if pool.geometry.slots[layer] >= 0 else None
        return PagedLayerRows(self, pool.latent_rows(layer), blocks, self._blocks, self._ends, current)
