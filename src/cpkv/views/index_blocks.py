"""Index keys in position order, out of blocks of pages and the current rows.

pos       0 1 2 3 | 4 5 6 | 7 8 9          page_size 4, 7 tokens of history
from      block of page 0 | of page 1 |    current index rows
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cpkv.views.view import CurrentRows, LayerRows, View


class PagedLayerRows(LayerRows):
    """Rows of one layer whose history lies in blocks of pages.

    Args:
        view: whose buffer `keys` the keys are unpacked into.
        latent: see `LayerRows`.
        blocks: uint8 [blocks, index_block_bytes]; None on a layer without an indexer.
        block_numbers: per segment, the blocks of its history by page position.
        history: per segment, how many of its tokens are read from blocks.
        current: where the others are read.
    """

    def __init__(
        self,
        view: View,
        latent: torch.Tensor,
        blocks: torch.Tensor | None,
        block_numbers: tuple[torch.Tensor, ...],
        history: tuple[int, ...],
        current: CurrentRows,
    ) -> None:
        super().__init__(view, latent)
        self.blocks = blocks
        self._block_numbers = block_numbers
        self._history = history
        self._current = current

    def key_blocks(self, segment: int) -> Iterator[tuple[int, torch.Tensor]]:
        """All keys of the request as one block."""
        geometry = self._view.context.geometry
        row_bytes = geometry.row_format.index_row_bytes
        tokens = self._view.plan.spec.segments[segment].end
        history = self._history[segment]
        keys = self._view.buffers["keys"][: tokens * row_bytes].view(tokens, row_bytes)
        if history:
            assert self.blocks is not None
            self._view.context.kernels.unpack_index_keys(
                self.blocks,
                self._block_numbers[segment],
                tokens=history,
                page_size=geometry.page_size,
                key_bytes=geometry.row_format.index_key_bytes,
                out=keys[:history],
            )
        if history < tokens:
            keys[history:] = self._view.current_keys(segment, self._current)
        yield 0, keys
