"""The names that options may have; every other module takes them from here."""

from __future__ import annotations

from typing import Literal

LatentDtype = Literal["float64", "float32", "bfloat16"]
IndexDtype = Literal["float64", "float32", "bfloat16", "fp8"]
SplitStrategy = Literal["zigzag", "interleave"]
TransferName = Literal["mooncake", "inprocess"]
