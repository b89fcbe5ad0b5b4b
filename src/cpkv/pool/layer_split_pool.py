"""A pool that holds every page of some of the layers: the layer-split baseline. For comparison only, nothing is sent
from it.

4 ranks, 6 layers      rank 0: l0 l1      rank 1: l2 l3      rank 2: l4      rank 3: l5
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cpkv.errors import ConfigError
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.pool.page_pool import PagePool, PlacedWrites


def split_layers(num_layers: int, cp_size: int) -> tuple[range, ...]:
    """The layers of each rank: contiguous, the first ranks one more where they do not divide evenly.

    Raises:
        ConfigError: a rank would have none.
    """
    if num_layers < cp_size:
        raise ConfigError(f"{num_layers} layers cannot be split over {cp_size} ranks; use at most {num_layers} ranks")
    firsts = [rank * (num_layers // cp_size) + min(rank, num_layers % cp_size) for rank in range(cp_size + 1)]
    return tuple(range(firsts[rank], firsts[rank + 1]) for rank in range(cp_size))


class LayerSplitPool(PagePool):
    """The pool of one rank.

    Args:
        geometry: of all layers.
        local_pages: pages of the whole cache, the trash page included.
        rank: ours.
        cp_size: ranks.
        poison: see `PagePool`.
    """

    def __init__(
        self, geometry: PoolGeometry, local_pages: int, rank: int, cp_size: int, *, poison: bool = False
    ) -> None:
        self.layers = split_layers(geometry.num_layers, cp_size)
        self.rank = rank
        own = [geometry.slots[layer] >= 0 for layer in self.layers[rank]]
        super().__init__(replace(geometry, slots=index_slots(own)), local_pages, poison=poison)
        self.model_geometry = geometry

    def source(self, layer: int) -> int:
        """The rank that holds a layer."""
        return next(rank for rank, layers in enumerate(self.layers) if layer in layers)

    def write(self, layer: int, places: PlacedWrites, latent: torch.Tensor, index: torch.Tensor | None) -> None:
        """Store the rows of an own layer; do nothing for another's."""
        if layer in self.layers[self.rank]:
            super().write(self._own(layer), places, latent, index)

    def latent_pages(self, layer: int, local_pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy pages of an own layer."""
        super().latent_pages(self._own(layer), local_pages, out)

    def index_pages(self, layer: int, local_pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy index blocks of an own layer."""
        super().index_pages(self._own(layer), local_pages, out)

    def _own(self, layer: int) -> int:
        return layer - self.layers[self.rank].start
