"""The ranks of the benchmark on several cards: both pools over one model, with synthetic history.

shared       pages of all ranks, mapped by all     | rank 0: p0 p4 .. | rank 1: p1 p5 .. | rank 2 | rank 3 | tail |
replicated   every page, in memory of each rank    | p0 p1 p2 ...                       the same contents
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from view_group import NO_PREFETCH, PAGE_SIZE, chunk_ids, chunk_plan, timed

from cpkv.comm.communicator import Communicator
from cpkv.comm.mailbox import HALVES
from cpkv.config.names import DeviceName, LatentDtype
from cpkv.engine.forward import BatchResult, BatchTrace, ForwardPass
from cpkv.engine.rank_group import MAILBOX_BYTES
from cpkv.layout.plan import BatchPlan
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.view_costs import BatchSizes, ViewCosts, ViewOptions
from cpkv.model.dsa_model import DsaModel
from cpkv.ops.kernels import Kernels
from cpkv.pool.page_pool import PagePool
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.views.counters import ViewCounters
from cpkv.views.scratch import Scratch

SECRET = "benchmark"
FILL_PAGES = 256
# Of a rank, what mailboxes move at once.
PIECE_BYTES = MAILBOX_BYTES // HALVES
# Weights, activations, scores and copies of chosen rows, groups of NCCL, CUDA itself.
WORKING_BYTES = 8 << 30


class Job(NamedTuple):
    """What the ranks do.

    Attributes:
        cp_size: rank processes.
        cards: GPUs that they take in turn; 1 for the CPU.
        device: where pages and model are.
        folder: with checkpoints and weights; sockets and results come here.
        histories: tokens of history, ascending.
        check_history: tokens of history when bits are compared.
        chunk: tokens of a chunk, over all ranks.
        latent_dtype: of stored rows.
        rounds: pairs of a view and `replicated`.
        other_rounds: pairs of `full` and `blocked`, which have no limit.
        least_bytes: moved in one measurement of a rate: the ranks do not start at the same microsecond.
        recall: the recall model's prompt, the answers behind it but for the last.
        answers: what it must say at the end of the prompt and behind each of these.
        started: the clock of the host when the command began.
    """

    cp_size: int
    cards: int
    device: DeviceName
    folder: Path
    histories: tuple[int, ...]
    check_history: int
    chunk: int
    latent_dtype: LatentDtype
    rounds: int
    other_rounds: int
    least_bytes: int
    recall: tuple[int, ...]
    answers: tuple[int, ...]
    started: float

    @property
    def link(self) -> str:
        """What memory of the device moves by between ranks; see `cpkv.engine.rank_group`."""
        if self.device == "cpu":
            return "gloo"
        return "NCCL" if self.cards == self.cp_size else "mailboxes"

    @property
    def piece_bytes(self) -> int | None:
        """Bytes of a rank that an all-gather moves at once; None for all that there are."""
        return PIECE_BYTES if self.link == "mailboxes" else None


@dataclass
class Rank:
    """A rank with its two pools, whose request can have `pages` pages."""

    job: Job
    comm: Communicator
    model: DsaModel
    shared: UnifiedPool
    replicated: PagePool
    pages: int

    def note(self, text: str) -> None:
        """Tell how far the ranks are, on rank 0: a run that is cut short has still told what it measured."""
        if self.comm.rank == 0:
            print(f"{time.time() - self.job.started:4.0f} s  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Let go of both pools: shared memory stays mapped as long as anything holds one."""
        self.settle()
        del self.shared, self.replicated

    @property
    def geometry(self) -> PoolGeometry:
        """Of both pools."""
        return self.shared.geometry

    def pool(self, view: str) -> PagePool:
        """The pool that a view reads."""
        return self.replicated if view == "replicated" else self.shared

    def costs(self, view: str) -> ViewCosts:
        """What a view takes and moves by the planner's formulas."""
        return view_costs(self.model, self.geometry, ViewOptions(prefetch=view != NO_PREFETCH))

    def scratch(self) -> Scratch:
        """A new one, that grows to what it is asked for."""
        return Scratch(device=self.shared.device)

    def plan(self, view: str, history: int, ids: Sequence[int] = ()) -> BatchPlan:
        """One request's chunk behind `history` tokens."""
        return chunk_plan(view, history, tuple(ids) or chunk_ids(self.job.chunk), self.comm.size)

    def settle(self) -> None:
        """Wait for the device."""
        if self.shared.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Run something on every rank at once; the seconds of the slowest, its device's work included."""
        return timed(self.comm, work, self.settle)

    def run(
        self, view: str, history: int, scratch: Scratch, trace: BatchTrace | None = None, ids: Sequence[int] = ()
    ) -> tuple[BatchResult, float, ViewCounters]:
        """One chunk: its result, the seconds of the slowest rank, and what it cost this one."""
        options = self.costs(view).options
        forward = ForwardPass(self.model, self.pool(view), self.comm, ViewCounters(), scratch, options=options)
        plan = self.plan(view, history, ids)
        seconds, result = self.timed(lambda: forward.run(plan, trace))
        return result, seconds, forward.counters

    def everywhere(self, fact: bool, label: str) -> bool:
        """Whether it holds on every rank."""
        return bool(self.comm.all_gather(torch.tensor([fact]), label).all())


