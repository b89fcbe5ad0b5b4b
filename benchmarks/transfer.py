"""What a transfer of pages costs beside the bare transfer engine, for every back end that runs here.

    python benchmarks/transfer.py [--json out.json] [--quick]

pages / raw     4 sender processes, 1 receiver process, scattered pages to scattered pages. Pages: page senders in their
                threads, reports to the receiver's server, until each is taken. Raw: the same runs handed to the same
                engines by the same processes, with the same number outstanding, and waited for. The ceiling is 1.
                By CPU time: the same ratio of CPU seconds of all five processes, which other load disturbs less.
layer-major     a run per page, layer and pool in place of one per page and pool, raw, on the same bytes.
overlap         the engine with 2 ranks: from the last chunk to the first decoded token, with the pages of finished
                chunks sent meanwhile and without.

The two sides of each ratio run in turn in one group of processes. Exit status 1 when a limit is missed:

    pages / raw                at least 0.9 of the rate (lower 95% bound of the paired ratio)
    descriptors                at most 1 per page and pool, before any are merged
    bytes at the receiver      as many as the pages have, each once; contents are compared in the first round
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from transfer_overlap import CP_SIZE, WIDE_ROWS, Prompt, measure_overlap
from transfer_processes import LAYERS, SENDERS
from transfer_rounds import Sizes, measure

from cpkv.config.debug import DEBUG_VARIABLE, debug_requested
from cpkv.config.names import TransferName
from cpkv.testing.checkpoints import TinyShape, write_hot_checkpoint
from cpkv.transfer.backends import why_not

LEAST_RATE = 0.9
# Latent bytes of a page of 61 layers, and the tokens that it holds then.
PAGE_SIZES = {"64 KiB": (64 << 10, 1), "256 KiB": (256 << 10, 4), "1 MiB": (1 << 20, 16), "4 MiB": (4 << 20, 64)}
BACKENDS: tuple[TransferName, ...] = tuple(name for name in get_args(TransferName) if name != "inprocess")
QUICK_SIZES = Sizes(round_bytes=16 << 20, rounds=2, layer_rounds=2, layer_runs=1000)
QUICK_PROMPT = Prompt(tokens=512, chunk=128, rounds=2)


def measure_transfers(backends: list[TransferName], pages: list[str], sizes: Sizes) -> dict[str, Any]:
    """Every back end that can run, at every page size; the reason for those that cannot."""
    results: dict[str, Any] = {}
    for backend in backends:
        reason = why_not(backend)
        if reason is not None:
            results[backend] = {"why_not": reason}
            continue
        results[backend] = {}
        for name in pages:
            print(f"measuring {backend}, pages of {name}", file=sys.stderr, flush=True)
            results[backend][name] = measure(backend, *PAGE_SIZES[name], sizes)
    return results


def measure_overlaps(backends: list[TransferName], shape: TinyShape, prompt: Prompt) -> dict[str, Any]:
    """The engine at each back end that can run."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cpkv-bench-") as folder:
        checkpoint = write_hot_checkpoint(Path(folder) / "checkpoint", "glm5", shape=shape)
        for backend in backends:
            reason = None if backend == "inprocess" else why_not(backend)
            if reason is not None:
                results[backend] = {"why_not": reason}
                continue
            print(f"measuring overlap, {backend}", file=sys.stderr, flush=True)
            results[backend] = measure_overlap(backend, checkpoint, prompt)
    return results


def missed_limits(transfers: dict[str, Any], *, with_rates: bool) -> list[str]:
    """What is slower, or moves something else, than it may, in words."""
    missed = []
    for backend, by_page in transfers.items():
        for name, row in by_page.items():
            if name == "why_not":
                continue
            where = f"{backend}, pages of {name}"
            if with_rates and row["ratio"]["low"] < LEAST_RATE:
                missed.append(f"{where}: {row['ratio']['middle']:.3f} of the raw rate, from {row['ratio']['low']:.3f}")
            if max(row["descriptors_per_page"]) > 1:
                missed.append(f"{where}: {row['descriptors_per_page']} descriptors per page")
            if row["received_bytes"] != row["expected_bytes"] or not row["each_byte_once"]:
                missed.append(f"{where}: {row['received_bytes']} bytes of {row['expected_bytes']}, or some twice")
    return missed


