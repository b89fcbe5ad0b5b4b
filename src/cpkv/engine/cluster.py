"""A prefill group and a decode worker of this host, started together, watched together, ended together.

mooncake    4 rank processes (gloo) + 1 decode process, pages over TCP
inprocess   4 rank threads + 1 decode thread, pages copied
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from cpkv.comm.threads import ThreadGroup
from cpkv.config.debug import DEBUG_VARIABLE
from cpkv.config.settings import EngineSettings, check_decode_cp_size, check_settings
from cpkv.engine.commands import (
    ClosePool,
    Command,
    ConnectDecode,
    CountersAre,
    OpenPool,
    PoolOpened,
    ReadCounters,
    RunBatch,
    StartDecode,
    StartRank,
)
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.engine.pool_description import describe_pool
from cpkv.engine.rank_worker import RankWorker
from cpkv.engine.worker import ProcessWorker, ThreadWorker, WorkerHandle
from cpkv.engine.worker_loop import serve_commands
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
from cpkv.pool.sealed_segment import why_not_unified
from cpkv.protocol.messages import Hello, SenderDescription
from cpkv.transfer.channel import Channel, listen
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.inprocess import InProcessBackend, InProcessFabric
from cpkv.transfer.mooncake import MooncakeBackend

LOG = logging.getLogger(__name__)
START_TIMEOUT_S = 180.0
SCHEDULER_RANK = -1
# Commands during which ranks wait for each other.
JOINT = (RunBatch, OpenPool)

Answer = TypeVar("Answer")


class Cluster:
    """Workers and the scheduler's link to the decode worker. A context manager: whatever happens, all workers end.

    Args:
        settings: the same for every worker.
        checkpoint: the model's folder.
        decode_pages: pages of the decode worker's pool, its trash page included.
        decode_port: where the decode worker listens; 0 takes a free port.
        decode_cp_size: must be 1; anything else is refused by the worker.
        shuffle_seed: shuffles the decode worker's free pages; None leaves them in order.

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
    ) -> None:
        check_settings(settings)
        self.settings = settings
        self.shared_placement = PagePlacement(settings.page_size, settings.cp_size)
        local_pages(settings.num_pages, self.shared_placement)
        check_decode_cp_size(decode_cp_size)
        if decode_port:
            listen(settings.host, decode_port).close()
        if settings.debug:
            LOG.warning("%s is on: synchronising diagnostics make every batch slow", DEBUG_VARIABLE)
        self.workers = WorkerSet()
        self._workspace = tempfile.TemporaryDirectory(prefix=f"cpkv-{os.getpid()}-")
        self.workspace = Path(self._workspace.name)
        self._link: DecodeLink | None = None
        self._secret = secrets.token_hex(16)
        self.decode_pages = decode_pages
        self._groups: list[ThreadGroup] = []
        try:
            config = read_config(checkpoint)
            self.shape = ModelShape.from_config(config, settings.latent_norm_eps)
            self.geometry = self.shape.geometry(settings.page_size, settings.stored_latent_dtype, settings.index_dtype)
            prepared = self.workspace / "weights.safetensors"
            self._model = prepare_weights(checkpoint, prepared, torch_dtype(settings.dtype))
            self._start(checkpoint, prepared, decode_pages, decode_port, decode_cp_size, shuffle_seed)
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

    def _start(
        self,
        checkpoint: Path,
        prepared: Path,
        decode_pages: int,
        decode_port: int,
        decode_cp_size: int,
        shuffle_seed: int | None,
    ) -> None:
        settings = self.settings
        in_threads = settings.transfer == "inprocess"
        if not in_threads:
            reason = MooncakeBackend.why_not()
            if reason is not None:
                raise TransferError(reason)
        self.ranks: list[WorkerHandle] = []
        if in_threads:
            self.decode = self._thread_workers()
        else:
            for rank in range(settings.cp_size):
                self.ranks.append(self._watch(ProcessWorker(f"prefill rank {rank}", self.workspace)))
            self.decode = self._watch(ProcessWorker("decode worker", self.workspace))
        threads = max(1, len(os.sched_getaffinity(0)) // settings.cp_size)
        starts: dict[WorkerHandle, Any] = {
            worker: StartRank(
                rank=rank,
                settings=settings,
                checkpoint=str(checkpoint),
                prepared=str(prepared),
                model=self._model,
                secret=self._secret,
                rendezvous=str(self.workspace / "rendezvous"),
                threads=threads,
            )
            for rank, worker in enumerate(self.ranks)
        }
        starts[self.decode] = StartDecode(
            settings=settings,
            checkpoint=str(checkpoint),
            prepared=str(prepared),
            model=self._model,
            secret=self._secret,
            num_pages=decode_pages,
            port=decode_port,
            threads=threads,
            shuffle_seed=shuffle_seed,
            cp_size=decode_cp_size,
        )
        ready = self.workers.call(starts, START_TIMEOUT_S)
        check_equal_facts([ready[worker].facts for worker in self.ranks])
        self.unified_reason = self._why_not_unified([ready[worker].host for worker in self.ranks])
        self.decode_port: int = ready[self.decode].port

    def _why_not_unified(self, hosts: Sequence[str]) -> str | None:
        """Why the ranks' pools are not one range of memory; None when they are.

        Raises:
            ConfigError: it was asked for and cannot be.
        """
        view = self.settings.kv_view
        if not self.settings.enable_cp_shared_kv:
            return "the pool is replicated"
        if view not in ("auto", "unified"):
            return f"the view {view} was forced"
        strangers = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        reason = why_not_unified() if not strangers else f"ranks {strangers} run on another host than rank 0"
        if reason is not None and view == "unified":
            raise ConfigError(f"--kv-view unified was given and the ranks cannot share memory: {reason}; use mixed")
        return reason

    def planner(self, shared: bool) -> ViewPlanner:
        """Chooses the views of a pool."""
        settings = self.settings
        placement = self.placement(shared)
        options = ViewOptions(prefetch=settings.prefetch)
        costs = self.shape.view_costs(self.geometry, settings.compute_item_bytes, options)
        planner = ViewPlanner.of_settings(settings, costs, placement, self.unified_reason)
        if not shared:
            # Replicated pools are read where they lie, with what keys in position order take.
            return replace(planner, scratch_bytes=None)
        if planner.scratch_bytes is not None:
            return planner
        pages = allocatable_pages(local_pages(self.pool_pages(shared), placement), placement)
        return planner.with_scratch_for(min(pages * settings.page_size, self.shape.max_positions), settings.chunk_size)

    def _watch(self, worker: WorkerHandle) -> WorkerHandle:
        self.workers.add(worker)
        return worker

    def _thread_workers(self) -> WorkerHandle:
        """Rank threads in `self.ranks`; returns the decode worker's."""
        size = self.settings.cp_size
        group, fabric = ThreadGroup(size), InProcessFabric()
        self._groups.append(group)

        def serve_rank(rank: int, channel: Channel) -> None:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
            serve_commands(
                channel,
                f"prefill rank {rank}",
                lambda start: RankWorker(start, group.communicator(rank), lambda: InProcessBackend(fabric)),
                on_failure=lambda command, cause: group.abort(rank, cause) if isinstance(command, JOINT) else None,
            )

        for rank in range(size):
            self.ranks.append(self._watch(ThreadWorker(f"prefill rank {rank}", partial(serve_rank, rank), Command)))
        return self._watch(
            ThreadWorker(
                "decode worker",
                lambda channel: serve_commands(
                    channel,
                    "decode worker",
                    lambda start: DecodeWorker(start, InProcessBackend(fabric)),
                    on_failure=lambda command, cause: None,
                ),
                Command,
            )
        )

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
        pages = local_pages(self.pool_pages(shared), self.placement(shared))
        command = OpenPool(
            shared=shared,
            local_pages=pages,
            unified=shared and self.unified_reason is None,
            scratch_bytes=self.planner(shared).scratch_bytes,
        )
        opened: dict[WorkerHandle, PoolOpened] = self.call_ranks(command)
        self.call_ranks(ConnectDecode(self.decode_port))
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
        doing = type(question).__name__
        try:
            if self._link is None or self._link.closed:
                sender = SenderDescription(
                    rank=SCHEDULER_RANK, cp_size=self.settings.cp_size, strategy=self.settings.cp_strategy
                )
                pool = describe_pool(self._model, self.shape, self.geometry, self.settings)
                self._link = DecodeLink(
                    self.settings.host,
                    self.decode_port,
                    Hello(self._secret, pool, sender),
                    timeout_s=self.settings.transfer_timeout_s,
                    watch=lambda: self.workers.check_alive("a question to the decode worker"),
                )
            reply = self._link.ask(question, answer)
        except TransferError:
            if self._link is None or self._link.closed:
                self.workers.check_alive_soon(doing)
            raise
        self.workers.check_alive(doing)
        return reply

    def command_decode(self, command: Any, answer: type[Answer]) -> Answer:
        """Ask the decode worker what only whoever started it may ask."""
        reply = self.workers.call({self.decode: command})[self.decode]
        if not isinstance(reply, answer):
            raise ProtocolError(f"the decode worker answered {type(reply).__name__} to {type(command).__name__}")
        return reply

    def close(self) -> None:
        """End every worker and remove the workspace; calling it twice is harmless."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self.workers.close()
        self._workspace.cleanup()


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
