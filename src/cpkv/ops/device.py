"""The device that kernels are launched on: that of the thread, whatever memory they are given."""

from __future__ import annotations

import contextlib

import torch


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch on a device, from any thread: a new one would take the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
