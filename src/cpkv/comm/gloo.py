"""Ranks as processes: torch.distributed over gloo, tensors only, no pickled objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpkv.comm.communicator import Communicator
from cpkv.errors import PlanError, WorkerDiedError


class GlooCommunicator(Communicator):
    """One process's end of a gloo group.

    Args:
        rank: this rank.
        size: ranks of the group.
        group: of torch.distributed; None for the one of all processes.
        prefetch: the same ranks as a second group.
        record: see `Communicator`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Any = None,
        *,
        prefetch: GlooCommunicator | None = None,
        record: bool = False,
    ) -> None:
        super().__init__(rank, size, record=record)
        self._group = group
        self._prefetch = prefetch

    @classmethod
    def join(
        cls, rank: int, size: int, rendezvous: Path, *, timeout_s: float = 120.0, record: bool = False
    ) -> GlooCommunicator:
        """Join the group of this host's rank processes.

        Args:
            rank: this rank.
            size: ranks of the group.
            rendezvous: a file that does not exist yet, the same for every rank; no port is opened for it.
            timeout_s: how long a collective waits for the others.
            record: see `Communicator`.

        Raises:
            WorkerDiedError: the other ranks did not arrive in time.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timeout
            )
            second = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise WorkerDiedError(f"rank {rank} could not join the group of {size} ranks: {error}") from error
        return cls(rank, size, prefetch=cls(rank, size, second, record=record), record=record)

    @property
    def prefetch(self) -> Communicator:
        """The second group."""
        if self._prefetch is None:
            raise PlanError("the prefetch group has no prefetch group of its own")
        return self._prefetch

    def _all_gather(self, tensor: torch.Tensor, label: str, out: torch.Tensor) -> None:
        self._run(label, lambda: dist.all_gather_into_tensor(out.view(-1), tensor.view(-1), group=self._group))

    def _broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        self._run(label, lambda: dist.broadcast(tensor, group=self._group, group_src=source))

    def _all_to_all(
        self,
        sent: torch.Tensor,
        sent_sizes: Sequence[int],
        received: torch.Tensor,
        received_sizes: Sequence[int],
        label: str,
    ) -> None:
        self._run(
            label,
            lambda: dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), group=self._group),
        )

    def _run(self, label: str, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise WorkerDiedError(f"collective {label!r} failed on rank {self.rank}: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
