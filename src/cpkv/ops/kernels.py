"""The functions that move, convert and choose, of one implementation: taken together, so that a rank mixes none.

device    kernels            what they are
cpu       reference          plain torch
cuda      ours               Triton
cuda      vendor             Triton, with DeepGEMM's scores and FlashMLA's attention where they can run
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpkv.config.names import KernelName
from cpkv.errors import ConfigError

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """Functions of the names and signatures in `cpkv.ops.reference`.

    Attributes:
        name: of the implementation.
    """

    name: str
    encode_latent_rows: Callable[..., torch.Tensor]
    decode_latent_rows: Callable[..., torch.Tensor]
    store_rows: Callable[..., None]
    gather_rows: Callable[..., torch.Tensor]
    gather_pages: Callable[..., None]
    encode_index_keys: Callable[..., torch.Tensor]
    store_index_keys: Callable[..., None]
    unpack_index_keys: Callable[..., torch.Tensor]
    exact_topk: Callable[..., torch.Tensor]
    topk_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    merge_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    fp8_indexer_scores: Callable[..., torch.Tensor]
    sparse_mla_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def reference_kernels() -> Kernels:
    """Plain torch."""
    return _kernels("reference", "cpkv.ops.reference")


def triton_kernels() -> Kernels:
    """Our kernels, for memory of a GPU, or of the CPU through Triton's interpreter.

    Raises:
        ConfigError: Triton is not installed.
    """
    try:
        return _kernels("ours", "cpkv.ops.triton")
    except ImportError as error:
        raise ConfigError(
            f"the kernels for GPUs need Triton, which cannot be imported ({error}); "
            "install a PyTorch for CUDA, which brings it, or give --device cpu"
        ) from error


def open_kernels(
    device: torch.device, name: KernelName, *, heads: int, index_heads: int, index_dim: int, row_sizes: tuple[int, int]
) -> Kernels:
    """The kernels for a model on a device.

    Args:
        device: where the pages lie.
        name: `ours`, `vendor`, or `auto` for the vendors' where they can run.
        heads: attention heads.
        index_heads: heads of the indexer.
        index_dim: values of an index key.
        row_sizes: values of a latent row, and of its latent part.

    Raises:
        ConfigError: vendors' kernels were asked for and cannot run, or Triton is missing.
    """
    if device.type == "cpu":
        if name == "vendor":
            raise ConfigError(
                "--kernels vendor was given with --device cpu, where no vendor's kernel runs; leave it out"
            )
        return reference_kernels()
    ours = triton_kernels()
    if name == "ours":
        return ours
    deep_gemm: Any = importlib.import_module("cpkv.ops.vendor.deep_gemm")
    flash_mla: Any = importlib.import_module("cpkv.ops.vendor.flash_mla")
    reasons = {
        "DeepGEMM": deep_gemm.why_not(device, index_heads, index_dim),
        "FlashMLA": flash_mla.why_not(device, heads, *row_sizes),
    }
    missing = "; ".join(f"{vendor}: {reason}" for vendor, reason in reasons.items() if reason is not None)
    if missing and name == "vendor":
        raise ConfigError(f"--kernels vendor was given and not all can run: {missing}; give --kernels auto or ours")
    found = ours
    if reasons["DeepGEMM"] is None:
        found = replace(found, name="vendor", fp8_indexer_scores=deep_gemm.fp8_indexer_scores)
    if reasons["FlashMLA"] is None:
        found = replace(found, name="vendor", sparse_mla_rows=flash_mla.sparse_mla_rows)
    LOG.info("kernels on %s: %s%s", device, found.name, f" ({missing})" if missing else "")
    return found


def _kernels(name: str, package: str) -> Kernels:
    latent_rows, index_keys, pages, topk, indexer, sparse_mla = (
        importlib.import_module(f"{package}.{module}")
        for module in ("latent_rows", "index_keys", "pages", "topk", "indexer", "sparse_mla")
    )
    return Kernels(
        name=name,
        encode_latent_rows=latent_rows.encode_latent_rows,
        decode_latent_rows=latent_rows.decode_latent_rows,
        store_rows=latent_rows.store_rows,
        gather_rows=latent_rows.gather_rows,
        gather_pages=pages.gather_pages,
        encode_index_keys=index_keys.encode_index_keys,
        store_index_keys=index_keys.store_index_keys,
        unpack_index_keys=index_keys.unpack_index_keys,
        exact_topk=topk.exact_topk,
        topk_rows=topk.topk_rows,
        merge_topk=topk.merge_topk,
        fp8_indexer_scores=indexer.fp8_indexer_scores,
        sparse_mla_rows=sparse_mla.sparse_mla_rows,
    )
