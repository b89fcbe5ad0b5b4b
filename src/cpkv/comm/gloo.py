"""Ranks as processes: torch.distributed, tensors only, no pickled objects.

memory of the host    gloo
memory of a GPU       NCCL where every rank has a GPU of its own, else gloo by way of the host
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpkv.comm.communicator import Communicator
from cpkv.errors import WorkerDiedError


class GlooCommunicator(Communicator):
    """One process's end of a gloo group.

    Args:
        rank: this rank.
        size: ranks of the group.
        group: of torch.distributed; None for the one of all processes.
        prefetch: the same ranks as a second group.
        nccl: the group moves memory of GPUs by NCCL.
        record: see `Communicator`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Any = None,
        *,
        prefetch: GlooCommunicator | None = None,
        nccl: bool = False,
        record: bool = False,
    ) -> None:
        super().__init__(rank, size, prefetch=prefetch, record=record)
        self._group = group
        self._nccl = nccl

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        rendezvous: Path,
        *,
        timeout_s: float = 120.0,
        nccl: bool = False,
        record: bool = False,
    ) -> GlooCommunicator:
        """Join the group of this host's rank processes.

        Args:
            rank: this rank.
            size: ranks of the group.
            rendezvous: a file that does not exist yet, the same for every rank; no port is opened for it.
            timeout_s: how long a collective waits for the others.
            nccl: every rank has a GPU of its own, which is its current device: move memory of GPUs by NCCL.
            record: see `Communicator`.

        Raises:
            WorkerDiedError: the other ranks did not arrive in time.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        try:
            dist.init_process_group(
                backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timeout
            )
            second = dist.new_group(backend=backend, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise WorkerDiedError(f"rank {rank} could not join the group of {size} ranks: {error}") from error
        prefetch = cls(rank, size, second, nccl=nccl, record=record)
        return cls(rank, size, prefetch=prefetch, nccl=nccl, record=record)

    def _all_gather(self, tensor: torch.Tensor, label: str, out: torch.Tensor) -> None:
        sent, arrives = self._near(tensor), self._near(out)
        self._run(label, lambda: dist.all_gather_into_tensor(arrives.view(-1), sent.view(-1), group=self._group))
        _bring(arrives, out)

    def _broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        moved = self._near(tensor)
        self._run(label, lambda: dist.broadcast(moved, group=self._group, group_src=source))
        _bring(moved, tensor)

    def _all_to_all(
        self,
        sent: torch.Tensor,
        sent_sizes: Sequence[int],
        received: torch.Tensor,
        received_sizes: Sequence[int],
        label: str,
    ) -> None:
        near, arrives = self._near(sent), self._near(received)
        self._run(
            label,
            lambda: dist.all_to_all_single(arrives, near, list(received_sizes), list(sent_sizes), group=self._group),
        )
        _bring(arrives, received)

    def _near(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that the group can move: the tensor's own, or a copy in memory of the host."""
        return tensor.cpu() if tensor.is_cuda and not self._nccl else tensor

    def _run(self, label: str, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise WorkerDiedError(f"collective {label!r} failed on rank {self.rank}: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _bring(arrived: torch.Tensor, out: torch.Tensor) -> None:
    """Put what arrived in memory of the host where it was wanted."""
    if arrived.device != out.device:
        out.copy_(arrived)
