"""Tensors as raw bytes in messages, both ways."""

from __future__ import annotations

import torch


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of any float dtype."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def bytes_tensor(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor from bytes; its own memory."""
    return torch.frombuffer(bytearray(raw), dtype=dtype)
