"""What the Triton kernels of scores and attention take of an SM, and where their time goes.

    python benchmarks/gpu_profile.py [--queries 4096] [--history 131072]

A profile for where counters need rights that one has not. What a program takes is what the compiler says; the parts of
the time come from inputs that leave a part of the work out, with the same kernel:

scores      all keys seen | by heads: what doubles with them, and what does not | none seen: only -inf is written
attention   rows drawn from all | the same 64 rows for every tile: loads hit the caches | -1: no row is loaded
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from gpu_timing import milliseconds

from cpkv.ops.triton import indexer, sparse_mla

TOPK = 2048
INDEX_DIM = 128
LATENT = 512
WIDTH = 576
SCALE = WIDTH**-0.5
# Of an SM of Hopper; a program's shared memory takes 1 KiB more than it asks for.
SM_REGISTERS, SM_SHARED, SM_THREADS = 65536, 228 << 10, 2048
WARP = 32


class Taken(NamedTuple):
    """What one program takes, and how many run on an SM at a time."""

    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @classmethod
    def of(cls, kernel: Any) -> Taken:
        """Of the kernel that was compiled last for this device."""
        compiled = list(kernel.device_caches[torch.cuda.current_device()][0].values())[-1]
        # Triton counts spilled words.
        return cls(compiled.metadata.num_warps, compiled.n_regs, 4 * compiled.n_spills, compiled.metadata.shared)

    @property
    def programs(self) -> int:
        """By registers, shared memory and threads."""
        # A warp's registers come in units of 256.
        of_warp = triton.cdiv(self.registers * WARP, 256) * 256
        return min(
            SM_REGISTERS // (of_warp * self.warps),
            SM_SHARED // (self.shared_bytes + 1024),
            SM_THREADS // (self.warps * WARP),
        )

    def __str__(self) -> str:
        return (
            f"{self.warps} warps, {self.registers} registers a thread, {self.spilled_bytes} bytes spilled, "
            f"{self.shared_bytes / 1024:.0f} KiB shared: {self.programs} programs on an SM"
        )


def profile_scores(queries: int, tokens: int) -> None:
    """With 32 and 64 heads, and with nothing seen."""
    times = {}
    for heads in (32, 64):
        query = torch.randn(queries, heads, INDEX_DIM, device="cuda").to(torch.float8_e4m3fn)
        key = torch.randn(tokens, INDEX_DIM, device="cuda").to(torch.float8_e4m3fn)
        weights, scales = torch.randn(queries, heads, device="cuda"), torch.rand(tokens, device="cuda")
        for seen in (tokens, 0):
            limits = torch.full((queries,), seen, device="cuda")
            inputs = (query, weights, key, scales, limits)
            times[heads, seen] = milliseconds(partial(indexer.fp8_indexer_scores, *inputs))
        print(f"scores, {heads} heads: {Taken.of(indexer._scores)}")
        flops = 2 * queries * tokens * heads * INDEX_DIM
        print(f"  {times[heads, tokens]:.2f} ms, {flops / times[heads, tokens] / 1e9:.0f} TFLOP/s")
    more = times[64, tokens] - times[32, tokens]
    print(f"  32 heads more: {more:.2f} ms, {2 * queries * tokens * 32 * INDEX_DIM / more / 1e9:.0f} TFLOP/s")
    print(f"  whatever the heads: {times[32, tokens] - more:.2f} ms; -inf alone takes {times[32, 0]:.2f}")


def profile_attention(queries: int, tokens: int) -> None:
    """With 64 and 128 heads: rows from all over, from the caches, and none."""
    latent = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    drawn = torch.randint(0, tokens, (queries, TOPK), device="cuda", dtype=torch.int32).sort().values
    near = torch.arange(TOPK, device="cuda", dtype=torch.int32).remainder_(64).expand(queries, -1).contiguous()
    options = {"scale": SCALE, "kv_lora_rank": LATENT}
    for heads in (64, 128):
        query = torch.randn(queries, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
        times = {}
        for what, rows in (("all over", drawn), ("in the caches", near), ("none", torch.full_like(drawn, -1))):
            times[what] = milliseconds(partial(sparse_mla.sparse_mla_rows, query, latent, rows, **options))
        print(f"attention, {heads} heads: {Taken.of(sparse_mla._sparse_mla)}")
        flops = 2 * queries * heads * TOPK * (WIDTH + LATENT)
        loaded = queries * triton.cdiv(heads, sparse_mla.BLOCK_HEADS) * TOPK * WIDTH * 2
        taken = times["all over"]
        print(f"  {taken:.2f} ms, {flops / taken / 1e9:.0f} TFLOP/s, programs load {loaded / taken / 1e9:.2f} TB/s")
        print(f"  rows in the caches: {times['in the caches']:.2f} ms; no row loaded: {times['none']:.2f} ms")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=4096, help="queries of a chunk")
    parser.add_argument("--history", type=int, default=128 << 10, help="tokens that are seen")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    profile_scores(options.queries, options.history)
    profile_attention(options.queries, options.history)


if __name__ == "__main__":
    main()
