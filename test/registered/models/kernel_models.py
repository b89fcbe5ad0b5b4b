"""Models on the device under test, and kernels that threads may call."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.ops.kernels import Kernels
from cpkv.testing.checkpoints import TinyShape, write_hot_checkpoint

ON_CUDA = os.environ.get("CPKV_TEST_HW") == "cuda"
if not ON_CUDA:
    # Triton reads this where a kernel is defined: when `triton_kernels` imports them.
    os.environ["TRITON_INTERPRET"] = "1"


def load_model(folder: Path, shape: TinyShape, dtype: str) -> DsaModel:
    """A hot model on the device under test."""
    checkpoint = write_hot_checkpoint(folder / "checkpoint", "glm52", shape=shape)
    prepared = folder / "weights.safetensors"
    prepare_weights(checkpoint, prepared, getattr(torch, dtype))
    return DsaModel.load(read_config(checkpoint), prepared, 1e-6, "cuda" if ON_CUDA else "cpu")


def one_at_a_time(kernels: Kernels) -> Kernels:
    """The same, never two of them at once: neither Triton's interpreter nor DeepGEMM's compiler knows threads."""
    lock = Lock()

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **options: Any) -> Any:
            with lock:
                return function(*inputs, **options)

        return call

    functions = {field.name: getattr(kernels, field.name) for field in fields(kernels) if field.name != "name"}
    return replace(kernels, **{name: locked(function) for name, function in functions.items()})
