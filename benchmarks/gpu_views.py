"""FlashMLA's sparse prefill over views against a plain tensor, on one GPU: what reading in place costs the kernel.

    python benchmarks/gpu_views.py [--cp-size 4] [--queries 4096] [--history 131072] [--rounds 60] [--json out.json]

plain       the rows of one layer in position order, a contiguous tensor [tokens, 576]
page-major  one layer of a pool that holds every page, pages scattered
unified     the memory of all rank processes, mapped side by side; one process reads while the others idle

The same chosen tokens, mapped to rows of each; outputs are equal bit for bit. Plain and view run in turn, from CUDA
graphs and with cold caches. Scores are not measured here: DeepGEMM reads keys that are unpacked into the same tensors
for every view, so that its input does not differ.

Exit status 1 when the lower 95% bound of time on plain / time on a view is under 0.98.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from gpu_graphs import GraphTimer
from gpu_layer_rank import BFLOAT_ROWS, LAYER, LAYERS, PAGE_SIZE, SCALE, TOPK, Job, fill, open_pool, request_pages
from paired_ratio import alternate, paired_ratio

from cpkv.comm.gloo import GlooCommunicator
from cpkv.ops.triton.pages import position_rows
from cpkv.ops.vendor import flash_mla
from cpkv.pool.unified_pool import UnifiedPool

LEAST_RATIO = 0.98
QUERIES_AT_A_TIME = 256


def run_rank(rank: int, job: Job) -> None:
    """A rank process from start to end; rank 0 writes `results.json`."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    comm = GlooCommunicator.join(rank, job.cp_size, job.folder / "rendezvous")
    try:
        pool = open_pool(rank, job, comm, BFLOAT_ROWS, "bfloat16", device)
        contents = None
        # One after the other, since each makes the contents of all pages for a moment.
        for turn in range(job.cp_size):
            if turn == rank:
                contents = fill(pool, rank, job, keep=rank == 0)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            comm.barrier(f"rank {turn} has filled its pages")
        if rank == 0:
            assert contents is not None
            (job.folder / "results.json").write_text(json.dumps(measure(pool, contents[0], job)), encoding="utf-8")
        comm.barrier("rank 0 has measured")
    finally:
        comm.close()


def measure(pool: UnifiedPool, pages: torch.Tensor, job: Job) -> dict[str, Any]:
    """Both views beside the plain tensor.

    Args:
        pool: rows of all ranks.
        pages: uint8 [logical pages, layers, page_size, 1152], the same contents in one pool.
        job: the sizes.
    """
    device = pages.device
    generator = torch.Generator(device).manual_seed(3)
    queries = torch.randn(job.queries, job.heads, 576, device=device, generator=generator).to(torch.bfloat16)
    positions = chosen_positions(job, generator)
    timer = GraphTimer()

    def attention(stored: torch.Tensor, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        latent = stored.view(torch.bfloat16)
        return lambda: flash_mla.sparse_mla_rows(queries, latent, rows, scale=SCALE, kv_lora_rank=512)[0]

    numbers = request_pages(job, job.history, device)[: job.history // PAGE_SIZE]
    on_plain = attention(pages[numbers, LAYER].flatten(0, 1), positions.to(torch.int32))
    wanted, plain_seconds = on_plain(), timer.record(on_plain)
    results = {}
    for name, (stored, rows) in views(pool, pages, numbers, job).items():
        on_view = attention(stored, rows[positions])
        found = on_view()
        if not torch.equal(found, wanted) or bool(found.isnan().any()):
            raise SystemExit(f"{name}: the output is not that on the plain tensor")
        plain_times, view_times = alternate(plain_seconds, timer.record(on_view), job.rounds)
        results[name] = {
            "plain_ms": sorted(plain_times)[job.rounds // 2] * 1e3,
            "view_ms": sorted(view_times)[job.rounds // 2] * 1e3,
            "ratio": paired_ratio(plain_times, view_times)._asdict(),
        }
    machine = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {job.cp_size} processes, {job.queries} queries, "
        f"{job.heads} heads, {TOPK} of {job.history} tokens, page-major pools of {LAYERS} layers"
    )
    return {"machine": machine, "views": results}


def views(
    pool: UnifiedPool, pages: torch.Tensor, numbers: torch.Tensor, job: Job
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By name: rows uint8 [view rows, 1152], and the row int32 [history] of every position."""
    shape = {"tokens": job.history, "page_size": PAGE_SIZE, "page_rows": LAYERS * PAGE_SIZE}
    every_page = pages.view(-1, BFLOAT_ROWS.latent_row_bytes)
    return {
        "page-major": (
            every_page[LAYER * PAGE_SIZE :],
            position_rows(numbers, cp_size=1, segment_rows=len(every_page), **shape),
        ),
        "unified": (
            pool.all_latent_rows(LAYER),
            position_rows(numbers, cp_size=job.cp_size, segment_rows=pool.segment_rows, **shape),
        ),
    }


def chosen_positions(job: Job, generator: torch.Generator) -> torch.Tensor:
    """Distinct positions for each query, ascending as a choice has them; int64 [queries, TOPK]."""
    parts = []
    # A few queries at a time, since each draws a number per token.
    for first in range(0, job.queries, QUERIES_AT_A_TIME):
        count = min(QUERIES_AT_A_TIME, job.queries - first)
        drawn = torch.rand(count, job.history, device=generator.device, generator=generator)
        parts.append(drawn.topk(TOPK).indices.sort().values)
    return torch.cat(parts)


def print_table(results: dict[str, Any]) -> list[str]:
    """What people read; returns what is slower than it may be, in words."""
    print(results["machine"])
    missed = []
    for name, row in results["views"].items():
        ratio = row["ratio"]
        print(
            f"{name}: {row['view_ms']:.3f} ms, plain {row['plain_ms']:.3f} ms; plain / view {ratio['middle']:.4f} "
            f"({ratio['low']:.4f} to {ratio['high']:.4f}, {ratio['pairs']} pairs)"
        )
        if ratio["low"] < LEAST_RATIO:
            missed.append(f"{name}: plain / view perhaps only {ratio['low']:.4f}")
    return missed


def main() -> None:
    """Run the ranks, print, write; exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp-size", type=int, default=4, help="rank processes on this machine's GPUs")
    parser.add_argument("--queries", type=int, default=4096, help="queries of the timed rank")
    parser.add_argument("--history", type=int, default=128 << 10, help="tokens, a multiple of 64, at least 2048")
    parser.add_argument("--heads", type=int, default=64, help="attention heads, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=60, help="pairs of plain and view")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    if reason := flash_mla.why_not(torch.device("cuda"), options.heads, 576, 512):
        sys.exit(f"FlashMLA cannot run: {reason}")
    with tempfile.TemporaryDirectory(prefix="cpkv-bench-") as folder:
        # The sizes of what is not measured here are 0.
        job = Job(options.cp_size, Path(folder), options.queries, options.history, options.heads, 0, options.rounds, 0)
        multiprocessing.spawn(run_rank, args=(job,), nprocs=options.cp_size)
        results = json.loads((job.folder / "results.json").read_text(encoding="utf-8"))
    missed = results["missed"] = print_table(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
