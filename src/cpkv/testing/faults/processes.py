"""The worker processes of the harness: started ahead of need, killed, stopped, replaced.

WorkerStock     processes that have imported what they need and wait for their first command
PrefillGroup    ranks that live and die together, and the scheduler's own part of one life: books, handover, connection
DecodeHost      a decode worker that is replaced on the same port
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from cpkv.cache.allocator import PageAllocator
from cpkv.config.settings import EngineSettings
from cpkv.engine.cluster import Cluster
from cpkv.engine.cluster_ranks import ClusterRanks
from cpkv.engine.commands import ConnectDecode, PoisonPages
from cpkv.engine.decode_connection import DecodeConnection
from cpkv.engine.worker import ProcessWorker, WorkerHandle
from cpkv.engine.worker_set import WorkerSet
from cpkv.errors import CpkvError
from cpkv.layout.placement import PagePlacement
from cpkv.protocol.messages import Hello, SenderDescription
from cpkv.protocol.sender import TransferSender
from cpkv.testing.faults.commands import (
    FillPages,
    PageFill,
    ReadState,
    SeededReply,
    StartSeededDecode,
    StartSeededRank,
    StateIs,
)
from cpkv.testing.faults.contents import seeded_description
from cpkv.transfer.handover import Handover

LOG = logging.getLogger(__name__)
START_TIMEOUT_S = 60.0
DECODE = "decode worker"
WORKER_MODULE = "cpkv.testing.faults.worker_main"


def rank_name(rank: int) -> str:
    """How errors call a rank."""
    return f"prefill rank {rank}"


class WorkerStock:
    """Processes that wait for their first command, at most one for each name.

    Args:
        workspace: folder for logs; one folder in it per process.
    """

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        self._started = 0
        self._idle: dict[str, ProcessWorker] = {}
        self.logs: list[Path] = []

    def prepare(self, names: Iterable[str]) -> None:
        """Start what will be needed; nobody waits for it."""
        for name in names:
            if name not in self._idle:
                self._idle[name] = self._start(name)

    def take(self, name: str) -> ProcessWorker:
        """A process, that was prepared or not."""
        return self._idle.pop(name, None) or self._start(name)

    def _start(self, name: str) -> ProcessWorker:
        folder = self._workspace / f"process-{self._started:04}"
        self._started += 1
        folder.mkdir()
        worker = ProcessWorker(name, folder, module=WORKER_MODULE, receives=SeededReply)
        self.logs.append(worker.log)
        return worker

    def close(self) -> None:
        """End those that were never needed."""
        for worker in self._idle.values():
            worker.kill()
            worker.channel.close()
        self._idle.clear()


class DecodeHost:
    """A decode worker, whose processes come and go on one port.

    Args:
        stock: gives processes.
        settings: of the run.
        secret: of the run.
        num_pages: over all `owners`.
        owners: places that its pages are spread over.
        shuffle_seed: for its free pages.
        port: 0 takes a free one, and keeps it.
    """

    def __init__(
        self,
        stock: WorkerStock,
        settings: EngineSettings,
        secret: str,
        num_pages: int,
        owners: int,
        shuffle_seed: int,
        port: int = 0,
    ) -> None:
        self._stock = stock
        self._start_of: Callable[[int], StartSeededDecode] = lambda port: StartSeededDecode(
            settings=settings,
            secret=secret,
            num_pages=num_pages,
            owners=owners,
            port=port,
            shuffle_seed=shuffle_seed,
        )
        self.port = port
        self._set = WorkerSet()
        self.worker = stock.take(DECODE)

    def start(self) -> None:
        """Let a process become the decode worker, the first one or one in place of another.

        Raises:
            CpkvError: why it does not.
        """
        if self.worker.exit_cause() is not None:
            self.worker.kill()
            self.worker.channel.close()
            self.worker = self._stock.take(DECODE)
        self._set = WorkerSet()
        self._set.add(self.worker)
        ready = self._set.call({self.worker: self._start_of(self.port)}, START_TIMEOUT_S)
        self.port = ready[self.worker].port
        LOG.info("decode worker: process %d serves port %d", self.worker.pid, self.port)

    def state(self, timeout_s: float) -> StateIs:
        """How it stands.

        Raises:
            CpkvError: its books are wrong, or it has died.
        """
        reply: StateIs = self._set.call({self.worker: ReadState()}, timeout_s)[self.worker]
        return reply

    def close(self) -> str:
        """End it; how that went wrong, if it did."""
        return close_set(self._set, [self.worker])


class WatchedDecode:
    """The scheduler's connection to the decode worker, with every question and answer in the log.

    Args:
        connection: to it.
        watch: told about each question before it is asked, and again when it was answered.
    """

    def __init__(self, connection: DecodeConnection, watch: Callable[[Any, bool], None]) -> None:
        self._connection = connection
        self._watch = watch

    @property
    def lost(self) -> bool:
        """Whether there is no connection."""
        return self._connection.lost

    def ask(self, question: Any) -> Any:
        """The answer.

        Raises:
            CpkvError: see `DecodeConnection.ask`.
        """
        self._watch(question, False)
        names = ", ".join(getattr(question, "request_ids", None) or (question.request_id,))
        what = f"request {names} attempt {getattr(question, 'attempt', '-')}: {type(question).__name__}"
        try:
            answer = self._connection.ask(question)
        except CpkvError as error:
            LOG.info("%s: %s: %s", what, type(error).__name__, error)
            if not self._connection.lost:
                self._watch(question, True)
            raise
        LOG.info("%s: %s", what, type(answer).__name__)
        self._watch(question, True)
        return answer


class PrefillGroup:
    """One life of a prefill scheduler and its ranks.

    Args:
        stock: gives processes.
        settings: of the run.
        secret: of the run.
        port: of the decode worker.
        instance: the name of this life.
        shuffle_seed: for its free pages, and pauses of its ranks.
        on_end: told when a request has been handed over, or has failed.
        watch: told about questions to the decode worker; see `WatchedDecode`.
    """

    def __init__(
        self,
        stock: WorkerStock,
        settings: EngineSettings,
        secret: str,
        port: int,
        instance: str,
        shuffle_seed: int,
        on_end: Callable[[str, CpkvError | None], None],
        watch: Callable[[Any, bool], None],
    ) -> None:
        self.instance = instance
        self.workers = WorkerSet()
        self.placement = PagePlacement(settings.page_size, settings.cp_size)
        self.allocator = PageAllocator(settings.num_pages, self.placement, shuffle_seed)
        self.processes = [stock.take(rank_name(rank)) for rank in range(settings.cp_size)]
        self.ranks: list[WorkerHandle] = list(self.processes)
        for worker in self.processes:
            self.workers.add(worker)
        sender = SenderDescription(rank=-1, cp_size=settings.cp_size, strategy=settings.cp_strategy, instance=instance)
        self.connection = DecodeConnection(
            settings.host,
            port,
            Hello(seeded_description(settings.page_size, settings.transfer), sender),
            secret=secret,
            timeout_s=settings.transfer_timeout_s,
            workers=self.workers,
            watched=False,
        )
        self.decode = WatchedDecode(self.connection, watch)
        self.handover = Handover(
            TransferSender(wait_s=settings.transfer_timeout_s, progress_s=settings.transfer_timeout_s),
            self.decode,
            ClusterRanks(cast(Cluster, self), self.allocator.pages_of),
            on_end=on_end,
            on_free=self._on_free,
            on_quarantine=self._on_quarantine,
        )
        starts: dict[WorkerHandle, Any] = {
            worker: StartSeededRank(rank, settings, secret, shuffle_seed + rank)
            for rank, worker in enumerate(self.processes)
        }
        self._first_commands = (starts, ConnectDecode(settings.host, port, settings.lease_s, instance))

    def start(self) -> None:
        """Let the processes become ranks.

        Raises:
            CpkvError: the first cause.
        """
        starts, connect = self._first_commands
        self.workers.call(starts, START_TIMEOUT_S)
        self.call_ranks(connect)
        LOG.info("%s: ranks are processes %s", self.instance, [worker.pid for worker in self.processes])

    def call_ranks(self, command: Any) -> dict[WorkerHandle, Any]:
        """Send one command to every rank; replies by worker."""
        return self.workers.call(dict.fromkeys(self.ranks, command))

    def states(self) -> list[tuple[str, StateIs]]:
        """How each rank stands."""
        replies = self.call_ranks(ReadState())
        return [(worker.name, replies[worker]) for worker in self.ranks]

    def fill(self, fills: tuple[PageFill, ...]) -> None:
        """Compute a chunk on every rank."""
        self.call_ranks(FillPages(fills))

    def _on_quarantine(self, request_id: str) -> None:
        LOG.info("request %s: prefill pages in quarantine", request_id)
        self.allocator.quarantine(request_id)

    def _on_free(self, request_id: str) -> None:
        LOG.info("request %s: prefill pages free", request_id)
        self.call_ranks(PoisonPages(self.allocator.reclaim(request_id)))

    def abandon(self, rank: int) -> ProcessWorker:
        """End all but one rank, which is stopped and comes back when nobody counts on it any more."""
        self.connection.close()
        for worker in self.processes:
            if worker is not self.processes[rank]:
                worker.kill()
                worker.channel.close()
        return self.processes[rank]

    def close(self) -> str:
        """End the ranks; how that went wrong, if it did."""
        self.connection.close()
        return close_set(self.workers, self.processes)


def close_set(workers: WorkerSet, processes: list[ProcessWorker]) -> str:
    """End workers that live and die together; in words what went wrong with any that should have ended well."""
    died = [worker for worker in processes if worker.exit_cause() is not None]
    workers.close()
    if died:
        return ""
    return "; ".join(
        str(worker.exit_cause()) for worker in processes if worker.exit_cause() != f"{worker.name} exited with status 0"
    )
