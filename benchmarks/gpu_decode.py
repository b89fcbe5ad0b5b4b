"""One decode step of a DSA layer on one GPU, over a pool that holds every page, with the vendors' decode kernels.

    python benchmarks/gpu_decode.py [--requests 64] [--context 131072] [--layers 2] [--rounds 60] [--json out.json]

scores      DeepGEMM's paged scores of the index blocks, through each request's page table
choice      exact choice of 2048
rows        the chosen positions' rows, all requests in one launch
attention   FlashMLA's sparse decode over packed rows

| pool page: layer 0 | layer 1 | ...      one layer is read in place: its pages lie all layers' rows apart
| plain: request 0 | request 1 | ...      the baseline: the same rows of one layer in order, nothing between

Requests own scattered pages; what belongs to other layers is NaN. Outputs of pool and plain are equal bit for bit, and
a few of them are compared with the references. Everything runs from CUDA graphs, as a server decodes, with cold caches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_graphs import GraphTimer
from paired_ratio import alternate, paired_ratio

from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.row_format import RowFormat
from cpkv.ops.reference.indexer import fp8_paged_indexer_scores
from cpkv.ops.reference.sparse_mla import sparse_mla_pages
from cpkv.ops.triton.pages import chosen_rows, gather_pages
from cpkv.ops.triton.topk import exact_topk
from cpkv.ops.vendor import deep_gemm, flash_mla

PAGE_SIZE = 64
TOPK = 2048
SCALE = 576**-0.5
ROWS = RowFormat("fp8", kv_lora_rank=512, rope_dim=64, index_dtype="fp8", index_dim=128)
PAGES_AT_A_TIME = 4096
# Without its highest bit of exponent a code is neither NaN nor large.
SMALL_CODES = 0xBF


@dataclass
class Step:
    """A decode step of one layer over some memory.

    Attributes:
        queries: bfloat16 [requests, heads, 576].
        index_queries: float8_e4m3fn [requests, index heads, 128].
        index_weights: fp32 [requests, index heads].
        pages: uint8 [pages, 64, 656].
        blocks: uint8 [pages, 64 * 132].
        page_table: int32 [requests, pages of a request].
        limits: int64 [requests].
    """

    queries: torch.Tensor
    index_queries: torch.Tensor
    index_weights: torch.Tensor
    pages: torch.Tensor
    blocks: torch.Tensor
    page_table: torch.Tensor
    limits: torch.Tensor

    def scores(self) -> torch.Tensor:
        """Of all keys of each request."""
        return deep_gemm.fp8_paged_indexer_scores(
            self.index_queries, self.index_weights, self.blocks, self.page_table, self.limits
        )

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Positions of the best."""
        return exact_topk(scores, self.limits, TOPK)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Where they lie."""
        return chosen_rows(self.page_table, positions, page_size=PAGE_SIZE, page_rows=PAGE_SIZE)

    def attend(self, rows: torch.Tensor) -> torch.Tensor:
        """To the chosen rows."""
        return flash_mla.sparse_mla_pages(self.queries, self.pages, rows, scale=SCALE, kv_lora_rank=512)[0]

    def run(self) -> torch.Tensor:
        """The whole step."""
        return self.attend(self.rows(self.choose(self.scores())))


def small_codes(*shape: int) -> torch.Tensor:
    """Bytes that are e4m3 values of magnitude under 2."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") & SMALL_CODES


def fill(pages: torch.Tensor, blocks: torch.Tensor) -> None:
    """Random rows and keys, with random scales."""
    for first in range(0, len(pages), PAGES_AT_A_TIME):
        some, keys = pages[first : first + PAGES_AT_A_TIME], blocks[first : first + PAGES_AT_A_TIME]
        count = len(some)
        some[..., :512] = small_codes(count, PAGE_SIZE, 512)
        some[..., 512:528] = (torch.rand(count, PAGE_SIZE, 4, device="cuda") + 0.5).view(torch.uint8)
        rope = torch.randn(count, PAGE_SIZE, 64, device="cuda").to(torch.bfloat16)
        some[..., 528:] = rope.view(torch.uint8)
        keys[:, : PAGE_SIZE * 128] = small_codes(count, PAGE_SIZE * 128)
        keys[:, PAGE_SIZE * 128 :] = (torch.rand(count, PAGE_SIZE, device="cuda") + 0.1).view(torch.uint8)


