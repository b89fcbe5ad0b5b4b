"""Every view on rank processes with a card each, or several on a card: bits, time, link and capacity.

    python benchmarks/multi_gpu.py [--cp-size N] [--history 32K 128K 512K 1M] [--latent-dtype fp8] [--json out.json]
    python benchmarks/multi_gpu.py --read out.json --plot docs/multi_gpu.png     tables and curves of an earlier run
    python benchmarks/multi_gpu.py --quick                                       a small model on the CPU: does it run

A model of 4 layers with the attention of GLM-5.2 (64 heads, latent rows of 512 + 64 values, 32 index heads of 128,
top-k 2048; 2 layers choose), small elsewhere, random weights, bfloat16, fp8 index keys, a random history. Ranks take
the cards in turn: with a card each they exchange through NCCL, else through mailboxes in memory that all have mapped.

bits     logits, choices and stored rows of a chunk through every view are those of `replicated`, and the recall model
         answers right through every view (multi_gpu_recall.py); else nothing is timed. With mailboxes, what `blocked`
         asks for comes by way of the host: it is compared on an eighth of a chunk, and not timed
time     a chunk through a view and through `replicated`, in turn, all ranks at once, the slowest rank's time
link     the page gather of `mixed` with nothing computed, against the bare all-gather and plain copies of as many bytes
forecast seconds by view from the bytes that it moves and a probe of the links (multi_gpu_forecast.py)
bytes    pools, scratch and moved bytes are those of the planner's formulas; capacity of GLM-5.2 by `cpkv plan`

Exit status 1 when bits, answers or bytes are wrong, and, with 4 or 8 cards, when a history does not fit, when unified
or mixed may take more than 1.02 of replicated (upper 95% bound), or when what a view adds to replicated is off its
forecast by more than 20% and by more than 1% of replicated. With fewer cards the same is said and the status stays 0:
these limits are for 4 or 8 cards.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as multiprocessing
from multi_gpu_group import Job
from multi_gpu_plot import plot
from multi_gpu_rank import run_rank
from multi_gpu_recall import write_recall
from multi_gpu_report import capacity, left_out, missed_limits, off_forecast, over_replicated, print_tables
from view_group import PAGE_SIZE

from cpkv.cli.sizes import parse_tokens
from cpkv.model.checkpoint import prepare_weights
from cpkv.testing.checkpoints import TinyShape, write_hot_checkpoint

LIMITED_CARDS = (4, 8)
# Multicast of NVLink can leave a card's fabric in a bad state until the card is reset.
ROUNDS = 20
OTHER_ROUNDS = 3
# What says how to run; results of an earlier run have their own.
RUN_OPTIONS = ("cp_size", "history", "chunk", "latent_dtype", "rounds", "other_rounds", "quick")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Scale(NamedTuple):
    """Sizes of a run.

    Attributes:
        shape: of the model.
        histories: tokens, as they are given.
        chunk: tokens.
        check_history: when bits are compared: it ends inside a page, and on GPUs it holds more rows than `blocked` has
            room for.
        least_bytes: moved in one measurement of a rate.
    """

    shape: TinyShape
    histories: tuple[str, ...]
    chunk: int
    check_history: int
    least_bytes: int


FULL = Scale(
    TinyShape(
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_attention_heads=64,
        kv_lora_rank=512,
        q_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
    ),
    ("32K", "128K", "512K", "1M"),
    4096,
    20_000,
    1 << 30,
)
# Packed rows are made of blocks of 128 values.
QUICK = Scale(TinyShape(kv_lora_rank=128), ("1K",), 256, 500, 1 << 20)


def make_job(options: argparse.Namespace, folder: Path, started: float) -> Job:
    """What the ranks do; checkpoints and weights are in the folder then."""
    scale = QUICK if options.quick else FULL
    checkpoint = write_hot_checkpoint(folder / "checkpoint", "glm52", shape=scale.shape)
    prepare_weights(checkpoint, folder / "weights.safetensors", torch.bfloat16)
    chunk = options.chunk or scale.chunk
    recall = write_recall(folder, 5 * chunk // 2)
    cards = 1 if options.quick else torch.cuda.device_count()
    cp_size = options.cp_size or (cards if cards > 1 else 4)
    return Job(
        cp_size=cp_size,
        cards=min(cards, cp_size),
        device="cpu" if options.quick else "cuda",
        folder=folder,
        histories=tuple(sorted(parse_tokens(text, "--history") for text in options.history or scale.histories)),
        check_history=scale.check_history,
        chunk=chunk,
        latent_dtype=options.latent_dtype or "bfloat16",
        rounds=ROUNDS if options.rounds is None else options.rounds,
        other_rounds=OTHER_ROUNDS if options.other_rounds is None else options.other_rounds,
        least_bytes=scale.least_bytes,
        recall=recall.token_ids + recall.answers[:-1],
        answers=recall.answers,
        started=started,
    )


def run_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks measured, and who they were."""
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="cpkv-bench-") as name:
        job = make_job(options, Path(name), started)
        multiprocessing.spawn(run_rank, args=(job,), nprocs=job.cp_size)
        results = dict(json.loads((job.folder / "results.json").read_text(encoding="utf-8")))
    device = "CPU" if options.quick else torch.cuda.get_device_name()
    where = "" if options.quick else f" on {job.cards} card{'s' * (job.cards > 1)}"
    ranks = f"{job.cp_size} ranks{where} ({job.link})"
    machine = (
        f"{device}, torch {torch.__version__}, {ranks}, chunks of {job.chunk} tokens, {job.latent_dtype} rows, "
        f"pages of {PAGE_SIZE} tokens"
    )
    about = {"machine": machine, "device": device, "cp_size": job.cp_size, "cards": job.cards, "link": job.link}
    return about | results | {"capacity": capacity(job.cp_size, job.chunk)}