def print_tables(results: dict[str, Any]) -> None:
    """What people read."""
    # Wide enough for every column, also where the output goes to a file.
    console = Console(width=140)
    table = Table(title=f"{SENDERS} senders to 1 receiver, {LAYERS} layers; bounds of 95%")
    titles = (
        "back end",
        "latent page",
        "pages, GB/s",
        "raw, GB/s",
        "pages / raw",
        "bounds",
        "by CPU time",
        "runs a page",
    )
    for title in (*titles, "layer-major, GB/s", "/ page-major"):
        table.add_column(title, justify="right")
    for backend, by_page in results["transfers"].items():
        for name, row in by_page.items():
            if name == "why_not":
                console.print(f"{backend} cannot run here: {row}")
            else:
                table.add_row(backend, name, *_transfer_cells(row))
    console.print(table)
    if not results["overlap"]:
        return
    table = Table(title=f"from the last chunk to the first decoded token, {CP_SIZE} ranks; bounds of 95%")
    for title in ("back end", "prompt", "with overlap, s", "without, s", "ratio", "bounds", "whole run, ratio"):
        table.add_column(title, justify="right")
    for backend, row in results["overlap"].items():
        if "why_not" not in row:
            table.add_row(backend, *_overlap_cells(row))
    console.print(table)


def _transfer_cells(row: dict[str, Any]) -> list[str]:
    ratio, layers = row["ratio"], row["layer_major"]
    return [
        f"{row['bytes_per_second'] / 1e9:.2f}",
        f"{row['raw_bytes_per_second'] / 1e9:.2f}",
        f"{ratio['middle']:.3f}",
        f"{ratio['low']:.3f} to {ratio['high']:.3f}",
        f"{row['cpu_ratio']['middle']:.3f} from {row['cpu_ratio']['low']:.3f}",
        ", ".join(f"{count:g}" for count in row["descriptors_per_page"]),
        f"{layers['bytes_per_second'] / 1e9:.2f}",
        f"{1 / layers['ratio']['middle']:.2f} ({layers['descriptors_per_page']} runs)",
    ]


def _overlap_cells(row: dict[str, Any]) -> list[str]:
    ratio, total = row["ratio"], row["total_ratio"]
    return [
        f"{row['prompt_tokens']} in {row['chunk_tokens']}s, {row['bytes'] / 2**20:.0f} MiB",
        f"{row['tail_seconds']:.3f}",
        f"{row['tail_seconds_without']:.3f}",
        f"{ratio['middle']:.2f}",
        f"{ratio['low']:.2f} to {ratio['high']:.2f}",
        f"{total['middle']:.2f} ({total['low']:.2f} to {total['high']:.2f})",
    ]


def main() -> None:
    """Run, print, write; exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--quick", action="store_true", help="little data, tcp and threads only, rates without a limit")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="back ends")
    parser.add_argument("--page", nargs="+", choices=list(PAGE_SIZES), default=list(PAGE_SIZES), help="page sizes")
    parser.add_argument("--rounds", type=int, default=16, help="pairs of pages and raw")
    parser.add_argument("--round-mib", type=int, default=1024, help="latent MiB of a round, at most; memory: 2.5 times")
    parser.add_argument("--overlap-rounds", type=int, default=12, help="pairs with and without overlap; 0 for none")
    options = parser.parse_args()
    if debug_requested(os.environ):
        sys.exit(f"{DEBUG_VARIABLE} is set: diagnostics would be timed; unset it")
    if options.quick:
        transfers = measure_transfers(["tcp"], ["1 MiB"], QUICK_SIZES)
        overlap = measure_overlaps(["inprocess"], TinyShape(), QUICK_PROMPT)
    else:
        sizes = Sizes(round_bytes=options.round_mib << 20, rounds=options.rounds, layer_rounds=4, layer_runs=20_000)
        transfers = measure_transfers(options.backend, options.page, sizes)
        engines: list[TransferName] = [name for name in ("tcp", "mooncake") if name in options.backend]
        prompt = Prompt(tokens=2048, chunk=256, rounds=options.overlap_rounds)
        overlap = measure_overlaps(engines, WIDE_ROWS, prompt) if options.overlap_rounds else {}
    results: dict[str, Any] = {"transfers": transfers, "overlap": overlap}
    missed = results["missed"] = missed_limits(transfers, with_rates=not options.quick)
    results["machine"] = {"torch": str(torch.__version__), "cores": os.cpu_count(), "processor": platform.machine()}
    print_tables(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
