"""A prefill group inside one test: ranks as threads, recorded collectives, poisoned pools, no sockets.

ranks = ThreadedRanks(model, geometry, cp_size=4, shared=True, num_pages=64)
result = ranks.prefill({"a": ids, "b": more_ids}, chunk_size=100, strategy="zigzag")
result.logits["a"]        [tokens, vocab] every position          result.choices["a"][layer]   [tokens, topk]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.comm.communicator import Collective
from cpkv.comm.threads import ThreadGroup
from cpkv.config.names import KvView, SplitStrategy
from cpkv.engine.forward import BatchTrace, ForwardPass
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.planner import ViewPlanner
from cpkv.layout.pool_geometry import PoolGeometry, local_pages
from cpkv.layout.schedule import next_batch
from cpkv.layout.view_costs import ViewCost, ViewOptions
from cpkv.model.dsa_model import DsaModel
from cpkv.ops.kernels import Kernels
from cpkv.pool.page_pool import PagePool
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.views.counters import ViewCounters
from cpkv.views.scratch import Scratch

Result = TypeVar("Result")
MAX_CHUNK = 4096


def run_on_ranks(group: ThreadGroup, function: Callable[[int], Result]) -> list[Result]:
    """Call `function(rank)` in one thread a rank and return the results by rank.

    Raises:
        BaseException: the first one that a rank raised; the others are released from their collectives.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            group.abort(rank, str(error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(group.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(group.size)]


@dataclass
class PrefillTrace:
    """What a prefill computed, by request.

    Attributes:
        logits: [tokens, vocab_size] of every prompt position.
        choices: layer -> int64 [tokens, topk] chosen positions, -1 padded.
        last_logits: as the engine reports them.
        pages: logical pages by position.
        specs: the batches, in order.
        costs: what the planner expected of each.
    """

    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    choices: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    last_logits: dict[str, torch.Tensor] = field(default_factory=dict)
    pages: dict[str, tuple[int, ...]] = field(default_factory=dict)
    specs: list[BatchSpec] = field(default_factory=list)
    costs: list[ViewCost] = field(default_factory=list)


class ThreadedRanks:
    """Ranks with their pools, as threads of the calling process.

    Args:
        model: shared by all ranks; it is only read.
        geometry: of the pools.
        cp_size: ranks.
        shared: one copy over the ranks, or every page on every rank.
        unified: folder in which the ranks share the memory of their pools; None for memory of their own.
        num_pages: logical pages, reserved ones included; a multiple of cp_size.
        shuffle_seed: of the allocator; pages are never handed out in order.
        poison: fill pools, and the scratch of every batch, with NaN bytes first.
        options: how views work.
        scratch_bytes: see `ViewPlanner`.
        kernels: of the device that the model is on; plain torch when left out.
    """

    def __init__(
        self,
        model: DsaModel,
        geometry: PoolGeometry,
        *,
        cp_size: int,
        shared: bool,
        num_pages: int,
        shuffle_seed: int | None = 7,
        poison: bool = True,
        unified: Path | None = None,
        options: ViewOptions | None = None,
        scratch_bytes: int | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.cp_size = cp_size
        self.shared = shared
        self.placement = PagePlacement(geometry.page_size, cp_size if shared else 1)
        self.allocator = PageAllocator(num_pages, self.placement, shuffle_seed=shuffle_seed)
        self.group = ThreadGroup(cp_size)
        self.comms = [self.group.communicator(rank, record=True) for rank in range(cp_size)]
        self.counters = [ViewCounters() for _ in range(cp_size)]
        pages = local_pages(num_pages, self.placement)
        self.pools = self._open_pools(geometry, pages, unified, poison, model.device, kernels)
        self.scratches = [Scratch(scratch_bytes, poison=poison, device=model.device) for _ in range(cp_size)]
        self.planner = ViewPlanner(
            costs=model.shape.view_costs(geometry, model.compute_dtype.itemsize, options or ViewOptions()),
            placement=self.placement,
            cp_size=cp_size,
            strategy="zigzag",
            unified_reason=None if unified is not None else "these pools are in memory of their own",
            scratch_bytes=scratch_bytes,
        )
        self._passes = [
            ForwardPass(
                model,
                self.pools[rank],
                self.comms[rank],
                self.counters[rank],
                self.scratches[rank],
                options=options,
            )
            for rank in range(cp_size)
        ]

    def _open_pools(
        self,
        geometry: PoolGeometry,
        pages: int,
        unified: Path | None,
        poison: bool,
        device: torch.device,
        kernels: Kernels | None,
    ) -> list[PagePool]:
        if unified is None:
            make = partial(PagePool, geometry, pages, poison=poison, device=device, kernels=kernels)
            return [make() for _ in range(self.cp_size)]
        return run_on_ranks(
            self.group,
            lambda rank: UnifiedPool.open(
                geometry,
                pages,
                rank=rank,
                cp_size=self.cp_size,
                chunk_tokens=MAX_CHUNK,
                secret="secret",
                folder=unified,
                fence=self.comms[rank].barrier,
                poison=poison,
                device=device,
                kernels=kernels,
            ),
        )

    @property
    def sequences(self) -> list[list[Collective]]:
        """The collectives of each rank so far; they must be equal."""
        return [comm.sequence or [] for comm in self.comms]

    def run(self, spec: BatchSpec) -> tuple[BatchPlan, list[BatchTrace], dict[str, torch.Tensor]]:
        """Run one batch on all ranks; traces by rank, and the last logits of whichever rank has them."""
        plan = BatchPlan.build(spec, self.placement, self.cp_size)
        traces = [BatchTrace(want_logits=True, want_choices=True) for _ in range(self.cp_size)]
        last = run_on_ranks(self.group, lambda rank: self._passes[rank].run(plan, traces[rank]).last_logits)
        return plan, traces, {name: values for by_rank in last for name, values in by_rank.items()}

    def prefill(
        self,
        prompts: Mapping[str, Sequence[int]],
        *,
        chunk_size: int,
        strategy: SplitStrategy = "zigzag",
        current_reuse: bool = True,
        view: KvView = "auto",
    ) -> PrefillTrace:
        """Prefill prompts in chunks, first come first served; pages stay allocated."""
        planner = replace(self.planner, strategy=strategy, current_reuse=current_reuse, forced=view)
        names = list(prompts)
        result = PrefillTrace()
        for name in names:
            result.pages[name] = self.allocator.allocate(name, self.placement.pages_for(len(prompts[name])))
        done = dict.fromkeys(names, 0)
        while pieces := next_batch([(done[name], len(prompts[name])) for name in names], chunk_size):
            segments = []
            for piece in pieces:
                name = names[piece.request]
                ids = tuple(prompts[name][piece.start : piece.end])
                last = piece.end == len(prompts[name])
                segments.append(Segment(name, piece.start, ids, result.pages[name], last))
                done[name] = piece.end
            chosen = planner.choose(segments)
            spec = BatchSpec(len(result.specs), tuple(segments), strategy, chosen.view)
            result.costs.append(chosen.cost)
            plan, traces, last_logits = self.run(spec)
            result.specs.append(spec)
            result.last_logits |= last_logits
            self._collect(plan, traces, result, {name: len(prompts[name]) for name in names})
        return result

    def _collect(
        self, plan: BatchPlan, traces: list[BatchTrace], result: PrefillTrace, lengths: dict[str, int]
    ) -> None:
        for rank, trace in enumerate(traces):
            local = plan.local_tokens(rank)
            for number, first, last in local.runs:
                name = plan.spec.segments[number].request_id
                positions = torch.from_numpy(local.positions[first:last])
                assert trace.logits is not None
                rows = trace.logits[first:last]
                logits = result.logits.setdefault(name, rows.new_full((lengths[name], rows.shape[1]), float("nan")))
                logits[positions] = rows
                for layer, chosen in trace.choices.items():
                    by_layer = result.choices.setdefault(name, {})
                    table = by_layer.setdefault(layer, chosen.new_full((lengths[name], chosen.shape[1]), -1))
                    table[positions] = chosen[first:last]