def judge(results: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Limits that are missed, and those that would be with 4 or 8 cards, in words."""
    missed = missed_limits(results)
    of_cards = left_out(results) + over_replicated(results) + off_forecast(results)
    return (missed + of_cards, []) if results["cards"] in LIMITED_CARDS else (missed, of_cards)


def tell(results: dict[str, Any], over: list[str]) -> None:
    """Print what was found, and what is missed."""
    print_tables(results)
    if over:
        here = "the CPU" if results["device"] == "CPU" else results["cards"]
        print(f"over a limit for 4 or 8 cards, and here it is {here}: " + "; ".join(over))
    if results["missed"]:
        print("missed: " + "; ".join(results["missed"]), file=sys.stderr, flush=True)


def read_options() -> argparse.Namespace:
    """The command line; ends the program when that asks for what cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp-size", type=int, help="rank processes; by default one a card, 4 on one card")
    parser.add_argument("--history", nargs="+", help="tokens, like 128K")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk, over all ranks; 4096 by default")
    parser.add_argument("--latent-dtype", choices=["bfloat16", "fp8"], help="of stored rows; bfloat16 by default")
    parser.add_argument("--rounds", type=int, help=f"pairs of a view and replicated; {ROUNDS} by default")
    parser.add_argument("--other-rounds", type=int, help=f"pairs of full and blocked; {OTHER_ROUNDS} by default")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path, help="PNG for the curves")
    parser.add_argument("--read", type=Path, help="results of an earlier run, in place of a run")
    parser.add_argument(
        "--quick", action="store_true", default=None, help="a small model on the CPU; its times mean nothing"
    )
    options = parser.parse_args()
    given = [f"--{name.replace('_', '-')}" for name in RUN_OPTIONS if getattr(options, name) is not None]
    if options.read and given:
        parser.error(f"--read shows what an earlier run measured, and {', '.join(given)} would change nothing of it")
    if options.cp_size is not None and options.cp_size < 2:
        parser.error(f"--cp-size {options.cp_size}: views share between ranks, so there must be at least 2")
    if not (options.read or options.quick or torch.cuda.is_available()):
        sys.exit("there is no GPU here; --quick runs a small model on the CPU")
    return options


def main() -> None:
    """Run the ranks, write, print, draw; exit status 1 when a limit is missed."""
    options = read_options()
    os.environ.update(NO_MULTICAST)
    results = json.loads(options.read.read_text(encoding="utf-8")) if options.read else run_ranks(options)
    results["missed"], over = judge(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    tell(results, over)
    if options.plot is not None and not plot(results, options.plot):
        print(f"no history was timed: there are no curves, and {options.plot} is not written")
    if results["missed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