def make_steps(options: argparse.Namespace) -> tuple[Step, Step]:
    """The same step over the page-major pool and over plain memory."""
    geometry = PoolGeometry(ROWS, PAGE_SIZE, tuple(range(options.layers)))
    each = -(-options.context // PAGE_SIZE)
    count = options.requests * each
    geometry.check_rows(count + 1)
    # Page 0 is the trash page.
    latent = torch.full((count + 1, options.layers, PAGE_SIZE, 656), 0xFF, dtype=torch.uint8, device="cuda")
    index = torch.full((count + 1, options.layers, PAGE_SIZE * 132), 0xFF, dtype=torch.uint8, device="cuda")
    pages, blocks = latent[:, -1], index[:, -1]
    fill(pages[1:], blocks[1:])
    order = torch.randperm(count, device="cuda") + 1
    plain_pages = torch.empty(count, PAGE_SIZE * 656, dtype=torch.uint8, device="cuda")
    plain_blocks = torch.empty(count, PAGE_SIZE * 132, dtype=torch.uint8, device="cuda")
    gather_pages(pages.flatten(1), order, plain_pages)
    gather_pages(blocks, order, plain_blocks)
    inputs = (
        torch.randn(options.requests, options.heads, 576, device="cuda").to(torch.bfloat16),
        torch.randn(options.requests, options.index_heads, 128, device="cuda").to(torch.float8_e4m3fn),
        torch.randn(options.requests, options.index_heads, device="cuda"),
    )
    limits = torch.full((options.requests,), options.context, device="cuda")
    table = order.to(torch.int32).view(options.requests, each)
    plain_table = torch.arange(count, dtype=torch.int32, device="cuda").view(options.requests, each)
    return (
        Step(*inputs, pages, blocks, table, limits),
        Step(*inputs, plain_pages.view(count, PAGE_SIZE, 656), plain_blocks, plain_table, limits),
    )


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Whether the relative error in the 2-norm is within the tolerance; NaN is not."""
    return bool((found.double() - wanted.double()).norm() <= tolerance * wanted.double().norm())


def check(pool: Step, plain: Step) -> None:
    """Ends the benchmark where something is wrong: its time would mean nothing."""
    scores, plain_scores = pool.scores(), plain.scores()
    positions = pool.choose(scores)
    rows = pool.rows(positions)
    out = pool.attend(rows)
    few = slice(0, 2)
    wanted_scores = fp8_paged_indexer_scores(
        pool.index_queries[few], pool.index_weights[few], pool.blocks, pool.page_table[few], pool.limits[few]
    )
    wanted, _ = sparse_mla_pages(pool.queries[few].double(), pool.pages, rows[few], scale=SCALE, kv_lora_rank=512)
    width = int(pool.limits[0])
    best = scores[few].gather(1, positions[few]).sort(descending=True).values
    checks = {
        "scores over the pool": torch.equal(scores[:, :width], plain_scores[:, :width]),
        "output over the pool": torch.equal(out, plain.run()),
        "scores": close(scores[few, :width], wanted_scores[:, :width], 1e-3),
        "choice": torch.equal(best, scores[few, :width].topk(TOPK).values),
        "output": close(out[few], wanted, 2e-2),
    }
    for what, right in checks.items():
        if not right:
            sys.exit(f"{what}: not what it must be")


def measure(pool: Step, plain: Step, rounds: int) -> dict[str, Any]:
    """Steps alone, and the ratios of things that ran in turn."""
    timer = GraphTimer()
    scores = pool.scores()
    positions = pool.choose(scores)
    rows, plain_rows = pool.rows(positions), plain.rows(positions)
    steps = {
        "scores": timer.milliseconds(pool.scores, rounds),
        "choice": timer.milliseconds(lambda: pool.choose(scores), rounds),
        "rows": timer.milliseconds(lambda: pool.rows(positions), rounds),
        "attention": timer.milliseconds(lambda: pool.attend(rows), rounds),
    }
    plain_attention = timer.record(lambda: plain.attend(plain_rows))

    def ratio(first: Callable[[], float], second: Callable[[], float]) -> dict[str, float]:
        return paired_ratio(*alternate(first, second, rounds))._asdict()

    return {
        "step_ms": timer.milliseconds(pool.run, rounds),
        "steps": steps,
        "plain_attention_ms": timer.milliseconds(lambda: plain.attend(plain_rows), rounds),
        "ratios": {
            "whole step / attention alone on plain memory": ratio(timer.record(pool.run), plain_attention),
            "whole step / the same on plain memory": ratio(timer.record(pool.run), timer.record(plain.run)),
            "FlashMLA over the pool / on plain memory": ratio(timer.record(lambda: pool.attend(rows)), plain_attention),
            "DeepGEMM over the pool / on plain memory": ratio(timer.record(pool.scores), timer.record(plain.scores)),
        },
    }


def print_tables(results: dict[str, Any]) -> None:
    """What people read."""
    print(results["machine"])
    total = sum(results["steps"].values())
    shares = ", ".join(f"{name} {ms:.3f} ({ms / total:.0%})" for name, ms in results["steps"].items())
    print(f"a step: {results['step_ms']:.3f} ms; alone, ms: {shares}")
    print(f"attention alone on plain memory: {results['plain_attention_ms']:.3f} ms")
    for what, ratio in results["ratios"].items():
        print(f"{what}: {ratio['middle']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f}, {ratio['pairs']} pairs)")


def why_not(options: argparse.Namespace) -> str | None:
    """Say what keeps the benchmark from running; None when nothing does."""
    if not torch.cuda.is_available():
        return "there is no GPU here"
    device = torch.device("cuda")
    return deep_gemm.why_not_paged(device, options.index_heads, 128, PAGE_SIZE) or flash_mla.why_not_pages(
        device, options.heads, 576, 512
    )


def main() -> None:
    """Fill, check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="requests of a step, one query each; at least 2")
    parser.add_argument("--context", type=int, default=128 << 10, help="tokens of each request, at least 2048")
    parser.add_argument("--layers", type=int, default=2, help="layers of the pool, each with an indexer")
    parser.add_argument("--heads", type=int, default=64, help="attention heads")
    parser.add_argument("--index-heads", type=int, default=32, help="heads of the indexer")
    parser.add_argument("--rounds", type=int, default=60, help="samples of each step, pairs of each ratio")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if reason := why_not(options):
        sys.exit(reason)
    torch.manual_seed(5)
    pool, plain = make_steps(options)
    check(pool, plain)
    results = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.requests} requests of "
        f"{options.context} tokens, {options.heads} heads, {options.index_heads} index heads, one layer of a "
        f"page-major pool of {options.layers}"
    } | measure(pool, plain, options.rounds)
    print_tables(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
