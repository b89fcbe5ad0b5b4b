"""What every vendor's kernel needs here: its package, and a Hopper GPU."""

from __future__ import annotations

import importlib.util

import torch


def why_not_hopper(package: str, device: torch.device) -> str | None:
    """Say why a package's kernels cannot be called for memory of a device; None when they can."""
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return f"it is called for Hopper GPUs here, and the memory lies on {device}"
    return None
