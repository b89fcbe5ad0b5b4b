"""What memory must offer to be shared by all ranks of a host, whatever it is made of.

`cpkv.pool.unified_memory.SealedMemory` is the CPU's, `cpkv.pool.vmm_memory.VmmMemory` that of a GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch

from cpkv.pool.sealed_segment import RangeShape


class SegmentMapping(Protocol):
    """Addresses of a whole range, with our own segment and the tail mapped."""

    @property
    def shape(self) -> RangeShape:
        """Sizes, equal on all ranks."""

    @property
    def rank(self) -> int:
        """Whose segment is writable."""

    @property
    def cp_size(self) -> int:
        """Segments."""

    def map_segment(self, owner: int, descriptor: int) -> None:
        """Map the segment of another rank, read-only. Raises CpkvError with the rank and the cause."""

    def tensor(self) -> torch.Tensor:
        """A tensor uint8 over the whole range; it and its views now own the mapping. Once."""

    def close(self) -> None:
        """Unmap everything now. Only as long as there is no tensor over it."""


class SegmentMemory(Protocol):
    """A kind of memory."""

    @property
    def page_bytes(self) -> int:
        """What segments are rounded to; see `RangeShape`."""

    def check(self, rank: int, cp_size: int, num_bytes: int) -> None:
        """Raise ConfigError unless the memory can be shared here and each rank can have `num_bytes`."""

    def create(self, shape: RangeShape, rank: int, cp_size: int, *, poison: bool) -> tuple[SegmentMapping, int]:
        """Take a rank's segment and tail and map them.

        Args:
            shape: of the range.
            rank: ours.
            cp_size: segments of the range.
            poison: fill the segment with 0xFF; zeros otherwise, as in the tail.

        Returns:
            The mapping and a descriptor of the segment for the other ranks, closed on exec; both are the caller's to
            close.

        Raises:
            ConfigError: the memory or the addresses are not there. Nothing is left mapped or open then.
        """

    def why_not_segment(self, descriptor: int, shape: RangeShape) -> str | None:
        """Why a descriptor from another process must not be mapped, as far as that shows before it is; else None."""
