"""Models on the device under test, and kernels that threads may call."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from cpkv.layout.plan import BatchSpec, Segment
from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.ops.kernels import KernelNeeds, Kernels
from cpkv.testing.checkpoints import TinyShape, write_hot_checkpoint
from cpkv.testing.ranks import ThreadedRanks

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

    values = {field.name: getattr(kernels, field.name) for field in fields(kernels)}
    return replace(kernels, **{name: locked(value) for name, value in values.items() if callable(value)})


def counted(kernels: Kernels, name: str, calls: list[str]) -> Kernels:
    """The same, with a note of each call of one function."""
    function = getattr(kernels, name)

    def call(*inputs: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*inputs, **options)

    return replace(kernels, **{name: call})


def needs_of(model: DsaModel) -> KernelNeeds:
    """What a bfloat16 model needs of kernels."""
    shape = model.shape
    return KernelNeeds(
        "bfloat16",
        shape.num_heads,
        shape.kv_lora_rank + shape.rope_dim,
        shape.kv_lora_rank,
        shape.index_heads,
        shape.index_dim,
    )


def decode_together(
    model: DsaModel, kernels: Kernels, prompts: dict[str, list[int]], page_size: int, chunk_size: int
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """Prefill, then decode one token of all requests in one batch, over a pool of packed rows that holds every page.

    Returns:
        Choices by layer, and logits by request.
    """
    ranks = ThreadedRanks(
        model,
        model.shape.geometry(page_size, "fp8", "fp8"),
        cp_size=1,
        shared=False,
        num_pages=2 + sum(-(-len(ids) // page_size) for ids in prompts.values()),
        kernels=kernels,
    )
    prefilled = ranks.prefill(prompts, chunk_size=chunk_size)
    segments = tuple(
        Segment(name, len(ids), (ids[0],), prefilled.pages[name], is_last=True) for name, ids in prompts.items()
    )
    _, traces, logits = ranks.run(BatchSpec(99, segments, "interleave", "replicated"))
    return traces[0].choices, logits
