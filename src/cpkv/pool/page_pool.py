"""A rank's pages. Two allocations, page-major; see `cpkv.layout.pool_geometry` for the drawing.

Rank 2 of 4 with local pages 0 (trash), 1 and 2, two layers, one index slot:

    latent  [local_page, layer, page_size, latent_row_bytes]    |trash l0 l1|page 6 l0 l1|page 10 l0 l1|
    index   [local_page, slot, index_block_bytes]               |trash s0   |page 6 s0   |page 10 s0   |
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cpkv.errors import AllocatorError, ConfigError
from cpkv.layout.plan import PageWrites
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.ops.device import launching_on
from cpkv.ops.kernels import Kernels, reference_kernels

POISON_BYTE = 0xFF
COPY_BYTES = 256 << 20


class PageSpan(NamedTuple):
    """One page in one allocation: where it starts, in bytes of memory, and how long it is."""

    address: int
    length: int


class PlacedWrites(NamedTuple):
    """Where a rank stores its rows of a batch, the same in every layer; all int64 [tokens], on the pool's device.

    Attributes:
        tokens: packed tokens of the batch.
        rows: rows of the pool.
        blocks: index blocks.
        offsets: places in these.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor


class PagePool:
    """Pages of one rank, all layers. Nothing but this rank's own pages is stored here.

    Args:
        geometry: what a page is.
        local_pages: pages of this rank, the trash page included.
        poison: fill every byte with 0xFF (NaN in every float format), so that a read of what nobody wrote shows;
            zeros otherwise.
        memory: uint8 latent and index memory to use as it is, of the right sizes; allocated when left out.
        device: where to allocate it.
        kernels: what moves bytes there; plain torch when left out.
        pinned: memory of the host that GPUs copy from and to at full speed.

    Attributes:
        geometry: of what is stored here.
        model_geometry: of a page over all layers; another one only where a rank stores some of the layers.

    Raises:
        ConfigError: row numbers would not fit in 32 bits, or the memory is not there.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        local_pages: int,
        *,
        poison: bool = False,
        memory: tuple[torch.Tensor, torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
        kernels: Kernels | None = None,
        pinned: bool = False,
    ) -> None:
        geometry.check_rows(local_pages)
        self.kernels = kernels or reference_kernels()
        self.geometry = geometry
        self.model_geometry = geometry
        self.local_pages = local_pages
        latent_shape = (
            local_pages,
            geometry.num_layers,
            geometry.page_size,
            geometry.row_format.latent_row_bytes,
        )
        index_shape = (local_pages, geometry.num_slots, geometry.index_block_bytes)
        if memory is not None:
            self.latent, self.index = memory[0].view(latent_shape), memory[1].view(index_shape)
            return
        fill = POISON_BYTE if poison else 0
        try:
            self.latent = torch.full(latent_shape, fill, dtype=torch.uint8, device=device, pin_memory=pinned)
            self.index = torch.full(index_shape, fill, dtype=torch.uint8, device=device, pin_memory=pinned)
        except RuntimeError as error:
            raise ConfigError(
                f"a pool of {local_pages} local pages takes {geometry.pool_bytes(local_pages)} bytes and {device} "
                f"does not give them ({error}); lower --num-pages"
            ) from error

    def __repr__(self) -> str:
        """Pages and bytes."""
        return f"PagePool({self.local_pages} local pages, {self.allocated_bytes} bytes)"

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.latent.device

    @property
    def allocated_bytes(self) -> int:
        """Bytes that this pool really holds; equals `geometry.pool_bytes(local_pages)`."""
        return self.latent.numel() + self.index.numel()

    def latent_rows(self, layer: int) -> torch.Tensor:
        """All rows uint8 [rows, latent_row_bytes] as layer `layer` sees them: the base shifted by that layer."""
        flat = self.latent.view(-1, self.geometry.row_format.latent_row_bytes)
        return flat[layer * self.geometry.page_size :]

    def index_blocks(self, layer: int) -> torch.Tensor:
        """All index blocks uint8 [blocks, index_block_bytes] as a layer with an indexer sees them."""
        return self.index.view(-1, self.geometry.index_block_bytes)[self._slot(layer) :]

    def _slot(self, layer: int) -> int:
        slot = self.geometry.slots[layer]
        if slot < 0:
            raise AllocatorError(f"layer {layer} reuses another layer's choice and stores no index keys")
        return slot

    def latent_pages(self, layer: int, local_pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy pages of one layer into `out`, uint8 [pages, page_size * latent_row_bytes]."""
        self.kernels.gather_pages(self.latent[:, layer].flatten(1), local_pages, out)

    def index_pages(self, layer: int, local_pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy index blocks of one layer into `out`, uint8 [pages, index_block_bytes]."""
        self.kernels.gather_pages(self.index[:, self._slot(layer)], local_pages, out)

    def place(self, writes: PageWrites) -> PlacedWrites:
        """Find the places of a batch's rows here, for all its layers."""
        numbers = (
            writes.packed,
            self.geometry.latent_row(writes.local_pages, writes.offsets),
            self.geometry.index_block(writes.local_pages),
            writes.offsets,
        )
        return PlacedWrites(*(torch.from_numpy(values).to(self.device) for values in numbers))

    def write(self, layer: int, places: PlacedWrites, latent: torch.Tensor, index: torch.Tensor | None) -> None:
        """Store the rows that this rank owns.

        Args:
            layer: the layer that made the rows.
            places: which tokens of the batch, and where they go.
            latent: uint8 [tokens of the batch, latent_row_bytes] current rows in token order.
            index: uint8 [tokens of the batch, index_row_bytes], or None for a layer without an indexer.
        """
        if not len(places.tokens):
            return
        kernels = self.kernels
        kernels.store_rows(self.latent_rows(layer), places.rows, kernels.gather_rows(latent, places.tokens))
        if index is not None:
            kernels.store_index_keys(
                self.index_blocks(layer),
                places.blocks,
                places.offsets,
                kernels.gather_rows(index, places.tokens),
                page_size=self.geometry.page_size,
                key_bytes=self.geometry.row_format.index_key_bytes,
            )

    def regions(self) -> tuple[PageSpan, PageSpan]:
        """The two allocations, for registration with a transfer engine."""
        return (
            PageSpan(self.latent.data_ptr(), self.latent.numel()),
            PageSpan(self.index.data_ptr(), self.index.numel()),
        )

    def page_spans(self, local_page: int) -> tuple[PageSpan, PageSpan]:
        """The bytes of one page: one span in each allocation."""
        geometry = self.geometry
        return (
            PageSpan(self.latent.data_ptr() + local_page * geometry.latent_page_bytes, geometry.latent_page_bytes),
            PageSpan(self.index.data_ptr() + local_page * geometry.index_page_bytes, geometry.index_page_bytes),
        )

    def stage(self, local_pages: Sequence[int]) -> None:
        """Make pages readable where `page_spans` says: they are."""

    def copy_pages(self, source: PagePool, local_pages: Sequence[int]) -> None:
        """Copy whole pages of another pool, of the same geometry and wherever it lies, to the same places here.

        Either pool may be on a GPU; the bytes are here when this returns.
        """
        step = max(1, COPY_BYTES // max(1, self.geometry.pool_bytes(1)))
        for first in range(0, len(local_pages), step):
            here = torch.tensor(local_pages[first : first + step], device=self.device)
            there = here.to(source.device)
            for target, pages in ((self.latent, source.latent), (self.index, source.index)):
                if not pages[0].numel():
                    continue
                with launching_on(source.device):
                    copied = source.kernels.gather_rows(pages.flatten(1), there).to(self.device)
                with launching_on(self.device):
                    self.kernels.store_rows(target.flatten(1), here, copied)

    def poison(self, local_pages: list[int]) -> None:
        """Fill pages with NaN bytes: a read of a page that was given back shows."""
        self.latent[local_pages] = POISON_BYTE
        self.index[local_pages] = POISON_BYTE

    def page_digest(self, local_page: int) -> str:
        """SHA-256 of a page's bytes, all layers, latent rows then index blocks."""
        digest = hashlib.sha256(self.latent[local_page].cpu().numpy().tobytes())
        digest.update(self.index[local_page].cpu().numpy().tobytes())
        return digest.hexdigest()
