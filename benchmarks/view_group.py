"""One rank process of the view benchmark: three pools over one model, and chunks timed through every view."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from paired_ratio import paired_ratio

from cpkv.comm.communicator import Communicator
from cpkv.comm.gloo import GlooCommunicator
from cpkv.config.names import ViewName
from cpkv.engine.forward import BatchResult, ForwardPass
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.view_costs import BatchSizes, ViewOptions
from cpkv.model.checkpoint import read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.pool.layer_split_pool import LayerSplitPool
from cpkv.pool.page_pool import PagePool
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.views.counters import ViewCounters
from cpkv.views.factory import open_view
from cpkv.views.gathered import MixedView
from cpkv.views.scratch import Scratch
from cpkv.views.view import ViewContext

PAGE_SIZE = 64
CHUNK = 512
# Named in the plan and told apart from `mixed` in the tables: the same view that gathers when a layer is computed.
NO_PREFETCH = "mixed, no prefetch"


class Job(NamedTuple):
    """What the ranks do.

    Attributes:
        cp_size: ranks.
        folder: with checkpoint, weights and, in the end, the results.
        histories: tokens of history of the chunks.
        rounds: pairs per view that must be fast, at the longest histories; short chunks are noisier and get more.
        other_rounds: pairs per view that is only reported.
    """

    cp_size: int
    folder: Path
    histories: tuple[int, ...]
    rounds: int
    other_rounds: int

    def pairs(self, history: int) -> int:
        """Pairs of a view that must be fast."""
        return self.rounds * (3 if history <= 4096 else 2 if history <= 16384 else 1)


@dataclass
class Rank:
    """A rank with its pools: one in shared memory, one with every page, one with every page of some layers."""

    comm: Communicator
    model: DsaModel
    shared: UnifiedPool
    replicated: PagePool
    layer_split: LayerSplitPool
    scratch: Scratch

    def pool(self, view: str) -> PagePool:
        """The pool that a view reads."""
        return {"replicated": self.replicated, "layer-split": self.layer_split}.get(view, self.shared)

    def forward(self, view: str) -> ForwardPass:
        """A forward pass whose counters are those of one chunk."""
        options = ViewOptions(prefetch=view != NO_PREFETCH)
        return ForwardPass(self.model, self.pool(view), self.comm, ViewCounters(), self.scratch, options=options)

    def plan(self, view: str, history: int) -> BatchPlan:
        """One request's chunk behind `history` tokens."""
        return chunk_plan(view, history, chunk_ids(CHUNK), self.comm.size)


def chunk_ids(tokens: int) -> tuple[int, ...]:
    """Ids of a chunk, whatever its history."""
    return tuple(token * 31 % 500 for token in range(tokens))


def chunk_plan(view: str, history: int, ids: tuple[int, ...], cp_size: int) -> BatchPlan:
    """The only request's chunk behind `history` tokens, on the first pages that there are."""
    name: ViewName = "mixed" if view == NO_PREFETCH else view  # type: ignore[assignment]
    placement = PagePlacement(PAGE_SIZE, 1 if view in ("replicated", "layer-split") else cp_size)
    first = placement.reserved_pages
    pages = tuple(range(first, first + placement.pages_for(history + len(ids))))
    spec = BatchSpec(0, (Segment("bench", history, ids, pages, True),), "zigzag", name)
    return BatchPlan.build(spec, placement, cp_size)


def run_rank(rank: int, job: Job) -> None:
    """A rank process from start to end; rank 0 writes `results.json`."""
    torch.set_num_threads(1)
    with joined(rank, job) as ours:
        results = {str(history): measure(ours, history, job) for history in job.histories}
        if rank == 0:
            (job.folder / f"results{job.cp_size}.json").write_text(json.dumps(results), encoding="utf-8")


