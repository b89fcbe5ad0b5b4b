"""The device of the kernels under test: the GPU in a run for CUDA, else the CPU through Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

ON_CUDA = os.environ.get("CPKV_TEST_HW") == "cuda"
if not ON_CUDA:
    # Triton reads this where a kernel is defined, so it must stand before a module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_CUDA else "cpu")