def view_costs(model: DsaModel, geometry: PoolGeometry, options: ViewOptions) -> ViewCosts:
    """The planner's formulas for a pool of this model."""
    return model.shape.view_costs(geometry, model.compute_dtype.itemsize, options)


def what_fits(
    comm: Communicator, model: DsaModel, geometry: PoolGeometry, job: Job
) -> tuple[list[int], dict[str, str]]:
    """Histories whose pools and scratch fit the fullest card, and why the others do not, by history."""
    if job.device == "cpu":
        return list(job.histories), {}
    on_card = -(-job.cp_size // job.cards)
    free = torch.tensor([torch.cuda.mem_get_info()[0] // on_card])
    # Nobody takes memory before all have looked.
    least = int(comm.all_gather(free, "free memory").min())
    costs, fitting, skipped = view_costs(model, geometry, ViewOptions()), [], {}
    for history in job.histories:
        pages = -(-(history + job.chunk) // PAGE_SIZE) + 1
        sizes = BatchSizes.even(history + job.chunk, job.chunk, job.cp_size, PAGE_SIZE, costs.options)
        needed = geometry.pool_bytes(pages) + geometry.pool_bytes(-(-pages // job.cp_size) + 1) + WORKING_BYTES
        needed += sum(costs.cost(view, sizes).held_bytes for view in ("mixed", "replicated"))
        if needed <= least:
            fitting.append(history)
        else:
            skipped[str(history)] = f"a rank takes {needed / 2**30:.0f} GiB and can have {least / 2**30:.0f}"
    return fitting, skipped


def open_pools(
    comm: Communicator, model: DsaModel, geometry: PoolGeometry, kernels: Kernels, job: Job, history: int
) -> Rank:
    """Both pools, for a request of `history` tokens and a chunk."""
    pages = -(-(history + job.chunk) // PAGE_SIZE)
    shared = UnifiedPool.open(
        geometry,
        -(-pages // job.cp_size) + 1,
        rank=comm.rank,
        cp_size=job.cp_size,
        chunk_tokens=job.chunk,
        secret=SECRET,
        folder=job.folder,
        fence=lambda label: comm.barrier(label),
        device=model.device,
        kernels=kernels,
    )
    replicated = PagePool(geometry, pages + 1, device=model.device, kernels=kernels)
    return Rank(job, comm, model, shared, replicated, pages)


def fill_history(ours: Rank) -> None:
    """Write the same contents of a page, drawn by its position, to wherever this rank stores it."""
    rank, cp_size = ours.comm.rank, ours.comm.size
    for first in range(0, ours.pages, FILL_PAGES):
        count = min(FILL_PAGES, ours.pages - first)
        own_first = (rank - first) % cp_size
        own = len(range(own_first, count, cp_size))
        local = 1 + (first + own_first) // cp_size
        for contents, replicated, shared in zip(
            page_contents(ours, count, first),
            (ours.replicated.latent, ours.replicated.index),
            (ours.shared.latent, ours.shared.index),
            strict=True,
        ):
            replicated[first + 1 : first + 1 + count] = contents
            shared[local : local + own] = contents[own_first::cp_size]
    ours.settle()
    ours.comm.barrier("the history is there")


def page_contents(ours: Rank, pages: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pages as they are stored: latent uint8 [pages, layers, page_size, row], index [pages, slots, block]."""
    geometry, kernels, device = ours.geometry, ours.shared.kernels, ours.shared.device
    row_format, generator = geometry.row_format, torch.Generator(device).manual_seed(seed)
    values = torch.randn(
        pages * geometry.num_layers * PAGE_SIZE, row_format.latent_width, device=device, generator=generator
    )
    rank = row_format.kv_lora_rank
    latent = kernels.encode_latent_rows(values[:, :rank], values[:, rank:], row_format.latent_dtype)
    slots, width = geometry.num_slots, row_format.index_dim
    keys = kernels.encode_index_keys(
        torch.randn(pages * slots * PAGE_SIZE, width, device=device, generator=generator), "fp8"
    )
    # A block has its keys first and their scales behind.
    index = torch.cat([part.reshape(pages, slots, -1) for part in (keys[:, :width], keys[:, width:])], dim=2)
    return latent.view(pages, geometry.num_layers, PAGE_SIZE, -1), index


def median(values: list[float]) -> float:
    """Of an even number, the larger of the two in the middle."""
    return sorted(values)[len(values) // 2]
