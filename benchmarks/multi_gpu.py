"""Every view on rank processes with a card each, or several on a card: bits, time, link and capacity.

    python benchmarks/multi_gpu.py [--cp-size N] [--history 32K 128K 512K 1M] [--latent-dtype fp8] [--json out.json]

A model of 4 layers with the attention of GLM-5.2 (64 heads, latent rows of 512 + 64 values, 32 index heads of 128,
top-k 2048; 2 layers choose), small elsewhere, random weights, bfloat16, fp8 index keys, a random history. Ranks take
the cards in turn: with a card each they exchange through NCCL, else through mailboxes in memory that all have mapped.

bits     logits, choices and stored rows of a chunk through every view are those of `replicated`; else nothing is timed
time     a chunk through a view and through `replicated`, in turn, all ranks at once, the slowest rank's time
link     the page gather of `mixed` with nothing computed, against the bare all-gather and plain copies of as many bytes
forecast seconds by view from the bytes that cross the link and a probe of its rate (multi_gpu_forecast.py)
bytes    pools, scratch and moved bytes are those of the planner's formulas; capacity of GLM-5.2 by `cpkv plan`

Exit status 1 when bits or bytes differ, and, with 4 or 8 cards, when unified or mixed may take more than 1.02 of
replicated (upper 95% bound). With fewer cards the same is said and the status stays 0: the limit is for 4 or 8 cards.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from multi_gpu_group import PAGE_SIZE, Job
from multi_gpu_rank import run_rank
from multi_gpu_report import capacity, missed_limits, over_replicated, print_tables

from cpkv.cli.sizes import parse_tokens
from cpkv.model.checkpoint import prepare_weights
from cpkv.testing.checkpoints import TinyShape, write_hot_checkpoint

LIMITED_CARDS = (4, 8)
# A program that uses multicast of NVLink can put shared hosts' cards out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
SHAPE = TinyShape(
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
)


def run_ranks(options: argparse.Namespace, cards: int) -> dict[str, Any]:
    """What the ranks measured, and who they were."""
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="cpkv-bench-") as name:
        folder = Path(name)
        checkpoint = write_hot_checkpoint(folder / "checkpoint", "glm52", shape=SHAPE)
        prepare_weights(checkpoint, folder / "weights.safetensors", torch.bfloat16)
        histories = tuple(sorted(parse_tokens(text, "--history") for text in options.history))
        cp_size = options.cp_size or (cards if cards > 1 else 4)
        job = Job(
            cp_size,
            min(cards, cp_size),
            folder,
            histories,
            options.chunk,
            options.latent_dtype,
            options.rounds,
            options.other_rounds,
            started,
        )
        multiprocessing.spawn(run_rank, args=(job,), nprocs=job.cp_size)
        results = dict(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    link = "NCCL" if job.cards == job.cp_size else "mailboxes"
    machine = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {job.cp_size} ranks on {job.cards} cards ({link}),"
        f" chunks of {job.chunk} tokens, {job.latent_dtype} rows, pages of {PAGE_SIZE} tokens"
    )
    return {"machine": machine, "cp_size": job.cp_size, "cards": job.cards, "link": link} | results


def main() -> None:
    """Run the ranks, print, write; exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp-size", type=int, help="rank processes; by default one a card, 4 on one card")
    parser.add_argument("--history", nargs="+", default=["32K", "128K", "512K", "1M"], help="tokens, like 128K")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a chunk, over all ranks")
    parser.add_argument("--latent-dtype", choices=["bfloat16", "fp8"], default="bfloat16", help="of stored rows")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of a view and replicated")
    parser.add_argument("--other-rounds", type=int, default=3, help="pairs of full and blocked")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    os.environ.update(NO_MULTICAST)
    cards = torch.cuda.device_count()
    results = run_ranks(options, cards)
    results["capacity"] = capacity(results["cp_size"], options.chunk)
    missed, over = missed_limits(results), over_replicated(results)
    if results["cards"] in LIMITED_CARDS:
        missed += over
    results["missed"] = missed
    print_tables(results)
    if over and results["cards"] not in LIMITED_CARDS:
        print(f"over the limit for 4 or 8 cards, and these are {results['cards']}: " + "; ".join(over))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
