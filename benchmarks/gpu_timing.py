"""Times on a GPU, and the rate that memory has there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

COPY_BYTES = 2 << 30


def milliseconds(work: Callable[[], Any]) -> float:
    """Median time of some work on the device."""
    return float(triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median"))


def copy_rate() -> float:
    """Bytes per second that a device copy of 2 GiB reads and writes: the ceiling of everything that moves bytes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / milliseconds(lambda: target.copy_(source)) * 1e3
