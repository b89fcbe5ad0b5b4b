"""Page gathers on a GPU: one layer of a page-major pool with two, beside a device copy of plain memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from cpkv.ops.triton.pages import gather_pages
from cpkv.pool.unified_pool import UnifiedPool


def milliseconds(work: Callable[[], Any]) -> float:
    """Median time of some work on the device."""
    return float(triton.testing.do_bench(work, warmup=30, rep=150, return_mode="median"))


def measure_gathers(pool: UnifiedPool, total_pages: int) -> dict[str, Any]:
    """One layer's pages, scattered, into a buffer: from local memory, and from every rank's in turn of owners."""
    device = pool.latent.device
    owners = pool.tail_row // pool.segment_rows
    each = total_pages // owners
    numbers = torch.stack([torch.randperm(each, device=device) + 1 for _ in range(owners)])
    page_bytes = pool.geometry.page_size * pool.geometry.row_format.latent_row_bytes
    out = torch.empty(owners, each, page_bytes, dtype=torch.uint8, device=device)
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source))
    local = source.view(-1)[: total_pages * 2 * page_bytes].view(total_pages, 2, page_bytes)[:, 1]
    scattered = torch.randperm(total_pages, device=device)

    def from_all() -> None:
        for owner in range(owners):
            gather_pages(segments[owner], numbers[owner], out[owner])

    rows = pool.all_latent_rows(1)
    stride = 2 * page_bytes
    segments = [
        rows[owner * pool.segment_rows :]
        .flatten()[: pool.local_pages * stride - page_bytes]
        .as_strided((pool.local_pages, page_bytes), (stride, 1))
        for owner in range(owners)
    ]
    from_all()
    for owner in range(owners):
        if not torch.equal(out[owner], segments[owner][numbers[owner]]):
            raise SystemExit(f"the pages gathered from rank {owner} are not those that it has")
    moved = 2 * out.numel()
    flat = out.view(-1, page_bytes)
    local_ms = milliseconds(lambda: gather_pages(local, scattered, flat))
    return {
        "copy_bytes_per_second": 2 * source.numel() / copy_ms * 1e3,
        "gather": {
            "local memory": moved / local_ms * 1e3,
            f"{owners} processes' memory": moved / milliseconds(from_all) * 1e3,
        },
    }
