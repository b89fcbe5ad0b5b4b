"""The `unified` view: history is read where its owner stores it, through one range over every rank's pool.

    | rank 0 | rank 1 | rank 2 | rank 3 | tail |        pos < start: the owner's row       pos >= start: the tail

Fences. A rank reads history only after the all-gather of the first layer's current rows, which each rank joins after
all its earlier batches: what it reads is complete. An owner overwrites a freed page only behind the same all-gather of
a later batch, when every rank has finished the batch that could read it. What an owner writes in this very batch
nobody reads from the range: current rows lie in the private tail.
"""

from __future__ import annotations

import torch

from cpkv.errors import PlanError
from cpkv.layout.plan import BatchPlan
from cpkv.ops.reference.pages import token_rows
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.views.index_blocks import PagedLayerRows
from cpkv.views.view import CurrentRows, LayerRows, View, ViewContext


class UnifiedView(View):
    """Row numbers are mapped; no latent row moves."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        pool = context.pool
        if not isinstance(pool, UnifiedPool):
            raise PlanError("the plan reads the pools of all ranks as one, and this pool is not in shared memory")
        if plan.num_tokens > pool.chunk_tokens:
            raise PlanError(f"the batch has {plan.num_tokens} tokens, and the tail has room for {pool.chunk_tokens}")
        self._pool = pool
        placement, geometry = plan.placement, pool.geometry
        position_rows, blocks = [], []
        for number, (segment, first) in enumerate(zip(plan.spec.segments, plan.offsets, strict=False)):
            pages = context.tensor(plan.history_pages(number))
            owners, local_pages = placement.owner(pages), placement.local_page(pages)
            rows = owners * pool.segment_rows + geometry.latent_row(local_pages, torch.zeros_like(local_pages))
            history = token_rows(rows, segment.start, geometry.page_size)
            current = pool.tail_row + context.arange(first, first + segment.length)
            position_rows.append(torch.cat([history, current]))
            blocks.append(owners * pool.segment_blocks + geometry.index_block(local_pages))
        self._position_rows = tuple(position_rows)
        self._blocks = tuple(blocks)
        self._starts = tuple(segment.start for segment in plan.spec.segments)

    def current_target(self, layer: int) -> CurrentRows:
        """The tail of the range, since a kernel takes one base pointer."""
        return CurrentRows(self._pool.tail_rows(layer, self.plan.num_tokens), self._index_target(layer))

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Nothing moves."""
        blocks = self._pool.all_index_blocks(layer) if self._pool.geometry.slots[layer] >= 0 else None
        rows = self._pool.all_latent_rows(layer)
        return PagedLayerRows(self, rows, blocks, self._blocks, self._starts, current)
