"""One prefill rank: its model, its pages, its end of the group. Acts on commands, one at a time."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors.torch import save_file

from cpkv.comm.communicator import Communicator
from cpkv.engine.commands import (
    BatchDone,
    ClosePool,
    ConnectDecode,
    CountersAre,
    OpenPool,
    PoisonPages,
    PoolOpened,
    ReadCounters,
    ReadNews,
    RunBatch,
    SendPages,
    StartRank,
    StopPages,
    Trace,
    WorkerReady,
)
from cpkv.engine.devices import model_kernels
from cpkv.engine.diagnostics import Diagnostics
from cpkv.engine.forward import BatchTrace, ForwardPass
from cpkv.engine.pool_description import describe_pool
from cpkv.engine.rank_transfers import RankTransfers
from cpkv.engine.tensors import tensor_bytes
from cpkv.errors import PlanError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan
from cpkv.layout.view_costs import ViewOptions
from cpkv.model.checkpoint import read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.pool.page_pool import PagePool
from cpkv.pool.sealed_segment import host_identity, why_not_unified
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.pool.vmm_memory import why_not_vmm
from cpkv.protocol.messages import Done, Hello, SenderDescription
from cpkv.transfer.backend import TransferBackend
from cpkv.views.counters import ViewCounters
from cpkv.views.scratch import Scratch

Part = TypeVar("Part")


class RankWorker:
    """A rank after `StartRank`.

    Args:
        start: who to be.
        comm: this rank's end of the group.
        device: where its model and pages are.
        make_backend: makes the transfer back end; called once, when the decode worker is known.
    """

    def __init__(
        self,
        start: StartRank,
        comm: Communicator,
        device: torch.device,
        make_backend: Callable[[], TransferBackend],
    ) -> None:
        self._start = start
        self._settings = start.settings
        self._rank = start.rank
        self._comm = comm
        config = read_config(Path(start.checkpoint))
        settings = start.settings
        self._device = device
        self._model = DsaModel.load(config, Path(start.prepared), settings.latent_norm_eps, device)
        self._kernels = model_kernels(self._model.shape, settings, device)
        self._geometry = self._model.shape.geometry(
            settings.page_size, settings.stored_latent_dtype, settings.index_dtype
        )
        self._placement = PagePlacement(settings.page_size, settings.cp_size)
        self._counters = ViewCounters()
        self._pool: PagePool | None = None
        self._forward: ForwardPass | None = None
        self._diagnostics: Diagnostics | None = None
        self._transfers = RankTransfers(
            start.rank,
            make_backend,
            secret=start.secret,
            timeout_s=settings.transfer_timeout_s,
            digest_pages=settings.verify_transfer or settings.debug,
        )

    def ready(self) -> WorkerReady:
        """What every rank must agree on."""
        facts = {name: str(getattr(self._settings, name)) for name in self._settings.__struct_fields__} | {
            "model": self._start.model,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "threads": str(torch.get_num_threads()),
            "kernels used": self._kernels.name,
        }
        reason = why_not_unified() if self._device.type == "cpu" else why_not_vmm(self._device)
        return WorkerReady(facts, host=host_identity(), device=str(self._device), unified_reason=reason)

    def handle(self, command: Any) -> Any:
        """Act on a command and return the reply.

        Raises:
            CpkvError: whatever went wrong.
        """
        handlers: dict[type, Callable[[Any], Any]] = {
            OpenPool: self._open_pool,
            ClosePool: self._close_pool,
            ConnectDecode: self._connect_decode,
            RunBatch: self._run_batch,
            SendPages: self._transfers.send,
            StopPages: self._transfers.stop,
            ReadNews: self._transfers.news,
            PoisonPages: self._poison_pages,
            ReadCounters: self._read_counters,
        }
        if type(command) not in handlers:
            raise PlanError(f"rank {self._rank} cannot act on {type(command).__name__}")
        return handlers[type(command)](command)

    def _open_pool(self, command: OpenPool) -> PoolOpened:
        if self._pool is not None:
            raise PlanError(f"rank {self._rank} still has a pool; close it before another is opened")
        self._placement = PagePlacement(self._settings.page_size, self._settings.cp_size if command.shared else 1)
        self._pool = self._make_pool(command)
        self._counters = ViewCounters()
        debug = self._settings.debug
        self._diagnostics = Diagnostics(self._pool, self._comm, self._model.shape.topk) if debug else None
        self._forward = ForwardPass(
            self._model,
            self._pool,
            self._comm,
            self._counters,
            Scratch(command.scratch_bytes, poison=debug, device=self._device),
            options=ViewOptions(prefetch=self._settings.prefetch),
            diagnostics=self._diagnostics,
        )
        return PoolOpened(self._pool.allocated_bytes)

    def _make_pool(self, command: OpenPool) -> PagePool:
        settings = self._settings
        if not command.unified:
            return PagePool(
                self._geometry,
                command.local_pages,
                poison=settings.debug,
                device=self._device,
                kernels=self._kernels,
            )
        return UnifiedPool.open(
            self._geometry,
            command.local_pages,
            rank=self._rank,
            cp_size=settings.cp_size,
            chunk_tokens=settings.chunk_size,
            secret=self._start.secret,
            folder=Path(self._start.rendezvous).parent,
            fence=lambda label: self._comm.barrier(label),
            poison=settings.debug,
            device=self._device,
            kernels=self._kernels,
        )

    def _close_pool(self, command: ClosePool) -> Done:
        self._transfers.disconnect()
        self._pool = self._forward = self._diagnostics = None
        return Done()

    def _connect_decode(self, command: ConnectDecode) -> Done:
        hello = Hello(
            describe_pool(self._start.model, self._model.shape, self._geometry, self._settings),
            SenderDescription(
                rank=self._rank,
                cp_size=self._settings.cp_size,
                strategy=self._settings.cp_strategy,
                instance=command.instance,
            ),
        )
        self._transfers.connect(command, hello, self._open(self._pool), self._placement)
        return Done()

    def _run_batch(self, command: RunBatch) -> BatchDone:
        started = time.perf_counter()
        plan = BatchPlan.build(command.spec, self._placement, self._settings.cp_size)
        trace = None
        if command.trace is not None:
            trace = BatchTrace(command.trace.want_logits, command.trace.want_choices)
        result = self._open(self._forward).run(plan, trace)
        if trace is not None and command.trace is not None:
            self._write_trace(plan, trace, command.trace)
        logits = {request_id: tensor_bytes(values) for request_id, values in result.last_logits.items()}
        return BatchDone(logits, _as_message(result.cost), time.perf_counter() - started)

    def _write_trace(self, plan: BatchPlan, trace: BatchTrace, request: Trace) -> None:
        local = plan.local_tokens(self._rank)
        tensors = {
            "positions": torch.from_numpy(local.positions),
            "segments": torch.from_numpy(plan.segment_of_token[local.packed]),
        }
        if trace.logits is not None:
            tensors["logits"] = trace.logits
        tensors |= {f"choices.{layer}": chosen.to(torch.int32) for layer, chosen in trace.choices.items()}
        path = Path(request.folder) / f"batch{plan.spec.batch_number}-rank{self._rank}.safetensors"
        names = msgspec.json.encode([segment.request_id for segment in plan.spec.segments]).decode()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"requests": names})

    def _poison_pages(self, command: PoisonPages) -> Done:
        shared = self._placement.cp_size > 1
        own = [
            self._placement.local_page(page)
            for page in command.pages
            if not shared or self._placement.owner(page) == self._rank
        ]
        self._open(self._pool).poison(own)
        if self._diagnostics is not None:
            self._diagnostics.forget(own)
        return Done()

    def _read_counters(self, command: ReadCounters) -> CountersAre:
        return _as_message(self._counters)

    def _open(self, part: Part | None) -> Part:
        if part is None:
            raise PlanError(f"rank {self._rank} was asked before its pool was opened and connected")
        return part

    def close(self) -> None:
        """Release everything; calling it twice is harmless."""
        self._transfers.close()
        # Shared memory stays mapped as long as anything holds a pool.
        self._pool = self._forward = self._diagnostics = None
        self._comm.close()


def _as_message(counters: ViewCounters) -> CountersAre:
    return CountersAre(**dataclasses.asdict(counters))
