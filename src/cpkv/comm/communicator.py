"""The collectives that cpkv uses, and the record of their sequence."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cpkv.errors import PlanError


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
        prefetch: the same ranks as a second group, so that gathers ahead of time never mix with the collectives of a
            layer; None for that group itself.
        record: keep the sequence of collectives in `sequence`; for tests and for diagnostics.
    """

    def __init__(self, rank: int, size: int, *, prefetch: Communicator | None = None, record: bool = False) -> None:
        self.rank = rank
        self.size = size
        self._prefetch = prefetch
        self.sequence: list[Collective] | None = [] if record else None

    @property
    def prefetch(self) -> Communicator:
        """The second group."""
        if self._prefetch is None:
            raise PlanError("the prefetch group has no prefetch group of its own")
        return self._prefetch

    def all_gather(self, tensor: torch.Tensor, label: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather one tensor from every rank.

        Args:
            tensor: this rank's contribution, contiguous, of the same shape on every rank. It may be `out[rank]`.
            label: what is gathered, for the record and for errors.
            out: [size, *tensor.shape] contiguous, where to put the result; made when left out.

        Returns:
            [size, *tensor.shape], rank by rank.
        """
        self._note("all_gather", label, tensor)
        if out is None:
            if self.size == 1:
                return tensor.unsqueeze(0)
            out = tensor.new_empty(self.size, *tensor.shape)
        if self.size == 1:
            _copy_unless_there(out[0], tensor)
            return out
        self._all_gather(tensor, label, out)
        return out

    def barrier(self, label: str) -> None:
        """Wait until every rank has come here."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8), label)

    def broadcast(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        """Overwrite `tensor`, contiguous, on every rank with that of rank `source`; returns it."""
        self._note(f"broadcast from {source}", label, tensor)
        if self.size > 1:
            self._broadcast(tensor, source, label)
        return tensor

    def all_to_all(
        self,
        sent: torch.Tensor,
        sent_sizes: Sequence[int],
        received: torch.Tensor,
        received_sizes: Sequence[int],
        label: str,
    ) -> None:
        """Send a part of `sent` to each rank and receive a part of `received` from each.

        Every rank must know that its sizes and those of the others fit together; they are not compared here.

        Args:
            sent: [sum of sent_sizes, ...] contiguous, the part for rank 0 first.
            sent_sizes: rows for each rank.
            received: [sum of received_sizes, ...] contiguous, the part from rank 0 first.
            received_sizes: rows from each rank.
            label: what is exchanged.
        """
        # The sizes differ between the ranks, so the record holds the shape of one row.
        self._note("all_to_all", label, sent[:0])
        if self.size == 1:
            received.copy_(sent)
        else:
            self._all_to_all(sent, sent_sizes, received, received_sizes, label)

    def _note(self, kind: str, label: str, tensor: torch.Tensor) -> None:
        if self.sequence is not None:
            self.sequence.append(Collective(kind, label, tuple(tensor.shape), str(tensor.dtype)))

    @abc.abstractmethod
    def _all_gather(self, tensor: torch.Tensor, label: str, out: torch.Tensor) -> None:
        """Gather over a group of two or more ranks."""

    @abc.abstractmethod
    def _broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        """Broadcast over a group of two or more ranks."""

    @abc.abstractmethod
    def _all_to_all(
        self,
        sent: torch.Tensor,
        sent_sizes: Sequence[int],
        received: torch.Tensor,
        received_sizes: Sequence[int],
        label: str,
    ) -> None:
        """Exchange over a group of two or more ranks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group; calling it twice is harmless."""


def settle(tensor: torch.Tensor) -> None:
    """Wait until the device of a tensor has done what this thread gave it: other ranks may read and write then."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _copy_unless_there(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
