"""The `current` view: a batch without history reads the rows that were gathered for writing. No pool row is read.

packed token   0  1  2 | 3  4           view row = packed token
request        A  A  A | B  B
pos            0  1  2 | 0  1
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from cpkv.layout.plan import BatchPlan
from cpkv.views.view import CurrentRows, LayerRows, View, ViewContext


class CurrentLayerRows(LayerRows):
    """The gathered current rows themselves."""

    def __init__(self, view: View, current: CurrentRows) -> None:
        super().__init__(view, current.latent)
        self._current = current

    def key_blocks(self, segment: int) -> Iterator[tuple[int, torch.Tensor]]:
        """A slice of the current rows."""
        yield 0, self._view.current_keys(segment, self._current)


class CurrentView(View):
    """Reads nothing but the batch's own rows; the plan guarantees that there is no history."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        self._position_rows = tuple(context.arange(first, last) for first, last in pairwise(plan.offsets))

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Nothing moves."""
        return CurrentLayerRows(self, current)
