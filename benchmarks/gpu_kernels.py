"""What the kernels of a DSA layer take on one GPU, beside the vendors' kernels and beside the floor.

    python benchmarks/gpu_kernels.py [--json out.json] [--only topk scores ...] [--queries 4096]
        [--history 32768 131072] [--widths 131072 135168 ...]

topk        exact_topk of 2048 from fp32 scores of which every query sees all; and with its view rows (topk_rows) where
            query i of a chunk sees all but the last queries - 1 - i keys. Beside torch.topk, sorted and not, which
            knows neither limits nor a rule for ties. Floor: one read, at the rate of a device copy, of the scores that
            a query sees, so at a causal limit no byte beyond it; nothing for what is written
scores      fp8_indexer_scores, 32 and 64 heads    beside DeepGEMM's fp8_mqa_logits; floor: the fp8 peak
fused       fp8_indexer_topk, 32 and 64 heads, causal limits as for topk: scores and choice in one. Beside topk_rows of
            DeepGEMM's scores, and of ours (apart), both in blocks of 1 GiB of scores; floor: the fp8 peak
attention   sparse_mla_rows, 64 and 128 heads      beside FlashMLA's sparse prefill; floor: the bf16 peak

Each is compared with its reference on a few queries first, fused with our kernels apart on all. Times are medians; all
inputs are larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from gpu_timing import copy_rate, milliseconds

from cpkv.ops.reference import topk as reference
from cpkv.ops.triton.indexer import fp8_indexer_scores
from cpkv.ops.triton.indexer_topk import fp8_indexer_topk
from cpkv.ops.triton.sparse_mla import sparse_mla_rows
from cpkv.ops.triton.topk import exact_topk, topk_rows
from cpkv.ops.vendor import deep_gemm, flash_mla

TOPK = 2048
WIDTHS = (32 << 10, 128 << 10, 132 << 10, 256 << 10, 512 << 10, 1 << 20)
INDEX_DIM = 128
LATENT = 512
WIDTH = 576
SCALE = WIDTH**-0.5
# Dense peaks of an H200 by its data sheet.
FP8_FLOPS = 1979e12
BF16_FLOPS = 989e12
SCORE_BYTES = 1 << 30
LONGEST = 1 << 20
WHAT = ("topk", "scores", "fused", "attention")
Chosen = tuple[torch.Tensor, torch.Tensor]


class Row(NamedTuple):
    """One line of the table; times in milliseconds, None where nothing of the kind runs here."""

    what: str
    ours: float
    floor: float
    vendor: float | None
    rate: str


def measure_topk(queries: int, tokens: int, rate: float) -> list[Row]:
    """The choice of fp32 [queries, tokens], all seen, and with view rows behind causal limits; fewer if need be."""
    queries = min(queries, tokens, torch.cuda.mem_get_info()[0] // 3 // (4 * tokens))
    generator = torch.Generator(device="cuda").manual_seed(1)
    scores = torch.randn(queries, tokens, device="cuda", generator=generator)
    everything = torch.full((queries,), tokens, device="cuda")
    causal = torch.arange(tokens - queries + 1, tokens + 1, device="cuda")
    position_rows = torch.randperm(tokens, device="cuda", generator=generator).to(torch.int32)
    some = torch.linspace(0, queries - 1, 16, device="cuda").long()
    wanted = reference.exact_topk(scores[some], everything[some], TOPK)
    check("topk", torch.equal(exact_topk(scores, everything, TOPK)[some], wanted))
    found = topk_rows(scores, causal, TOPK, position_rows)
    chosen = reference.topk_rows(scores[some], causal[some], TOPK, position_rows)
    check(
        "topk with view rows", all(torch.equal(ours[some], theirs) for ours, theirs in zip(found, chosen, strict=True))
    )
    theirs = milliseconds(lambda: torch.topk(scores, TOPK))
    unsorted = milliseconds(lambda: torch.topk(scores, TOPK, sorted=False))
    ours = milliseconds(lambda: exact_topk(scores, everything, TOPK))
    with_rows = milliseconds(lambda: topk_rows(scores, causal, TOPK, position_rows))
    what = f"{queries} x {tokens}"
    size, seen = scores.numel() * 4, int(causal.sum()) * 4
    floor, causal_floor = size / rate * 1e3, seen / rate * 1e3
    return [
        Row(f"topk {what}", ours, floor, theirs, f"{size / ours / 1e6:.0f} GB/s"),
        Row(f"topk {what}, unsorted", ours, floor, unsorted, f"{size / ours / 1e6:.0f} GB/s"),
        Row(f"topk {what}, causal, rows", with_rows, causal_floor, unsorted, f"{seen / with_rows / 1e6:.0f} GB/s"),
    ]


def score_inputs(queries: int, tokens: int, heads: int) -> tuple[torch.Tensor, ...]:
    """Queries, weights, keys and their scales, as `fp8_indexer_scores` takes them."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    query = torch.randn(queries, heads, INDEX_DIM, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    key = torch.randn(tokens, INDEX_DIM, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(tokens, device="cuda", generator=generator) + 0.5
    weights = torch.randn(queries, heads, device="cuda", generator=generator)
    return query, weights, key, scales


