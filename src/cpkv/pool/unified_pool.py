"""A rank's pages in memory that all ranks of the host have mapped: its own part is a pool like any other.

rows of layer 0, 2 ranks, as either rank sees them:

    | rank 0: trash p2 p4 ... | rank 1: trash p3 p5 ... | tail: current rows |
      row 0                     row S                     row 2 S            S = rows of a segment
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.ops.kernels import Kernels
from cpkv.pool.page_pool import PagePool
from cpkv.pool.sealed_segment import RangeShape
from cpkv.pool.unified_memory import UnifiedRange, open_unified_pools, segment_memory


class UnifiedPool(PagePool):
    """The pool of one rank, and read-only those of the others.

    Args:
        geometry: what a page is, the same on every rank.
        local_pages: pages of every rank, the trash page included.
        latent: the range of latent rows.
        index: the range of index blocks.
        kernels: see `PagePool`.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        local_pages: int,
        latent: UnifiedRange,
        index: UnifiedRange,
        *,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(geometry, local_pages, memory=(latent.own, index.own), kernels=kernels)
        self._all_latent = _units(latent.memory, geometry.row_format.latent_row_bytes)
        self._all_blocks = _units(index.memory, geometry.index_block_bytes)
        self.segment_rows = latent.shape.segment_bytes // geometry.row_format.latent_row_bytes
        self.segment_blocks = index.shape.segment_bytes // geometry.index_block_bytes
        self.tail_row = latent.cp_size * self.segment_rows
        shift_rows = geometry.num_layers * geometry.page_size
        self.chunk_tokens = len(self._all_latent) - self.tail_row - shift_rows

    @classmethod
    def open(
        cls,
        geometry: PoolGeometry,
        local_pages: int,
        *,
        rank: int,
        cp_size: int,
        chunk_tokens: int,
        secret: str,
        folder: Path,
        fence: Callable[[str], None],
        poison: bool = False,
        device: torch.device | str = "cpu",
        kernels: Kernels | None = None,
    ) -> UnifiedPool:
        """Make this rank's part, share it with the others and map theirs. Every rank calls it.

        Args:
            geometry: what a page is.
            local_pages: pages of each rank, the trash page included.
            rank: ours.
            cp_size: ranks, all on one host.
            chunk_tokens: tokens of a batch at most; their rows lie in the tail.
            secret: of this run.
            folder: of this run, the same for all ranks.
            fence: waits for all ranks.
            poison: see `PagePool`.
            device: where our pages lie; the others' may be on other devices of that type.
            kernels: see `PagePool`.

        Raises:
            CpkvError: see `open_unified_pools` and `segment_memory`.
        """
        geometry.check_rows(cp_size * local_pages)
        memory = segment_memory(device)
        row_bytes, block_bytes = geometry.row_format.latent_row_bytes, geometry.index_block_bytes
        latent_bytes, index_bytes = local_pages * geometry.latent_page_bytes, local_pages * geometry.index_page_bytes
        tail_bytes = (geometry.num_layers * geometry.page_size + chunk_tokens) * row_bytes
        latent, index = open_unified_pools(
            rank,
            cp_size,
            (
                RangeShape.of("latent", latent_bytes, row_bytes, tail_bytes, memory.page_bytes),
                RangeShape.of("index", index_bytes, block_bytes, page_bytes=memory.page_bytes),
            ),
            {
                "page_size": str(geometry.page_size),
                "slots": str(geometry.slots),
                "row_format": str(geometry.row_format),
            },
            secret,
            folder,
            fence,
            poison,
            memory=memory,
        )
        return cls(geometry, local_pages, latent, index, kernels=kernels)

    def all_latent_rows(self, layer: int) -> torch.Tensor:
        """Rows of all ranks and the tail, uint8 [rows, latent_row_bytes], the base shifted by the layer."""
        return self._all_latent[layer * self.geometry.page_size :]

    def all_index_blocks(self, layer: int) -> torch.Tensor:
        """Index blocks of all ranks, uint8 [blocks, index_block_bytes], the base shifted by the layer's slot."""
        return self._all_blocks[self._slot(layer) :]

    def tail_rows(self, layer: int, tokens: int) -> torch.Tensor:
        """Where the current rows of a layer lie, uint8 [tokens, latent_row_bytes]: `tail_row` in every layer."""
        return self.all_latent_rows(layer)[self.tail_row : self.tail_row + tokens]


def _units(memory: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    return memory[: memory.numel() // unit_bytes * unit_bytes].view(-1, unit_bytes)
