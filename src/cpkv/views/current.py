"""The `current` view: a batch without history reads the rows that were gathered for writing. No pool row is read.

packed token   0  1  2 | 3  4           view row = packed token
request        A  A  A | B  B
pos            0  1  2 | 0  1
"""

from __future__ import annotations

from itertools import pairwise

import torch

from cpkv.layout.plan import BatchPlan
from cpkv.views.view import CurrentRows, LayerRows, View, ViewCounters


class CurrentLayerRows(LayerRows):
    """The gathered current rows themselves."""

    def __init__(self, plan: BatchPlan, current: CurrentRows) -> None:
        self.latent = current.latent
        self.held_bytes = current.num_bytes
        self._plan = plan
        self._current = current

    def index_keys(self, segment: int) -> torch.Tensor:
        """A slice of the current rows."""
        assert self._current.index is not None
        return self._current.index[self._plan.offsets[segment] : self._plan.offsets[segment + 1]]


class CurrentView(View):
    """Reads nothing but the batch's own rows; the plan guarantees that there is no history."""

    name = "current"

    def __init__(self, plan: BatchPlan, counters: ViewCounters) -> None:
        super().__init__(plan, tuple(torch.arange(first, last) for first, last in pairwise(plan.offsets)))
        self._counters = counters

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Nothing moves."""
        self._counters.hold(current.num_bytes)
        return CurrentLayerRows(self.plan, current)