@contextmanager
def joined(rank: int, job: Job) -> Iterator[Rank]:
    """The group, the model and the pools with their synthetic history."""
    comm = GlooCommunicator.join(rank, job.cp_size, job.folder / f"rendezvous{job.cp_size}")
    try:
        model = DsaModel.load(read_config(job.folder / "checkpoint"), job.folder / "weights.safetensors", 1e-6)
        geometry = model.shape.geometry(PAGE_SIZE, "float32", "float32")
        pages = -(-(max(job.histories) + CHUNK) // PAGE_SIZE)
        shared = UnifiedPool.open(
            geometry,
            -(-pages // job.cp_size) + 1,
            rank=rank,
            cp_size=job.cp_size,
            chunk_tokens=CHUNK,
            secret="benchmark",
            folder=job.folder,
            fence=comm.barrier,
        )
        replicated = PagePool(geometry, pages + 1)
        layer_split = LayerSplitPool(geometry, pages + 1, rank, job.cp_size)
        fill_history(shared, replicated, layer_split, pages, rank, job.cp_size)
        yield Rank(comm, model, shared, replicated, layer_split, Scratch())
    finally:
        comm.close()


def fill_history(
    shared: PagePool, replicated: PagePool, layer_split: LayerSplitPool, pages: int, rank: int, cp_size: int
) -> None:
    """Write the same values of a page, drawn by its position, to wherever this rank stores it."""
    own = layer_split.layers[rank]
    for position in range(pages):
        generator = torch.Generator().manual_seed(position)
        latent, index = (
            torch.randn(memory[0].numel() // 4, generator=generator).view(torch.uint8).view_as(memory[0])
            for memory in (replicated.latent, replicated.index)
        )
        replicated.latent[position + 1], replicated.index[position + 1] = latent, index
        page = cp_size + position
        if page % cp_size == rank:
            shared.latent[page // cp_size], shared.index[page // cp_size] = latent, index
        layer_split.latent[position + 1] = latent[own.start : own.stop]
        layer_split.index[position + 1] = index[own.start : own.stop]


def measure(ours: Rank, history: int, job: Job) -> dict[str, Any]:
    """Every view against `replicated`, in turn, and the gather against the raw collective."""
    fast = ["current", "unified"] if history == 0 else ["unified"]
    slow = ["mixed", NO_PREFETCH, "full", "layer-split"] + (["blocked"] if history else [])
    results: dict[str, Any] = {}
    expected, _, _ = run_chunk(ours, "replicated", history)
    for view in fast + slow:
        rounds = job.pairs(history) if view in fast else job.other_rounds
        run_chunk(ours, view, history)
        mine, theirs = [], []
        for number in range(rounds):
            for name in (view, "replicated") if number % 2 else ("replicated", view):
                result, seconds, counters = run_chunk(ours, name, history)
                (mine if name == view else theirs).append(seconds)
                check_equal(result, expected, name)
                if name == view:
                    cost = counters
        results[view] = {
            "seconds": sum(mine) / len(mine),
            "ratio": paired_ratio(mine, theirs)._asdict(),
            "moved_bytes": cost.moved_bytes,
            "planned_bytes": planned_bytes(ours, view, history),
            "scratch_bytes": cost.scratch_bytes,
            "gather_seconds": cost.gather_seconds,
            "wait_seconds": cost.wait_seconds,
        }
    if history:
        results["gather"] = measure_gather(ours, history, job.rounds)
    return results


def run_chunk(ours: Rank, view: str, history: int) -> tuple[BatchResult, float, ViewCounters]:
    """One chunk: its result, the seconds of the slowest rank, and what it cost."""
    forward, plan = ours.forward(view), ours.plan(view, history)
    seconds, result = timed(ours.comm, lambda: forward.run(plan))
    return result, seconds, forward.counters


def timed(comm: Communicator, work: Callable[[], Any], settle: Callable[[], None] = lambda: None) -> tuple[float, Any]:
    """Run something on every rank at once; the seconds of the slowest, `settle` (wait for the device) included."""
    settle()
    comm.barrier("start")
    started = time.perf_counter()
    result = work()
    settle()
    seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    return float(comm.all_gather(seconds, "seconds").max()), result


def check_equal(result: BatchResult, expected: BatchResult, view: str) -> None:
    """A view that computes something else is not worth timing."""
    for name, logits in expected.last_logits.items():
        if not torch.equal(logits, result.last_logits[name]):
            raise SystemExit(f"{view}: the logits are not those of the replicated view")


def planned_bytes(ours: Rank, view: str, history: int) -> int:
    """What the planner expects a view to move."""
    plan = ours.plan(view, history)
    pool, options = ours.pool(view), ViewOptions(prefetch=view != NO_PREFETCH)
    costs = ours.model.shape.view_costs(pool.model_geometry, 4, options)
    return costs.cost(plan.spec.view, BatchSizes.of(plan, options)).moved_bytes


def measure_gather(ours: Rank, history: int, rounds: int) -> dict[str, Any]:
    """All layers' history, nothing computed: collected and gathered, against the bare collective on as many bytes."""
    options = ViewOptions(prefetch=False)
    costs = ours.model.shape.view_costs(ours.shared.geometry, 4, options)
    context = ViewContext(ours.shared, ours.comm, costs, ours.scratch, ViewCounters())
    view = open_view(ours.plan("mixed", history), context)
    assert isinstance(view, MixedView)
    geometry, pages = ours.shared.geometry, view.plan.history.max_pages
    sizes = [
        pages * block
        for layer in range(geometry.num_layers)
        for block in [geometry.page_size * geometry.row_format.latent_row_bytes]
        + [geometry.index_block_bytes] * (geometry.slots[layer] >= 0)
    ]
    out = torch.empty(ours.comm.size, max(sizes), dtype=torch.uint8)
    flat = out.view(-1)

    def ours_once() -> None:
        for layer in range(geometry.num_layers):
            view.gather.open_layer(layer)

    def raw_once() -> None:
        for size in sizes:
            target = flat[: ours.comm.size * size].view(ours.comm.size, size)
            ours.comm.all_gather(target[ours.comm.rank], "raw", out=target)

    mine, raw = [], []
    for number in range(2 * rounds):
        for work, seconds in ((ours_once, mine), (raw_once, raw))[:: 1 if number % 2 else -1]:
            seconds.append(timed(ours.comm, work)[0])
    view.close()
    moved = ours.comm.size * sum(sizes)
    return {
        "bytes": moved,
        "bytes_per_second": moved * len(mine) / sum(mine),
        "ratio": paired_ratio(raw, mine)._asdict(),
    }
