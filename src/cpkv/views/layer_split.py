"""The `layer-split` view: each layer's pages are broadcast by the rank that holds the layer. For comparison only.

layer l, held by rank s      rank s: pages of l --broadcast--> every rank: | history pages | current rows |
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cpkv.errors import PlanError
from cpkv.layout.plan import BatchPlan
from cpkv.pool.layer_split_pool import LayerSplitPool
from cpkv.views.gathered import MixedView
from cpkv.views.history_gather import HistoryGather
from cpkv.views.view import ViewContext


class LayerBroadcast(HistoryGather):
    """The history of one batch, from whoever holds the layer."""

    def __init__(
        self,
        plan: BatchPlan,
        context: ViewContext,
        latent: list[torch.Tensor],
        index: torch.Tensor | None,
    ) -> None:
        if not isinstance(context.pool, LayerSplitPool):
            raise PlanError("the plan reads pools that are split by layers, and this pool is not")
        self._pool = context.pool
        super().__init__(plan, context, latent, index, owner=0)

    def _run(self, layer: int, collect: Callable[[torch.Tensor], None], out: torch.Tensor, label: str) -> None:
        started = time.perf_counter()
        source = self._pool.source(layer)
        if source == self._pool.rank:
            collect(out.flatten(0, 1))
        self._comm.broadcast(out, source, label)
        self._context.counters.moved(out.numel(), out.numel(), time.perf_counter() - started)


class LayerSplitView(MixedView):
    """Like `mixed`, with one broadcast in place of each gather."""

    gather_class = LayerBroadcast
