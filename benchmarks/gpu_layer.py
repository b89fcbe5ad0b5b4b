"""A DSA attention layer on one GPU, shared against replicated: several rank processes, one timed while the others idle.

    python benchmarks/gpu_layer.py [--cp-size 4] [--queries 4096] [--history 131072] [--rounds 30] [--json out.json]

unified     rows and index blocks of the history are read in the memory of all rank processes, current rows in the tail
current     a chunk without history reads the gathered current rows
replicated  the baseline of both: a pool that holds every page, current rows written there and read back

A layer: put the gathered current rows in place and store the own ones, unpack index keys, scores, choice, attention.
Kernels are the vendors' where they are installed, else ours. Both sides of a ratio run in turn, and give the same bits.
Page gathers read one layer of a page-major pool of packed rows, from local memory and from all ranks' memory.

Exit status 1 when a limit is missed: unified and current at most 1.01 of replicated (95% bounds), gathers at least
0.85 of the rate of a device copy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from gpu_layer_rank import Job, run_rank

MOST_RATIO = 1.01
LEAST_GATHER = 0.85


def missed_limits(results: dict[str, Any]) -> list[str]:
    """What is slower than it may be, in words."""
    missed = []
    for view in ("unified", "current"):
        if results[view]["ratio"]["high"] > MOST_RATIO:
            missed.append(f"{view}: up to {results[view]['ratio']['high']:.3f} of replicated")
    for where, rate in results["gather"].items():
        if rate < LEAST_GATHER * results["copy_bytes_per_second"]:
            missed.append(f"page gather, {where}: {rate / results['copy_bytes_per_second']:.2f} of a device copy")
    return missed


def print_tables(results: dict[str, Any]) -> None:
    """What people read."""
    copy = results["copy_bytes_per_second"]
    print(f"{results['machine']}; a device copy reads and writes {copy / 1e9:.0f} GB/s")
    for view in ("unified", "current"):
        row = results[view]
        ratio = row["ratio"]
        print(
            f"{view}: {row['ms']:.3f} ms, replicated {row['replicated_ms']:.3f} ms; ratio {ratio['middle']:.4f} "
            f"({ratio['low']:.4f} to {ratio['high']:.4f}, {ratio['pairs']} pairs)"
        )
        for side in ("steps", "replicated_steps"):
            total = sum(row[side].values())
            shares = ", ".join(f"{name} {ms:.3f} ({ms / total:.0%})" for name, ms in row[side].items())
            print(f"  {side.replace('_', ' ')}, ms: {shares}")
    for where, rate in results["gather"].items():
        print(f"page gather, {where}: {rate / 1e9:.0f} GB/s read and written, {rate / copy:.2f} of a device copy")


def main() -> None:
    """Run the ranks, print, write; exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp-size", type=int, default=4, help="rank processes on this machine's GPUs")
    parser.add_argument("--queries", type=int, default=4096, help="tokens of the timed rank")
    parser.add_argument("--history", type=int, default=128 << 10, help="tokens of history, a multiple of 64")
    parser.add_argument("--heads", type=int, default=64, help="attention heads")
    parser.add_argument("--index-heads", type=int, default=32, help="heads of the indexer")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of shared and replicated")
    parser.add_argument("--gather-pages", type=int, default=16384, help="pages of a gather, over all ranks")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    with tempfile.TemporaryDirectory(prefix="cpkv-bench-") as folder:
        job = Job(
            options.cp_size,
            Path(folder),
            options.queries,
            options.history,
            options.heads,
            options.index_heads,
            options.rounds,
            options.gather_pages,
        )
        multiprocessing.spawn(run_rank, args=(job,), nprocs=options.cp_size)
        results = json.loads((job.folder / "results.json").read_text(encoding="utf-8"))
    missed = results["missed"] = missed_limits(results)
    print_tables(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
