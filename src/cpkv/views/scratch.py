"""The memory that views hold beside the pool: one allocation, carved anew for every batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cpkv.errors import CapacityError, ConfigError
from cpkv.layout.view_costs import aligned
from cpkv.pool.page_pool import POISON_BYTE


class Scratch:
    """The scratch of one rank. Nothing in it outlives the batch that it was carved for.

    Args:
        limit_bytes: the most that a batch may take, allocated now; None allocates what the largest batch so far took.
        poison: fill it with 0xFF before every batch, so that a read of what nobody wrote shows.
        device: where it lies.

    Raises:
        ConfigError: the machine does not give that much.
    """

    def __init__(
        self, limit_bytes: int | None = None, *, poison: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        self._limit = limit_bytes
        self._poison = poison
        self._device = torch.device(device)
        self._memory = self._allocate(limit_bytes or 0)

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now."""
        return self._memory.numel()

    def carve(self, buffers: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Hand out uint8 buffers by name; what was handed out before is no longer valid.

        Raises:
            CapacityError: they do not fit; the planner lets no such batch through.
        """
        needed = sum(map(aligned, buffers.values()))
        if self._limit is not None and needed > self._limit:
            raise CapacityError(
                f"a batch needs {needed} bytes of scratch and there are {self._limit}; "
                f"raise --scratch-bytes to {needed}"
            )
        if needed > self._memory.numel():
            self._memory = self._allocate(needed)
        if self._poison:
            self._memory.fill_(POISON_BYTE)
        carved, first = {}, 0
        for name, num_bytes in buffers.items():
            carved[name] = self._memory[first : first + num_bytes]
            first += aligned(num_bytes)
        return carved

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            # Outside of inference mode, since the thread that prefetches writes into it too.
            with torch.inference_mode(False):
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise ConfigError(
                f"the scratch takes {num_bytes} bytes and {self._device} does not give them ({error}); "
                "lower --scratch-bytes"
            ) from error
