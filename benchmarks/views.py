"""What each view costs per chunk, against the replicated cache, on rank processes of one host.

    python benchmarks/views.py [--json out.json] [--plot curves.png]

Medium model (8 layers, hidden 512, 8 heads, 4 index heads, top-k 512), chunks of 512 tokens, history written
synthetically. All views run on the same model in the same process group, in turn with `replicated`; each chunk's logits
are compared with the replicated ones. Exit status 1 when a limit is missed (upper 95% bounds of paired ratios):

    current at history 0, unified at every history    at most 1.03 of replicated: neither moves a page, the floor is 1
    gather with nothing computed                      at least 0.8 of the rate of the bare collective on as many bytes
    bytes gathered by mixed and full                  exactly what the planner says
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from rich.console import Console
from rich.table import Table
from view_group import CHUNK, NO_PREFETCH, Job, run_rank

from cpkv.config.debug import DEBUG_VARIABLE, debug_requested
from cpkv.model.checkpoint import prepare_weights
from cpkv.testing.checkpoints import TinyShape, write_hot_checkpoint

MOST_OVER_REPLICATED = 1.03
LEAST_GATHER_RATE = 0.8
LIMITED = {"current", "unified"}
EXACT = ("mixed", NO_PREFETCH, "full")
MEDIUM = TinyShape(
    hidden_size=512,
    intermediate_size=1024,
    moe_intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=8,
    kv_lora_rank=128,
    q_lora_rank=256,
    qk_rope_head_dim=32,
    qk_nope_head_dim=64,
    v_head_dim=64,
    index_n_heads=4,
    index_head_dim=64,
    index_topk=512,
)


def run_group(folder: Path, cp_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """All measurements at one cp_size."""
    job = Job(cp_size, folder, tuple(options.history), options.rounds, options.other_rounds)
    processes.spawn(run_rank, args=(job,), nprocs=cp_size)
    return dict(json.loads((folder / f"results{cp_size}.json").read_text(encoding="utf-8")))


def missed_limits(results: dict[str, Any]) -> list[str]:
    """What is slower or moves something else than it may, in words."""
    missed = []
    for cp_size, by_history in results.items():
        for history, views in by_history.items():
            where = f"cp_size {cp_size}, history {history}"
            for view, row in views.items():
                ratio = row["ratio"]
                if view in LIMITED and ratio["high"] > MOST_OVER_REPLICATED:
                    missed.append(f"{where}: {view} up to {ratio['high']:.3f} of replicated")
                if view == "gather" and ratio["low"] < LEAST_GATHER_RATE:
                    missed.append(f"{where}: the gather has {ratio['low']:.2f} of the collective's rate")
                if view in EXACT and row["moved_bytes"] != row["planned_bytes"]:
                    missed.append(f"{where}: {view} moved {row['moved_bytes']} bytes, planned {row['planned_bytes']}")
    return missed


def print_tables(results: dict[str, Any]) -> None:
    """What people read."""
    console = Console()
    for cp_size, by_history in results.items():
        table = Table(title=f"chunks of {CHUNK} tokens, cp_size {cp_size}, relative to replicated")
        for column in ("history", "view", "s per chunk", "ratio", "95% bounds", "moved", "scratch", "gather hidden"):
            table.add_column(column, justify="right")
        for history, views in by_history.items():
            for view, row in views.items():
                if view != "gather":
                    table.add_row(history, view, *_cells(row))
        console.print(table)
        for history, views in by_history.items():
            if "gather" in views:
                gather = views["gather"]
                ratio = gather["ratio"]
                console.print(
                    f"history {history}: gather {gather['bytes_per_second'] / 1e9:.2f} GB/s, {ratio['middle']:.2f} "
                    f"(95% from {ratio['low']:.2f}) of the bare collective's rate"
                )


def _cells(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio"]
    hidden = "-" if not row["wait_seconds"] else f"{1 - row['wait_seconds'] / row['gather_seconds']:.0%}"
    return [
        f"{row['seconds']:.2f}",
        f"{ratio['middle']:.3f}",
        f"{ratio['low']:.3f} to {ratio['high']:.3f}",
        f"{row['moved_bytes'] / 2**20:.0f} MiB",
        f"{row['scratch_bytes'] / 2**20:.0f} MiB",
        hidden,
    ]


def plot(results: dict[str, Any], path: Path) -> None:
    """Ratio against history, a panel per cp_size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(5.5 * len(results), 4.2), sharey=True, squeeze=False)
    for panel, (cp_size, by_history) in zip(panels[0], results.items(), strict=True):
        names = {view: None for views in by_history.values() for view in views if view != "gather"}
        for view in names:
            points = [(int(history), views[view]["ratio"]) for history, views in by_history.items() if view in views]
            mean = [ratio["middle"] for _, ratio in points]
            places = [max(history, 1024) for history, _ in points]
            # Views without a limit are timed a few times only, too few for bounds.
            low = [ratio["middle"] - ratio["low"] for _, ratio in points]
            high = [ratio["high"] - ratio["middle"] for _, ratio in points]
            bounds = [low, high] if view in LIMITED else None
            panel.errorbar(places, mean, yerr=bounds, marker="o", markersize=4, capsize=3, label=view)
        panel.axhline(1, color="grey", linewidth=0.8)
        ticks = [max(int(history), 1024) for history in by_history]
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{int(history) // 1024}K" if int(history) else "0" for history in by_history])
        panel.minorticks_off()
        panel.set(title=f"cp_size {cp_size}", xlabel="history, tokens")
    panels[0][0].set_ylabel("seconds per chunk / replicated")
    panels[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print, write; exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path, help="PNG for the curves")
    parser.add_argument("--cp-size", type=int, nargs="+", default=[2, 4], help="ranks of each group")
    parser.add_argument("--history", type=int, nargs="+", default=[0, 4096, 16384, 65536], help="tokens")
    parser.add_argument(
        "--rounds", type=int, default=12, help="pairs for the views that have a limit, more at short histories"
    )
    parser.add_argument("--other-rounds", type=int, default=2, help="pairs for the others")
    options = parser.parse_args()
    if debug_requested(os.environ):
        sys.exit(f"{DEBUG_VARIABLE} is set: diagnostics would be timed; unset it")
    with tempfile.TemporaryDirectory(prefix="cpkv-bench-") as name:
        folder = Path(name)
        checkpoint = write_hot_checkpoint(folder / "checkpoint", "glm5", shape=MEDIUM)
        prepare_weights(checkpoint, folder / "weights.safetensors", torch.float32)
        results = {str(cp_size): run_group(folder, cp_size, options) for cp_size in options.cp_size}
    print_tables(results)
    if options.plot is not None:
        plot(results, options.plot)
    missed = missed_limits(results)
    if options.json is not None:
        machine = {"torch": str(torch.__version__), "cores": os.cpu_count(), "processor": platform.machine()}
        text = json.dumps({"results": results, "machine": machine, "missed": missed}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