def measure_scores(queries: int, tokens: int, heads: int) -> list[Row]:
    """Scores of all keys for all queries."""
    query, weights, key, scales = score_inputs(queries, tokens, heads)
    limits = torch.full((queries,), tokens, device="cuda")
    inputs = (query, weights, key, scales, limits)
    scores = fp8_indexer_scores(*inputs)
    products = (query[:4].float().flatten(0, 1) @ key.float().T).relu_().view(4, heads, tokens)
    wanted = torch.einsum("qht,qh->qt", products.double(), weights[:4].double()) * scales.double()
    check("scores", close(scores[:4], wanted, 1e-3))
    del products, wanted
    ours = milliseconds(lambda: fp8_indexer_scores(*inputs))
    theirs = None
    if deep_gemm.why_not(scores.device, heads, INDEX_DIM) is None:
        check("DeepGEMM's scores", close(deep_gemm.fp8_indexer_scores(*inputs)[:4], scores[:4], 1e-3))
        theirs = milliseconds(lambda: deep_gemm.fp8_indexer_scores(*inputs))
    flops = 2 * queries * tokens * heads * INDEX_DIM
    return [Row(f"scores {tokens}, {heads} heads", ours, flops / FP8_FLOPS * 1e3, theirs, tflops(flops, ours))]


def measure_fused(queries: int, tokens: int, heads: int) -> list[Row]:
    """Scores and choice in one, and apart."""
    query, weights, key, scales = score_inputs(queries, tokens, heads)
    limits = torch.arange(tokens - queries + 1, tokens + 1, device="cuda")
    position_rows = torch.randperm(tokens, device="cuda").to(torch.int32)

    def fused() -> Chosen:
        return fp8_indexer_topk(query, weights, key, scales, limits, TOPK, position_rows)

    def apart(scores_of: Callable[..., torch.Tensor]) -> Chosen:
        size = max(1, SCORE_BYTES // (4 * tokens))
        chosen = [
            topk_rows(scores_of(query[own], weights[own], key, scales, limits[own]), limits[own], TOPK, position_rows)
            for start in range(0, queries, size)
            for own in (slice(start, start + size),)
        ]
        return torch.cat([positions for positions, _ in chosen]), torch.cat([rows for _, rows in chosen])

    found, wanted = fused(), apart(fp8_indexer_scores)
    check("scores and choice in one", all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)))
    del found, wanted
    ours, ours_apart = milliseconds(fused), milliseconds(lambda: apart(fp8_indexer_scores))
    theirs = None
    if deep_gemm.why_not(query.device, heads, INDEX_DIM) is None:
        theirs = milliseconds(lambda: apart(deep_gemm.fp8_indexer_scores))
    floor = 2 * int(limits.sum()) * heads * INDEX_DIM / FP8_FLOPS * 1e3
    memory = (
        f"{peak_mib(fused):.0f} MiB; apart {ours_apart:.3f} ms, {peak_mib(lambda: apart(fp8_indexer_scores)):.0f} MiB"
    )
    return [Row(f"scores, choice {tokens}, {heads} heads", ours, floor, theirs, memory)]


