"""Rows of bytes with guard bands: before, behind and between them lies 0xFF, which must stay."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

GUARD = 64
POISON = 0xFF


@dataclass(frozen=True)
class GuardedRows:
    """Rows inside a larger buffer that is poisoned, the rows too until they are written.

    Attributes:
        memory: all of it, uint8.
        rows: uint8 [rows, row_bytes], a view.
    """

    memory: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def make(cls, device: torch.device, count: int, row_bytes: int, *, gap: int = 0, offset: int = 0) -> GuardedRows:
        """Rows `gap` bytes apart, the first at `offset` bytes behind an aligned address."""
        stride = row_bytes + gap
        memory = torch.full((2 * GUARD + offset + count * stride,), POISON, dtype=torch.uint8, device=device)
        return cls(memory, memory.as_strided((count, row_bytes), (stride, 1), GUARD + offset))

    @classmethod
    def of(cls, content: torch.Tensor, device: torch.device, *, gap: int = 0, offset: int = 0) -> GuardedRows:
        """The same with content uint8 [rows, row_bytes]."""
        made = cls.make(device, *content.shape, gap=gap, offset=offset)
        made.rows.copy_(content)
        return made

    def check(self, content: torch.Tensor, what: str) -> None:
        """Fail unless the rows are `content` and everything around them is poison."""
        around = self.memory.clone()
        around.as_strided(self.rows.shape, self.rows.stride(), self.rows.storage_offset()).fill_(POISON)
        assert bool((around == POISON).all()), f"{what}: written outside, at {(around != POISON).nonzero()[0].item()}"
        wrong = (self.rows.cpu() != content).nonzero()
        assert not len(wrong), f"{what}: {len(wrong)} bytes differ, the first at {wrong[0].tolist()}"


@contextmanager
def guarded_outputs() -> Iterator[None]:
    """What `torch.empty` makes in here is poison between guard bands, which are looked at in the end."""
    made: list[torch.Tensor] = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        made.append(torch.full((num_bytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=device))
        return made[-1][GUARD : GUARD + num_bytes].view(dtype).view(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    assert made, "no output was made"
    for memory in made:
        bands = torch.cat([memory[:GUARD], memory[-GUARD:]])
        assert bool((bands == POISON).all()), f"written outside, at {(bands != POISON).nonzero()[0].item()}"


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def far_bytes(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Memory of which a test touches a little: on the CPU only that is really taken."""
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    # MAP_NORESERVE, for which Python 3.11 has no name.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
