"""A prefill group and a decode worker of this host, started together, watched together, ended together.

mooncake    4 rank processes (gloo) + 1 decode process, pages over TCP
inprocess   4 rank threads + 1 decode thread, pages copied
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from cpkv.config.debug import DEBUG_VARIABLE
from cpkv.config.settings import EngineSettings, check_decode_cp_size, check_settings
from cpkv.engine.commands import (
    ClosePool,
    ConnectDecode,
    CountersAre,
    OpenPool,
    PoolOpened,
    ReadCounters,
    StartDecode,
    StartRank,
    WorkerReady,
)
from cpkv.engine.decode_connection import DecodeConnection
from cpkv.engine.pool_description import describe_pool
from cpkv.engine.thread_workers import start_thread_workers
from cpkv.engine.worker import ProcessWorker, WorkerHandle
from cpkv.engine.worker_set import WorkerSet
from cpkv.errors import ConfigError, ProtocolError, TransferError
from cpkv.layout.capacity import allocatable_pages
from cpkv.layout.placement import PagePlacement
from cpkv.layout.planner import ViewPlanner
from cpkv.layout.pool_geometry import local_pages
from cpkv.layout.view_costs import ViewOptions
from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.shape import ModelShape
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.protocol.messages import Hello, SenderDescription
from cpkv.protocol.sealing import check_secret
from cpkv.transfer.backends import why_not
from cpkv.transfer.channel import listen

LOG = logging.getLogger(__name__)
START_TIMEOUT_S = 180.0
SCHEDULER_RANK = -1

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RemoteDecode:
    """A decode worker that somebody else started, and the secret that it shares with its prefill groups."""

    host: str
    port: int
    secret: str


class Cluster:
    """Workers and the scheduler's link to the decode worker. A context manager: whatever happens, all workers end.

    Args:
        settings: the same for every worker.
        checkpoint: the model's folder.
        decode_pages: pages of the decode worker's pool, its trash page included.
        decode_port: where the decode worker listens; 0 takes a free port.
        decode_cp_size: must be 1; anything else is refused by the worker.
        shuffle_seed: shuffles the decode worker's free pages; None leaves them in order.
        remote_decode: a decode worker that runs elsewhere, in place of one that is started here.

    Raises:
        CpkvError: settings, checkpoint, back end or port do not work; nothing is left running.
    """

    def __init__(
        self,
        settings: EngineSettings,
        checkpoint: Path,
        *,
        decode_pages: int,
        decode_port: int = 0,
        decode_cp_size: int = 1,
        shuffle_seed: int | None = None,
        remote_decode: RemoteDecode | None = None,
    ) -> None:
        check_settings(settings)
        self.settings = settings
        self.shared_placement = PagePlacement(settings.page_size, settings.cp_size)
        local_pages(settings.num_pages, self.shared_placement)
        check_decode_cp_size(decode_cp_size)
        if remote_decode is not None:
            _check_remote(settings, remote_decode)
        elif decode_port:
            listen(settings.host, decode_port).close()
        if settings.debug:
            LOG.warning("%s is on: synchronising diagnostics make every batch slow", DEBUG_VARIABLE)
        self.workers = WorkerSet()
        self._workspace = tempfile.TemporaryDirectory(prefix=f"cpkv-{os.getpid()}-")
        self.workspace = Path(self._workspace.name)
        self._connection: DecodeConnection | None = None
        self._remote_decode = remote_decode
        self._secret = secrets.token_hex(16) if remote_decode is None else remote_decode.secret
        self.decode_address = ("", 0) if remote_decode is None else (remote_decode.host, remote_decode.port)
        self.instance = secrets.token_hex(8)
        self.decode_pages = decode_pages
        try:
            config = read_config(checkpoint)
            self.shape = ModelShape.from_config(config, settings.latent_norm_eps)
            self.geometry = self.shape.geometry(settings.page_size, settings.stored_latent_dtype, settings.index_dtype)
            prepared = self.workspace / "weights.safetensors"
            self._model = prepare_weights(checkpoint, prepared, torch_dtype(settings.dtype))
            self._start(
                checkpoint,
                lambda weights, threads: StartDecode(
                    settings=settings,
                    checkpoint=str(checkpoint),
                    prepared=weights,
                    model=self._model,
                    secret=self._secret,
                    num_pages=decode_pages,
                    port=decode_port,
                    threads=threads,
                    shuffle_seed=shuffle_seed,
                    cp_size=decode_cp_size,
                ),
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """The cluster itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all workers."""
        self.close()

    def _start_processes(self) -> tuple[list[WorkerHandle], WorkerHandle | None]:
        """Ranks, and the decode worker unless it runs elsewhere; each is watched from its first moment on."""
        reason = why_not(self.settings.transfer)
        if reason is not None:
            raise TransferError(reason)
        ranks: list[WorkerHandle] = []
        for rank in range(self.settings.cp_size):
            ranks.append(ProcessWorker(f"prefill rank {rank}", self.workspace))
            self.workers.add(ranks[-1])
        if self._remote_decode is not None:
            return ranks, None
        decode = ProcessWorker("decode worker", self.workspace)
        self.workers.add(decode)
        return ranks, decode

    def _start_threads(self) -> tuple[list[WorkerHandle], WorkerHandle | None]:
        started = start_thread_workers(self.settings.cp_size)
        for worker in (*started.ranks, started.decode):
            self.workers.add(worker)
        return list(started.ranks), started.decode

    def _start(self, checkpoint: Path, start_decode: Callable[[str, int], StartDecode]) -> None:
        settings = self.settings
        in_threads = settings.transfer == "inprocess"
        self.ranks, self._decode = self._start_threads() if in_threads else self._start_processes()
        threads = max(1, len(os.sched_getaffinity(0)) // settings.cp_size)
        prepared = str(self.workspace / "weights.safetensors")
        starts: dict[WorkerHandle, Any] = {
            worker: StartRank(
                rank=rank,
                settings=settings,
                checkpoint=str(checkpoint),
                prepared=prepared,
                model=self._model,
                secret=self._secret,
                rendezvous=str(self.workspace / "rendezvous"),
                threads=threads,
            )
            for rank, worker in enumerate(self.ranks)
        }
        if self._decode is not None:
            starts[self._decode] = start_decode(prepared, threads)
        ready = self.workers.call(starts, START_TIMEOUT_S)
        check_equal_facts([ready[worker].facts for worker in self.ranks])
        self.unified_reason = self._why_not_unified([ready[worker] for worker in self.ranks])
        self._linked = len({ready[worker].device for worker in self.ranks}) > 1
        if self._decode is not None:
            self.decode_address = (settings.host, ready[self._decode].port)

    def _why_not_unified(self, ready: Sequence[WorkerReady]) -> str | None:
        """Why the ranks' pools are not one range of memory; None when they are.

        Raises:
            ConfigError: it was asked for and cannot be.
        """
        view = self.settings.kv_view
        if not self.settings.enable_cp_shared_kv:
            return "the pool is replicated"
        if view not in ("auto", "unified"):
            return f"the view {view} was forced"
        reason = next((rank.unified_reason for rank in ready if rank.unified_reason is not None), None)
        strangers = [rank for rank, theirs in enumerate(ready) if theirs.host != ready[0].host]
        if strangers:
            reason = f"ranks {strangers} run on another host than rank 0"
        if reason is not None and view == "unified":
            raise ConfigError(f"--kv-view unified was given and the ranks cannot share memory: {reason}; use mixed")
        return reason

    @property
    def decode_runs_elsewhere(self) -> bool:
        """Whether somebody else started the decode worker."""
        return self._remote_decode is not None

    def planner(self, shared: bool) -> ViewPlanner:
        """Chooses the views of a pool."""
        settings = self.settings
        placement = self.placement(shared)
        options = ViewOptions(prefetch=settings.prefetch)
        costs = self.shape.view_costs(self.geometry, settings.compute_item_bytes, options)
        planner = ViewPlanner.of_settings(settings, costs, placement, self.unified_reason, linked=self._linked)
        if not shared:
            # Replicated pools are read where they lie, with what keys in position order take.
            return replace(planner, scratch_bytes=None)
        if planner.scratch_bytes is not None:
            return planner
        pages = allocatable_pages(local_pages(self.pool_pages(shared), placement), placement)
        return planner.with_scratch_for(min(pages * settings.page_size, self.shape.max_positions), settings.chunk_size)

    def placement(self, shared: bool) -> PagePlacement:
        """Of the prefill pool: over the ranks, or every page on every rank."""
        return self.shared_placement if shared else PagePlacement(self.settings.page_size, 1)

    def pool_pages(self, shared: bool) -> int:
        """Logical pages of the prefill pool, reserved ones included; both modes can allocate the same number."""
        settings = self.settings
        return settings.num_pages if shared else settings.num_pages - settings.cp_size + 1

    def open_pool(self, shared: bool) -> int:
        """Make every rank's pool and connect it to the decode worker; returns the bytes of one rank.

        Raises:
            ConfigError: a shared pool is asked for without the flag.
        """
        if shared and not self.settings.enable_cp_shared_kv:
            raise ConfigError(
                "a shared pool was asked for, and enable_cp_shared_kv is off; turn it on in the settings, or ask for "
                "the replicated pool"
            )
        # Drawn for each pool, so that nothing that is late from another run is taken for this one's.
        self.instance = secrets.token_hex(8)
        self._disconnect()
        pages = local_pages(self.pool_pages(shared), self.placement(shared))
        command = OpenPool(
            shared=shared,
            local_pages=pages,
            unified=shared and self.unified_reason is None,
            scratch_bytes=self.planner(shared).scratch_bytes,
        )
        opened: dict[WorkerHandle, PoolOpened] = self.call_ranks(command)
        connection = self.decode_connection
        self.call_ranks(ConnectDecode(*self.decode_address, connection.lease_s, self.instance))
        return next(iter(opened.values())).allocated_bytes

    def close_pool(self) -> None:
        """Free every rank's pool, once no write can read it."""
        self.call_ranks(ClosePool())

    def call_ranks(self, command: Any) -> dict[WorkerHandle, Any]:
        """Send one command to every rank; replies by worker."""
        return self.workers.call(dict.fromkeys(self.ranks, command))

    def counters(self) -> list[CountersAre]:
        """The view counters by rank."""
        replies = self.call_ranks(ReadCounters())
        return [replies[worker] for worker in self.ranks]

    def ask_decode(self, question: Any, answer: type[Answer]) -> Answer:
        """Ask the decode worker.

        Raises:
            WorkerDiedError: a worker has ended.
            CpkvError: what it reported.
        """
        reply = self.decode_connection.ask(question)
        assert isinstance(reply, answer)
        return reply

    @property
    def decode_connection(self) -> DecodeConnection:
        """Of the scheduler, to the decode worker."""
        if self._connection is None:
            settings = self.settings
            sender = SenderDescription(
                rank=SCHEDULER_RANK, cp_size=settings.cp_size, strategy=settings.cp_strategy, instance=self.instance
            )
            self._connection = DecodeConnection(
                *self.decode_address,
                Hello(describe_pool(self._model, self.shape, self.geometry, settings), sender),
                secret=self._secret,
                timeout_s=settings.transfer_timeout_s,
                workers=self.workers,
                watched=not self.decode_runs_elsewhere,
            )
        return self._connection

    def command_decode(self, command: Any, answer: type[Answer]) -> Answer:
        """Ask the decode worker what only whoever started it may ask."""
        if self._decode is None:
            raise ConfigError(f"the decode worker runs elsewhere and takes no {type(command).__name__} from here")
        reply = self.workers.call({self._decode: command})[self._decode]
        if not isinstance(reply, answer):
            raise ProtocolError(f"the decode worker answered {type(reply).__name__} to {type(command).__name__}")
        return reply

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """End every worker and remove the workspace; calling it twice is harmless."""
        self._disconnect()
        self.workers.close()
        self._workspace.cleanup()


def _check_remote(settings: EngineSettings, remote: RemoteDecode) -> None:
    """Refuse what a decode worker elsewhere cannot do.

    Raises:
        ConfigError: ranks that are threads, or no secret although it is not on this host.
    """
    if settings.transfer == "inprocess":
        raise ConfigError(
            "--transfer inprocess moves pages between threads of one process, and the decode worker runs elsewhere; "
            "give --transfer mooncake or tcp"
        )
    check_secret(remote.host, remote.secret)


def check_equal_facts(facts: Sequence[dict[str, str]]) -> None:
    """Refuse ranks that were configured differently.

    Raises:
        ConfigError: naming the fact, the ranks and both values.
    """
    for rank, theirs in enumerate(facts):
        for name, value in facts[0].items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"rank {rank} has {name} {theirs.get(name)} and rank 0 has {value}; "
                    "start every rank with the same settings and software"
                )
