"""One rank process of the GPU layer benchmark: its pages in memory that all ranks have mapped; rank 0 measures.

range of rows     | rank 0: p4 p8 .. | rank 1: p5 p9 .. | rank 2 | rank 3 | tail: current rows |
replicated        | p0 p1 p2 ...                        | the same contents, in memory of rank 0 alone
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_gathers import measure_gathers
from gpu_timing import milliseconds
from paired_ratio import alternate, paired_ratio

from cpkv.comm.gloo import GlooCommunicator
from cpkv.layout.placement import PagePlacement
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.row_format import RowFormat
from cpkv.ops.triton import indexer, sparse_mla
from cpkv.ops.triton.index_keys import store_index_keys, unpack_keys_and_scales
from cpkv.ops.triton.latent_rows import store_rows
from cpkv.ops.triton.pages import position_rows
from cpkv.ops.triton.topk import topk_rows
from cpkv.ops.vendor import deep_gemm, flash_mla
from cpkv.pool.unified_pool import UnifiedPool

PAGE_SIZE = 64
LAYERS, LAYER = 4, 2
TOPK = 2048
BFLOAT_ROWS = RowFormat("bfloat16", kv_lora_rank=512, rope_dim=64, index_dtype="fp8", index_dim=128)
PACKED_ROWS = RowFormat("fp8", kv_lora_rank=512, rope_dim=64, index_dtype="fp8", index_dim=128)
SCALE = 576**-0.5
SECRET = "benchmark"


class Job(NamedTuple):
    """What the ranks do; sizes in tokens and pages over all ranks."""

    cp_size: int
    folder: Path
    queries: int
    history: int
    heads: int
    index_heads: int
    rounds: int
    gather_pages: int


@dataclass
class Inputs:
    """What the projections of the timed rank would give, the same for every view."""

    queries: torch.Tensor
    index_queries: torch.Tensor
    index_weights: torch.Tensor
    arrived_latent: torch.Tensor
    arrived_index: torch.Tensor
    order: torch.Tensor

    @classmethod
    def random(cls, job: Job, device: torch.device) -> Inputs:
        """Rows in the order of a gather from all ranks, `order` being where each belongs."""
        generator = torch.Generator(device).manual_seed(5)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        keys = normal(job.queries, 128).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = (normal(job.queries, 1).abs() + 0.1).view(torch.uint8)
        return cls(
            normal(job.queries, job.heads, 576).to(torch.bfloat16),
            normal(job.queries, job.index_heads, 128).to(torch.float8_e4m3fn),
            normal(job.queries, job.index_heads),
            normal(job.queries, 576).to(torch.bfloat16).view(torch.uint8),
            torch.cat([keys, scales], dim=1),
            torch.randperm(job.queries, device=device, generator=generator),
        )


@dataclass
class Layer:
    """One layer as one view reads it.

    Attributes:
        inputs: of the timed rank.
        rows: uint8 [view rows, 1152] that attention reads.
        position_rows: int32 [history + queries].
        limits: int64 [queries].
        current_rows: uint8 [queries, 1152] where current rows are put first.
        writes: pool rows, latent row numbers, index blocks, block numbers, offsets, and which tokens: what is stored.
        blocks: uint8 index blocks that keys are unpacked from.
        block_numbers: int64, by page position.
        stored_keys: how many keys come from blocks; the others from the current rows.
    """

    inputs: Inputs
    rows: torch.Tensor
    position_rows: torch.Tensor
    limits: torch.Tensor
    current_rows: torch.Tensor
    writes: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    blocks: torch.Tensor
    block_numbers: torch.Tensor
    stored_keys: int

    def __post_init__(self) -> None:
        device, inputs = self.rows.device, self.inputs
        by_vendor = deep_gemm.why_not(device, inputs.index_queries.shape[1], 128) is None
        self._scores_of = deep_gemm.fp8_indexer_scores if by_vendor else indexer.fp8_indexer_scores
        by_vendor = flash_mla.why_not(device, inputs.queries.shape[1], 576, 512) is None
        self._attend = flash_mla.sparse_mla_rows if by_vendor else sparse_mla.sparse_mla_rows
        self._current_index = torch.empty_like(inputs.arrived_index)
        self._keys = torch.empty(len(self.position_rows), 128, dtype=torch.uint8, device=device)
        self._scales = torch.empty(len(self.position_rows), dtype=torch.float32, device=device)

    def store(self) -> None:
        """Current rows to their order, and those that this rank owns to its pages."""
        inputs = self.inputs
        store_rows(self.current_rows, inputs.order, inputs.arrived_latent)
        store_rows(self._current_index, inputs.order, inputs.arrived_index)
        pool_rows, rows, blocks, block_numbers, offsets, tokens = self.writes
        store_rows(pool_rows, rows, self.current_rows[tokens])
        store_index_keys(
            blocks, block_numbers, offsets, self._current_index[tokens], page_size=PAGE_SIZE, key_bytes=128
        )

    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All index keys in position order, and their scales: those of the pages, then the current ones."""
        keys, scales, history = self._keys, self._scales, self.stored_keys
        if history:
            out = keys[:history], scales[:history]
            unpack_keys_and_scales(
                self.blocks, self.block_numbers, tokens=history, page_size=PAGE_SIZE, key_bytes=128, out=out
            )
        if history < len(keys):
            keys[history:] = self._current_index[:, :128]
            scales[history:].unsqueeze(1).view(torch.uint8).copy_(self._current_index[:, 128:])
        return keys.view(torch.float8_e4m3fn), scales

    def scores(self, keys: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Of all keys for all queries."""
        return self._scores_of(self.inputs.index_queries, self.inputs.index_weights, *keys, self.limits)

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and view rows of the best."""
        return topk_rows(scores, self.limits, TOPK, self.position_rows)

    def attend(self, rows: torch.Tensor) -> torch.Tensor:
        """To the chosen rows."""
        latent = self.rows.view(torch.bfloat16)
        return self._attend(self.inputs.queries, latent, rows, scale=SCALE, kv_lora_rank=512)[0]

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole layer: chosen positions and outputs."""
        self.store()
        positions, rows = self.choose(self.scores(self.keys()))
        return positions, self.attend(rows)

    def step_times(self) -> dict[str, float]:
        """Milliseconds of each step alone."""
        keys = self.keys()
        scores = self.scores(keys)
        _, rows = self.choose(scores)
        return {
            "store": milliseconds(self.store),
            "keys": milliseconds(self.keys),
            "scores": milliseconds(lambda: self.scores(keys)),
            "choice": milliseconds(lambda: self.choose(scores)),
            "attention": milliseconds(lambda: self.attend(rows)),
        }


def run_rank(rank: int, job: Job) -> None:
    """A rank process from start to end; rank 0 writes `results.json`."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    comm = GlooCommunicator.join(rank, job.cp_size, job.folder / "rendezvous")
    try:
        formats = {"bfloat16": BFLOAT_ROWS, "packed": PACKED_ROWS}
        pools = [open_pool(rank, job, comm, rows, name, device) for name, rows in formats.items()]
        contents = None
        # One after the other, since each makes the contents of all pages for a moment.
        for turn in range(job.cp_size):
            if turn == rank:
                contents = fill(pools[0], rank, job, keep=rank == 0)
                pools[1].latent.random_(0, 256)
                torch.cuda.synchronize()
            comm.barrier(f"rank {turn} has filled its pages")
        if rank == 0:
            assert contents is not None
            (job.folder / "results.json").write_text(json.dumps(measure(pools, contents, job)), encoding="utf-8")
        comm.barrier("rank 0 has measured")
    finally:
        comm.close()


def open_pool(
    rank: int, job: Job, comm: GlooCommunicator, rows: RowFormat, name: str, device: torch.device
) -> UnifiedPool:
    """This rank's part of a pool that all ranks read."""
    packed = rows is PACKED_ROWS
    pages = job.gather_pages // job.cp_size if packed else -(-num_pages(job) // job.cp_size)
    folder = job.folder / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return UnifiedPool.open(
        PoolGeometry(rows, PAGE_SIZE, tuple(range(2 if packed else LAYERS))),
        pages + 1,
        rank=rank,
        cp_size=job.cp_size,
        chunk_tokens=job.queries,
        secret=SECRET,
        folder=folder,
        fence=lambda label: comm.barrier(label),
        device=device,
    )


def num_pages(job: Job) -> int:
    """Pages of the request."""
    return -(-(job.history + job.queries) // PAGE_SIZE)


def fill(pool: UnifiedPool, rank: int, job: Job, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Write this rank's part of contents that all ranks make alike; all of them, page by page, where they are kept."""
    pages = pool.local_pages * job.cp_size
    device = pool.latent.device
    generator = torch.Generator(device).manual_seed(7)
    latent = torch.randn(pages, *pool.latent.shape[1:3], 576, device=device, generator=generator).to(torch.bfloat16)
    keys = torch.randn(pages, LAYERS, PAGE_SIZE * 128, device=device, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(pages, LAYERS, PAGE_SIZE, device=device, generator=generator) + 0.1
    index = torch.cat([keys.view(torch.uint8), scales.view(torch.uint8)], dim=2)
    latent_bytes = latent.view(torch.uint8)
    pool.latent.copy_(latent_bytes[rank :: job.cp_size])
    pool.index.copy_(index[rank :: job.cp_size])
    return (latent_bytes, index) if keep else None


def measure(pools: list[UnifiedPool], contents: tuple[torch.Tensor, torch.Tensor], job: Job) -> dict[str, Any]:
    """Everything, on rank 0."""
    pool, packed = pools
    inputs = Inputs.random(job, pool.latent.device)
    results: dict[str, Any] = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {job.cp_size} processes, "
        f"{job.queries} queries, {job.history} tokens of history, {job.heads} heads, {job.index_heads} index heads",
        "unified": compare(
            shared_layer(pool, inputs, job, job.history), replicated_layer(contents, inputs, job, job.history), job
        ),
        "current": compare(shared_layer(pool, inputs, job, 0), replicated_layer(contents, inputs, job, 0), job),
    }
    del contents
    return results | measure_gathers(packed, job.gather_pages)


def compare(shared: Layer, replicated: Layer, job: Job) -> dict[str, Any]:
    """Bits first, then times."""
    for name, ours, theirs in zip(("choice", "output"), shared.run(), replicated.run(), strict=True):
        if not torch.equal(ours, theirs) or bool(ours.isnan().any()):
            raise SystemExit(f"the {name} of a shared layer is not that of the replicated one")

    def seconds(layer: Layer) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        layer.run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    for layer in (shared, replicated) * 3:
        seconds(layer)
    ours, theirs = alternate(lambda: seconds(shared), lambda: seconds(replicated), job.rounds)
    return {
        "ms": sorted(ours)[len(ours) // 2] * 1e3,
        "replicated_ms": sorted(theirs)[len(theirs) // 2] * 1e3,
        "ratio": paired_ratio(ours, theirs)._asdict(),
        "steps": shared.step_times(),
        "replicated_steps": replicated.step_times(),
    }


def request_pages(job: Job, history: int, device: torch.device) -> torch.Tensor:
    """Logical pages of a request, scattered."""
    count = -(-(history + job.queries) // PAGE_SIZE)
    generator = torch.Generator().manual_seed(11)
    return (torch.randperm(num_pages(job), generator=generator)[:count] + job.cp_size).to(device)


def limits_of(job: Job, history: int, device: torch.device) -> torch.Tensor:
    """What each query may see."""
    return torch.arange(history + 1, history + job.queries + 1, device=device)


def shared_layer(pool: UnifiedPool, inputs: Inputs, job: Job, history: int) -> Layer:
    """`unified`, or `current` where there is no history."""
    device, geometry = pool.latent.device, pool.geometry
    placement = PagePlacement(PAGE_SIZE, job.cp_size)
    pages = request_pages(job, history, device)
    tokens = torch.arange(history, history + job.queries, device=device)
    token_pages, offsets = pages[tokens // PAGE_SIZE], tokens % PAGE_SIZE
    own = (placement.owner(token_pages) == 0).nonzero().flatten()
    local = placement.local_page(token_pages)[own]
    stored_rows = position_rows(
        pages,
        tokens=history,
        page_size=PAGE_SIZE,
        cp_size=job.cp_size,
        segment_rows=pool.segment_rows,
        page_rows=LAYERS * PAGE_SIZE,
    )
    tail = pool.tail_row + torch.arange(job.queries, device=device, dtype=torch.int32)
    owners = placement.owner(pages)
    # Without history the current rows are read where they are put, which numbers them from 0.
    rows = pool.all_latent_rows(LAYER) if history else torch.empty_like(inputs.arrived_latent)
    return Layer(
        inputs,
        rows,
        torch.cat([stored_rows, tail]) if history else torch.arange(job.queries, device=device, dtype=torch.int32),
        limits_of(job, history, device),
        pool.tail_rows(LAYER, job.queries) if history else rows,
        (
            pool.latent_rows(LAYER),
            geometry.latent_row(local, offsets[own]),
            pool.index_blocks(LAYER),
            geometry.index_block(local),
            offsets[own],
            own,
        ),
        pool.all_index_blocks(LAYER),
        (owners * pool.segment_blocks + geometry.index_block(placement.local_page(pages)))[: history // PAGE_SIZE],
        history,
    )


def replicated_layer(contents: tuple[torch.Tensor, torch.Tensor], inputs: Inputs, job: Job, history: int) -> Layer:
    """A pool with every page, local page = logical page, as a replicated rank has it."""
    latent, index = contents
    device = latent.device
    geometry = PoolGeometry(BFLOAT_ROWS, PAGE_SIZE, tuple(range(LAYERS)))
    rows = latent.view(-1, BFLOAT_ROWS.latent_row_bytes)[LAYER * PAGE_SIZE :]
    blocks = index.view(-1, index.shape[2])[LAYER:]
    pages = request_pages(job, history, device)
    tokens = torch.arange(history, history + job.queries, device=device)
    token_pages, offsets = pages[tokens // PAGE_SIZE], tokens % PAGE_SIZE
    end = history + job.queries
    return Layer(
        inputs,
        rows,
        position_rows(
            pages,
            tokens=end,
            page_size=PAGE_SIZE,
            cp_size=1,
            segment_rows=len(latent) * LAYERS * PAGE_SIZE,
            page_rows=LAYERS * PAGE_SIZE,
        ),
        limits_of(job, history, device),
        torch.empty_like(inputs.arrived_latent),
        (
            rows,
            geometry.latent_row(token_pages, offsets),
            blocks,
            geometry.index_block(token_pages),
            offsets,
            torch.arange(job.queries, device=device),
        ),
        blocks,
        geometry.index_block(pages),
        end,
    )
