"""Prefill on the CPU: ours against transformers, and a shared against a replicated current-only chunk.

    python benchmarks/prefill_cpu.py [--json out.json]

Exit status 1 when a limit is missed: 3 times as fast as one-shot, no slower than the best chunk size (geometric means
of the paired ratios), and at most 1.05 for shared over replicated (the upper 95% bound).

Everything is timed in turn in one run; only the ratios mean anything on another machine. What the numbers are made of
(tiny model, L layers, T tokens, H heads, top-k K, width W, index heads I, index dim D):

    scores      L * T^2 / 2 * I * D * 2 operations      every earlier token once per query: the floor of exact DSA
    attention   L * T * K * H * W * 4                   chosen rows only; transformers attends to all T under a mask
    gather      current-only: 0 bytes of pages in either mode, so the floor of the shared ratio is 1
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from paired_ratio import PairedRatio, alternate, paired_ratio
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

from cpkv.comm import ThreadGroup
from cpkv.config import EngineSettings
from cpkv.config.debug import DEBUG_VARIABLE, debug_requested
from cpkv.engine.cluster import Cluster
from cpkv.engine.commands import RunBatch
from cpkv.engine.forward import ForwardPass
from cpkv.layout import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment, choose_view
from cpkv.model.checkpoint import prepare_weights, quiet_transformers, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.model.shape import ModelShape
from cpkv.pool import PagePool
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.views import ViewCounters

TOKENS = 4096
PAGE_SIZE = 64
OUR_CHUNK = 2048
SHARED_CHUNK = 2048
THEIR_CHUNKS = (128, 256, 512, 1024)
ONE_SHOT = "one-shot"
LEAST_SPEEDUP = {ONE_SHOT: 3.0}
MOST_SHARED_OVER_REPLICATED = 1.05


def our_prefill(model: DsaModel, ids: list[int]) -> Callable[[], float]:
    """A function that prefills `ids` at cp_size 1 and returns the seconds it took."""
    placement = PagePlacement(PAGE_SIZE, 1)
    pages = tuple(range(1, 1 + placement.pages_for(len(ids))))
    pool = PagePool(model.shape.geometry(PAGE_SIZE, "float32", "float32"), len(pages) + 1)
    forward = ForwardPass(model, pool, ThreadGroup(1).communicator(0), ViewCounters())

    def run() -> float:
        started = time.perf_counter()
        for number, start in enumerate(range(0, len(ids), OUR_CHUNK)):
            piece = tuple(ids[start : start + OUR_CHUNK])
            segment = Segment("bench", start, piece, pages, start + len(piece) == len(ids))
            forward.run(BatchPlan.build(BatchSpec(number, (segment,), "zigzag", "replicated"), placement, 1))
        return time.perf_counter() - started

    return run


def their_prefill(model: Any, ids: list[int], chunk: int) -> Callable[[], float]:
    """A function that runs transformers' model over `ids` in chunks, last logits only."""
    cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def run() -> float:
        started = time.perf_counter()
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            for start in range(0, len(ids), chunk):
                piece = torch.tensor([ids[start : start + chunk]])
                model(input_ids=piece, use_cache=True, logits_to_keep=1, **{cache_argument: cache})
        return time.perf_counter() - started

    return run


def against_transformers(folder: Path, rounds: int) -> dict[str, Any]:
    """Ours against transformers one-shot and in chunks, each alternated with ours."""
    checkpoint = write_hot_checkpoint(folder / "checkpoint", "glm5", index_heads=4)
    prepared = folder / "weights.safetensors"
    prepare_weights(checkpoint, prepared, torch.float32)
    model = DsaModel.load(read_config(checkpoint), prepared, 1e-6)
    with quiet_transformers():
        transformers_model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rng = random.Random(0)
    ids = [rng.randrange(model.shape.vocab_size) for _ in range(TOKENS)]
    ours = our_prefill(model, ids)
    ours()
    results: dict[str, Any] = {}
    for chunk in (TOKENS, *THEIR_CHUNKS):
        theirs = their_prefill(transformers_model, ids, chunk)
        mine, other = alternate(ours, theirs, rounds)
        name = ONE_SHOT if chunk == TOKENS else f"chunks of {chunk}"
        print(f"timed against transformers, {name}", file=sys.stderr, flush=True)
        results[name] = {
            "ours_s": statistics.median(mine),
            "theirs_s": statistics.median(other),
            "speedup": paired_ratio(other, mine)._asdict(),
        }
    return results


