"""Ranks as threads of one process: a barrier and one slot a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from cpkv.comm.communicator import Communicator, settle
from cpkv.errors import PlanError, WorkerDiedError


class _Offer(NamedTuple):
    """What a rank brings to a collective: what it thinks it is, and a tensor."""

    call: str
    tensor: torch.Tensor
    sizes: tuple[int, ...] = ()


class _MeetingPoint:
    """Where the ranks of one group meet, one collective at a time."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.offers: list[_Offer | None] = [None] * size


class ThreadGroup:
    """The shared part of a group of threads.

    Args:
        size: ranks of the group.
        timeout_s: how long a rank waits for the others before the group counts as broken.
    """

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        self.size = size
        self._main = _MeetingPoint(size, timeout_s)
        self._prefetch = _MeetingPoint(size, timeout_s)
        self._cause = ""

    def communicator(self, rank: int, *, record: bool = False) -> ThreadCommunicator:
        """The end of one rank."""
        prefetch = ThreadCommunicator(self, self._prefetch, rank, record=record)
        return ThreadCommunicator(self, self._main, rank, record=record, prefetch=prefetch)

    def abort(self, rank: int, cause: str) -> None:
        """Break the group: ranks that wait, or will, raise with the first cause."""
        if not self._cause:
            self._cause = f"rank {rank} failed: {cause}"
        self._main.barrier.abort()
        self._prefetch.barrier.abort()

    def meet(
        self, point: _MeetingPoint, rank: int, label: str, offer: _Offer, take: Callable[[list[_Offer]], None]
    ) -> None:
        """Wait for everyone's offer, let this rank take what it wants, and wait until all have taken.

        Raises:
            PlanError: the ranks are not in the same collective.
            WorkerDiedError: the group is broken.
        """
        point.offers[rank] = offer
        self._wait(point, label)
        offers = [other for other in point.offers if other is not None]
        different = sorted({other.call for other in offers})
        if len(different) == 1:
            take(offers)
        self._wait(point, label)
        if len(different) > 1:
            raise PlanError(f"the ranks are not in the same collective: {', '.join(different)}")

    def _wait(self, point: _MeetingPoint, label: str) -> None:
        try:
            point.barrier.wait()
        except threading.BrokenBarrierError:
            cause = self._cause or "a rank did not arrive in time"
            raise WorkerDiedError(f"collective {label!r} cannot finish: {cause}") from None


class ThreadCommunicator(Communicator):
    """One thread's end of a `ThreadGroup`."""

    def __init__(
        self,
        group: ThreadGroup,
        point: _MeetingPoint,
        rank: int,
        *,
        record: bool = False,
        prefetch: ThreadCommunicator | None = None,
    ) -> None:
        super().__init__(rank, group.size, prefetch=prefetch, record=record)
        self._group = group
        self._point = point

    def _all_gather(self, tensor: torch.Tensor, label: str, out: torch.Tensor) -> None:
        def take(offers: list[_Offer]) -> None:
            for rank, offer in enumerate(offers):
                # The own slot may be the very tensor that the others are reading.
                if rank != self.rank or out[rank].data_ptr() != tensor.data_ptr():
                    out[rank].copy_(offer.tensor)

        self._meet(label, _Offer(f"{label} {tuple(tensor.shape)} {tensor.dtype}", tensor), take)

    def _broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        def take(offers: list[_Offer]) -> None:
            if self.rank != source:
                tensor.copy_(offers[source].tensor)

        self._meet(label, _Offer(f"{label} from {source} {tuple(tensor.shape)} {tensor.dtype}", tensor), take)

    def _all_to_all(
        self,
        sent: torch.Tensor,
        sent_sizes: Sequence[int],
        received: torch.Tensor,
        received_sizes: Sequence[int],
        label: str,
    ) -> None:
        def take(offers: list[_Offer]) -> None:
            first = 0
            for offer, size in zip(offers, received_sizes, strict=True):
                their_first = sum(offer.sizes[: self.rank])
                received[first : first + size] = offer.tensor[their_first : their_first + offer.sizes[self.rank]]
                first += size

        self._meet(label, _Offer(f"{label} {tuple(sent.shape[1:])} {sent.dtype}", sent, tuple(sent_sizes)), take)

    def _meet(self, label: str, offer: _Offer, take: Callable[[list[_Offer]], None]) -> None:
        def take_and_settle(offers: list[_Offer]) -> None:
            take(offers)
            settle(offer.tensor)

        settle(offer.tensor)
        self._group.meet(self._point, self.rank, label, offer, take_and_settle)

    def close(self) -> None:
        """Nothing to release: the group dies with its last user."""