def peak_mib(work: Callable[[], Chosen]) -> float:
    """Most memory that some work takes, its results included."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_attention(queries: int, tokens: int, heads: int) -> list[Row]:
    """Attention to 2048 rows drawn from all."""
    query = torch.randn(queries, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    latent = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    rows = torch.rand(queries, tokens, device="cuda").topk(TOPK).indices.sort().values.to(torch.int32)
    out, log_sums = sparse_mla_rows(query, latent, rows, scale=SCALE, kv_lora_rank=LATENT)
    chosen = latent[rows[:4].long()].double()
    logits = torch.einsum("qhd,qkd->qhk", query[:4].double(), chosen) * SCALE
    wanted = torch.einsum("qhk,qkd->qhd", logits.softmax(-1), chosen[..., :LATENT])
    check("attention", close(out[:4], wanted, 2e-2) and close(log_sums[:4], logits.logsumexp(-1), 1e-3))
    ours = milliseconds(lambda: sparse_mla_rows(query, latent, rows, scale=SCALE, kv_lora_rank=LATENT))
    theirs = None
    if flash_mla.why_not(query.device, heads, WIDTH, LATENT) is None:
        found = flash_mla.sparse_mla_rows(query, latent, rows, scale=SCALE, kv_lora_rank=LATENT)
        check("FlashMLA's output", close(found[0][:4], wanted, 2e-2))
        check("FlashMLA's sums", close(found[1], log_sums, 1e-3))
        theirs = milliseconds(lambda: flash_mla.sparse_mla_rows(query, latent, rows, scale=SCALE, kv_lora_rank=LATENT))
    flops = 2 * queries * heads * TOPK * (WIDTH + LATENT)
    return [Row(f"attention {tokens}, {heads} heads", ours, flops / BF16_FLOPS * 1e3, theirs, tflops(flops, ours))]


def tflops(flops: int, milliseconds_taken: float) -> str:
    """A rate in words."""
    return f"{flops / milliseconds_taken / 1e9:.0f} TFLOP/s"


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Whether the relative error in the 2-norm is within the tolerance; NaN is not."""
    return bool((found.double() - wanted.double()).norm() <= tolerance * wanted.double().norm())


def check(what: str, right: bool) -> None:
    """Ends the benchmark where a kernel is wrong: its time would mean nothing."""
    if not right:
        sys.exit(f"{what}: the kernel's result differs from the reference's")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--only", nargs="+", choices=WHAT, help="what to measure")
    parser.add_argument("--queries", type=int, default=4096, help="queries of a chunk")
    parser.add_argument("--history", type=int, nargs="+", default=[32 << 10, 128 << 10], help="tokens that are seen")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="tokens that topk chooses from")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    only = options.only or WHAT
    rate = copy_rate()
    rows: list[Row] = []
    for tokens in options.widths if "topk" in only else ():
        rows += measure_topk(options.queries, tokens, rate)
    for tokens in options.history:
        if "scores" in only:
            rows += measure_scores(options.queries, tokens, 32) + measure_scores(options.queries, tokens, 64)
        if "attention" in only:
            rows += measure_attention(options.queries, tokens, 64) + measure_attention(options.queries, tokens, 128)
    for tokens in (*options.history, LONGEST) if "fused" in only else ():
        rows += measure_fused(options.queries, tokens, 32) + measure_fused(options.queries, tokens, 64)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{machine}; a device copy reads and writes {rate / 1e9:.0f} GB/s")
    print(f"flashinfer: {'installed' if find_spec('flashinfer') else 'not installed'}")
    print(f"{'':36} {'ours, ms':>9} {'floor':>7} {'ours/floor':>10} {'vendor':>7} {'vendor/ours':>11}")
    for row in rows:
        vendor = ("-", "-") if row.vendor is None else (f"{row.vendor:.3f}", f"{row.vendor / row.ours:.2f}")
        times = f"{row.ours:9.3f} {row.floor:7.3f} {row.ours / row.floor:10.2f} {vendor[0]:>7} {vendor[1]:>11}"
        print(f"{row.what:36} {times}  {row.rate}")
    if options.json is not None:
        results = {"machine": machine, "copy_rate": rate, "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
