"""The collectives that cpkv uses, and the record of their sequence."""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch


class Collective(NamedTuple):
    """One collective as a rank saw it. The sequences of all ranks must be equal."""

    kind: str
    label: str
    shape: tuple[int, ...]
    dtype: str


class Communicator(abc.ABC):
    """One rank's end of a group. Every rank calls the same methods in the same order with equal shapes.

    Args:
        rank: this rank.
        size: ranks of the group.
        record: keep the sequence of collectives in `sequence`; for tests and for diagnostics.
    """

    def __init__(self, rank: int, size: int, *, record: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.sequence: list[Collective] | None = [] if record else None

    def all_gather(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """Gather one tensor from every rank.

        Args:
            tensor: this rank's contribution, contiguous, of the same shape on every rank.
            label: what is gathered, for the record and for errors.

        Returns:
            [size, *tensor.shape], rank by rank.
        """
        if self.sequence is not None:
            self.sequence.append(Collective("all_gather", label, tuple(tensor.shape), str(tensor.dtype)))
        if self.size == 1:
            return tensor.unsqueeze(0)
        return self._all_gather(tensor, label)

    @abc.abstractmethod
    def _all_gather(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """Gather over a group of two or more ranks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group; calling it twice is harmless."""