def shared_against_replicated(folder: Path, rounds: int) -> PairedRatio:
    """One current-only chunk on two rank processes, shared against replicated, slowest rank of each."""
    checkpoint = folder / "checkpoint"
    placement = PagePlacement(PAGE_SIZE, 2)
    pages = placement.pages_for(SHARED_CHUNK)
    settings = EngineSettings(
        num_pages=pages + 2, enable_cp_shared_kv=True, cp_size=2, page_size=PAGE_SIZE, chunk_size=SHARED_CHUNK
    )
    rng = random.Random(1)
    ids = tuple(rng.randrange(512) for _ in range(SHARED_CHUNK))
    with Cluster(settings, checkpoint, decode_pages=2) as cluster:

        def chunk(shared: bool) -> float:
            cluster.open_pool(shared)
            first = cluster.placement(shared).reserved_pages
            segment = Segment("bench", 0, ids, tuple(range(first, first + pages)), True)
            view, _ = choose_view([segment], shared=shared, current_reuse=True)
            replies = cluster.call_ranks(RunBatch(BatchSpec(0, (segment,), "zigzag", view)))
            cluster.close_pool()
            return max(reply.seconds for reply in replies.values())

        chunk(True), chunk(False)
        ours, theirs = alternate(lambda: chunk(True), lambda: chunk(False), rounds)
    return paired_ratio(ours, theirs)


def counted_work(shape: ModelShape) -> dict[str, float]:
    """Operations of one prefill of TOKENS tokens, in 10^9, from the sizes alone."""
    width = shape.kv_lora_rank + shape.rope_dim
    chosen = min(shape.topk, TOKENS)
    return {
        "scores_gflop": shape.num_layers * TOKENS**2 / 2 * shape.index_heads * shape.index_dim * 2 / 1e9,
        "sparse_attention_gflop": shape.num_layers * TOKENS * chosen * shape.num_heads * width * 4 / 1e9,
        "dense_attention_gflop": shape.num_layers * TOKENS**2 * shape.num_heads * width * 4 / 1e9,
    }


def print_table(results: dict[str, Any]) -> None:
    """What people read."""
    table = Table(title=f"prefill of {TOKENS} tokens, tiny GLM-5, cp_size 1, {torch.get_num_threads()} threads")
    for column in ("transformers", "ours, s", "theirs, s", "times faster", "95% bounds"):
        table.add_column(column)
    for name, row in results["transformers"].items():
        ratio = row["speedup"]
        bounds = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
        table.add_row(name, f"{row['ours_s']:.2f}", f"{row['theirs_s']:.2f}", f"{ratio['middle']:.2f}", bounds)
    console = Console()
    console.print(table)
    shared = results["shared_over_replicated"]
    console.print(
        f"current-only chunk of {SHARED_CHUNK} tokens, cp_size 2, shared / replicated: {shared['middle']:.3f} "
        f"(95% {shared['low']:.3f} to {shared['high']:.3f}, {shared['pairs']} pairs); floor 1"
    )
    console.print("counted: " + ", ".join(f"{name} {value:.1f}" for name, value in results["work"].items()))


def missed_limits(results: dict[str, Any]) -> list[str]:
    """What is slower than it may be, in words."""
    missed = []
    for name, row in results["transformers"].items():
        least = LEAST_SPEEDUP.get(name, 1.0)
        if row["speedup"]["middle"] < least:
            missed.append(f"{row['speedup']['middle']:.2f} times as fast as transformers {name}, {least:g} wanted")
    high = results["shared_over_replicated"]["high"]
    if high > MOST_SHARED_OVER_REPLICATED:
        missed.append(f"shared over replicated up to {high:.3f}, {MOST_SHARED_OVER_REPLICATED} allowed")
    return missed


def main() -> None:
    """Run, print, write; exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--rounds", type=int, default=5, help="pairs against transformers")
    parser.add_argument("--shared-rounds", type=int, default=40, help="pairs of shared and replicated")
    options = parser.parse_args()
    if debug_requested(os.environ):
        sys.exit(f"{DEBUG_VARIABLE} is set: diagnostics would be timed; unset it")
    with tempfile.TemporaryDirectory(prefix="cpkv-bench-") as name:
        results: dict[str, Any] = {"transformers": against_transformers(Path(name), options.rounds)}
        results["shared_over_replicated"] = shared_against_replicated(Path(name), options.shared_rounds)._asdict()
        results["work"] = counted_work(ModelShape.from_config(read_config(Path(name) / "checkpoint"), 1e-6))
    results["machine"] = {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }
    results["missed"] = missed_limits(results)
    print_table(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if results["missed"]:
        sys.exit("missed: " + "; ".join(results["missed"]))


if __name__ == "__main__":
    main()
