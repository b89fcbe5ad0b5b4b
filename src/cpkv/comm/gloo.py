"""Ranks as processes: torch.distributed over gloo, tensors only, no pickled objects."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cpkv.comm.communicator import Communicator
from cpkv.errors import WorkerDiedError


class GlooCommunicator(Communicator):
    """One process's end of a gloo group on this host.

    Args:
        rank: this rank.
        size: ranks of the group.
        rendezvous: a file that does not exist yet, the same for every rank; no port is opened for it.
        timeout_s: how long a collective waits for the others.
        record: see `Communicator`.

    Raises:
        WorkerDiedError: the other ranks did not arrive in time.
    """

    def __init__(
        self, rank: int, size: int, rendezvous: Path, *, timeout_s: float = 120.0, record: bool = False
    ) -> None:
        super().__init__(rank, size, record=record)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise WorkerDiedError(f"rank {rank} could not join the group of {size} ranks: {error}") from error

    def _all_gather(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        try:
            dist.all_gather_into_tensor(gathered.view(-1), tensor.view(-1))
        except RuntimeError as error:
            raise WorkerDiedError(f"collective {label!r} failed on rank {self.rank}: {error}") from error
        return gathered

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
