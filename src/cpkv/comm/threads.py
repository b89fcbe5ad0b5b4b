"""Ranks as threads of one process: a barrier and one slot a rank."""

from __future__ import annotations

import threading

import torch

from cpkv.comm.communicator import Communicator
from cpkv.errors import PlanError, WorkerDiedError


class ThreadGroup:
    """The shared part of a group of threads.

    Args:
        size: ranks of the group.
        timeout_s: how long a rank waits for the others before the group counts as broken.
    """

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._slots: list[tuple[str, torch.Tensor] | None] = [None] * size
        self._cause = ""

    def communicator(self, rank: int, *, record: bool = False) -> ThreadCommunicator:
        """The end of one rank."""
        return ThreadCommunicator(self, rank, record=record)

    def abort(self, rank: int, cause: str) -> None:
        """Break the group: ranks that wait, or will, raise with the first cause."""
        if not self._cause:
            self._cause = f"rank {rank} failed: {cause}"
        self._barrier.abort()

    def exchange(self, rank: int, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put one tensor in this rank's slot and read all of them."""
        self._slots[rank] = (label, tensor)
        self._wait(label)
        slots = [slot for slot in self._slots if slot is not None]
        different = sorted({f"{slot[0]} {tuple(slot[1].shape)} {slot[1].dtype}" for slot in slots})
        gathered = torch.stack([slot[1] for slot in slots]) if len(different) == 1 else None
        self._wait(label)
        if gathered is None:
            raise PlanError(f"the ranks are not in the same collective: {', '.join(different)}")
        return gathered

    def _wait(self, label: str) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            cause = self._cause or "a rank did not arrive in time"
            raise WorkerDiedError(f"collective {label!r} cannot finish: {cause}") from None


class ThreadCommunicator(Communicator):
    """One thread's end of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int, *, record: bool = False) -> None:
        super().__init__(rank, group.size, record=record)
        self._group = group

    def _all_gather(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        return self._group.exchange(self.rank, label, tensor)

    def close(self) -> None:
        """Nothing to release: the group dies with its last user."""
