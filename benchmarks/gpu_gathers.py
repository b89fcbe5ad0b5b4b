"""Page gathers on a GPU: one layer of a page-major pool with two, beside a device copy of plain memory."""

from __future__ import annotations

from typing import Any

import torch
from gpu_timing import copy_rate, milliseconds

from cpkv.ops.triton.pages import gather_pages
from cpkv.pool.unified_pool import UnifiedPool


def measure_gathers(pool: UnifiedPool, total_pages: int) -> dict[str, Any]:
    """One layer's pages, scattered, into a buffer: from local memory, and from every rank's in turn of owners."""
    device = pool.latent.device
    owners = pool.tail_row // pool.segment_rows
    each = total_pages // owners
    numbers = torch.stack([torch.randperm(each, device=device) + 1 for _ in range(owners)])
    page_bytes = pool.geometry.page_size * pool.geometry.row_format.latent_row_bytes
    out = torch.empty(owners, each, page_bytes, dtype=torch.uint8, device=device)
    local = torch.empty(total_pages, 2, page_bytes, dtype=torch.uint8, device=device).random_(0, 256)[:, 1]
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
        "copy_bytes_per_second": copy_rate(),
        "gather": {
            "local memory": moved / local_ms * 1e3,
            f"{owners} processes' memory": moved / milliseconds(from_all) * 1e3,
        },
    }
