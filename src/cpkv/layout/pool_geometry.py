"""How pages lie in a rank's pool: page-major, so that one page is one run of bytes over all layers.

Rank 1 of 4, two layers (L = 2), one of them with an indexer (K = 1), page_size 2; row `page.layer.offset`:

    latent  local page 0 (trash)            local page 1 = logical page 5    local page 2 = logical page 9
            0.0.0 0.0.1 0.1.0 0.1.1         5.0.0 5.0.1 5.1.0 5.1.1          9.0.0 ...
    index   0.slot 0                        5.slot 0                         9.slot 0

Layer l is the same flat tensor of rows with its base shifted by l * page_size rows, so the row map does not
depend on the layer:  latent row = local_page * L * page_size + offset,  index block = local_page * K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpkv.errors import ConfigError
from cpkv.layout.placement import Ints, PagePlacement, keep_none
from cpkv.layout.row_format import RowFormat

MAX_ROWS = 2**31 - 1


def index_slots(has_indexer: Sequence[bool]) -> tuple[int, ...]:
    """Layer -> index slot, compact: layers without an indexer have -1 and take no memory."""
    slots: list[int] = []
    used = 0
    for layer_has in has_indexer:
        slots.append(used if layer_has else -1)
        used += layer_has
    return tuple(slots)


@dataclass(frozen=True)
class PoolGeometry:
    """The shape of a pool, the same for every rank, for prefill and decode.

    Attributes:
        row_format: what one token stores.
        page_size: tokens of a page.
        slots: layer -> index slot, -1 for a layer that reuses another layer's choice (`index_slots`).
    """

    row_format: RowFormat
    page_size: int
    slots: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers, each with a latent row per token."""
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """Index slots: layers that have an indexer."""
        return max(self.slots) + 1

    @property
    def index_block_bytes(self) -> int:
        """Bytes of one page of index keys of one layer."""
        return self.page_size * self.row_format.index_row_bytes

    @property
    def latent_page_bytes(self) -> int:
        """Bytes of one page of latent rows, all layers."""
        return self.num_layers * self.page_size * self.row_format.latent_row_bytes

    @property
    def index_page_bytes(self) -> int:
        """Bytes of one page of index keys, all slots."""
        return self.num_slots * self.index_block_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: what a transfer of it moves, and what a rank pays for it."""
        return self.latent_page_bytes + self.index_page_bytes

    def latent_row(self, local_page: Ints, offset: Ints) -> Ints:
        """Row of a token in layer 0; layer l is at the same row of the base shifted by l * page_size rows."""
        return keep_none(local_page, local_page * (self.num_layers * self.page_size) + offset)

    def index_block(self, local_page: Ints) -> Ints:
        """Block of a page in slot 0; slot k is k blocks further."""
        return keep_none(local_page, local_page * self.num_slots)

    def pool_bytes(self, local_pages: int) -> int:
        """Bytes that a rank allocates for that many local pages, its trash page included."""
        return local_pages * self.page_bytes

    def check_rows(self, local_pages: int) -> None:
        """Refuse a pool whose row numbers would not fit in 32 bits.

        Raises:
            ConfigError: with the largest number of local pages that fits.
        """
        rows_per_page = self.num_layers * self.page_size
        if local_pages * rows_per_page > MAX_ROWS:
            raise ConfigError(
                f"{local_pages} local pages of {self.num_layers} layers x {self.page_size} tokens are "
                f"{local_pages * rows_per_page} rows, and row numbers have 31 bits; "
                f"use at most {MAX_ROWS // rows_per_page} local pages a rank"
            )


def local_pages(num_pages: int, placement: PagePlacement) -> int:
    """Local pages of each rank when `num_pages` logical pages, reserved ones included, are spread over the ranks.

    Raises:
        ConfigError: `num_pages` is no multiple of cp_size, or leaves nothing beside the reserved pages.
    """
    cp_size = placement.cp_size
    if num_pages % cp_size:
        raise ConfigError(
            f"num_pages is {num_pages}, no multiple of cp_size {cp_size}, so the ranks' pools would differ in size; "
            f"set --num-pages to {max(2, -(-num_pages // cp_size)) * cp_size}"
        )
    if num_pages < 2 * cp_size:
        raise ConfigError(
            f"num_pages is {num_pages}, and {cp_size} of them are reserved (one trash page a rank); "
            f"set --num-pages to {2 * cp_size} or more"
        )
    return num_pages // cp_size
