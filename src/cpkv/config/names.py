"""The names that options may have; every other module takes them from here."""

from __future__ import annotations

from typing import Literal

WeightDtype = Literal["float64", "float32", "bfloat16"]
LatentDtype = Literal["float64", "float32", "bfloat16", "fp8"]
IndexDtype = Literal["float64", "float32", "bfloat16", "fp8"]
SplitStrategy = Literal["zigzag", "interleave"]
TransferName = Literal["mooncake", "tcp", "shm", "nixl", "inprocess"]
ViewName = Literal["replicated", "current", "full", "mixed", "unified", "blocked", "layer-split"]
DeviceName = Literal["cpu", "cuda"]
KernelName = Literal["auto", "ours", "vendor"]
KvView = Literal["auto", "current", "full", "mixed", "unified", "blocked"]
