"""The functions that move, convert and choose, of one implementation: taken together, so that a rank mixes none.

device    kernels            what they are
cpu       reference          plain torch
cuda      ours               Triton
cuda      vendor             Triton, with DeepGEMM's scores and FlashMLA's attention where they can run
                             (its scores and our choice mostly take less time than ours in one)
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpkv.config.names import KernelName, WeightDtype
from cpkv.errors import ConfigError
from cpkv.ops.reference.indexer import fp8_paged_indexer_scores
from cpkv.ops.reference.sparse_mla import sparse_mla_pages

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """Functions of the names and signatures in `cpkv.ops.reference`.

    Attributes:
        name: of the implementation.
        fp8_indexer_topk: scores and choice in one; None where they are better apart.
        paged_page_size: tokens of the pages that the two paged forms take; None where there are none.
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
    chosen_rows: Callable[..., torch.Tensor]
    fp8_indexer_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    fp8_paged_indexer_scores: Callable[..., torch.Tensor] = fp8_paged_indexer_scores
    sparse_mla_pages: Callable[..., tuple[torch.Tensor, torch.Tensor]] = sparse_mla_pages
    paged_page_size: int | None = None


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


@dataclass(frozen=True)
class KernelNeeds:
    """What of a model decides which kernels can serve it.

    Attributes:
        dtype: of weights, queries and float rows.
        heads: attention heads.
        latent_width: values of a latent row.
        kv_lora_rank: how many of them are the value.
        index_heads: heads of the indexer.
        index_dim: values of an index key.
    """

    dtype: WeightDtype
    heads: int
    latent_width: int
    kv_lora_rank: int
    index_heads: int
    index_dim: int


def open_kernels(device: torch.device, name: KernelName, needs: KernelNeeds) -> Kernels:
    """The kernels for a model on a device.

    Args:
        device: where the pages lie.
        name: `ours`, `vendor`, or `auto` for the vendors' where they can run.
        needs: of the model.

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
    found, missing = _with_vendors(ours, device, needs)
    if missing and name == "vendor":
        raise ConfigError(f"--kernels vendor was given and not all can run: {missing}; give --kernels auto or ours")
    LOG.info("kernels on %s: %s%s", device, found.name, f" ({missing})" if missing else "")
    return found


def vendor_reasons(device: torch.device, needs: KernelNeeds) -> dict[str, str | None]:
    """Why each vendor's kernels cannot serve a model's prefill on a device, in words; None for those that can."""
    deep_gemm, flash_mla = _vendors()
    return {
        "DeepGEMM": deep_gemm.why_not(device, needs.index_heads, needs.index_dim),
        "FlashMLA": _too_wide(needs) or flash_mla.why_not(device, needs.heads, needs.latent_width, needs.kv_lora_rank),
    }


def _with_vendors(ours: Kernels, device: torch.device, needs: KernelNeeds) -> tuple[Kernels, str]:
    """Ours with the vendors' in their place where they can run, and why the others cannot."""
    deep_gemm, flash_mla = _vendors()
    reasons = vendor_reasons(device, needs)
    found = ours
    if reasons["DeepGEMM"] is None:
        found = replace(found, name="vendor", fp8_indexer_scores=deep_gemm.fp8_indexer_scores, fp8_indexer_topk=None)
    if reasons["FlashMLA"] is None:
        found = replace(found, name="vendor", sparse_mla_rows=flash_mla.sparse_mla_rows)
    page_size = deep_gemm.PAGE_SIZE
    paged = (
        _too_wide(needs),
        deep_gemm.why_not_paged(device, needs.index_heads, needs.index_dim, page_size),
        flash_mla.why_not_pages(device, needs.heads, needs.latent_width, needs.kv_lora_rank),
    )
    if not any(paged):
        found = replace(
            found,
            fp8_paged_indexer_scores=deep_gemm.fp8_paged_indexer_scores,
            sparse_mla_pages=flash_mla.sparse_mla_pages,
            paged_page_size=page_size,
        )
    return found, "; ".join(f"{vendor}: {reason}" for vendor, reason in reasons.items() if reason is not None)


def _vendors() -> tuple[Any, Any]:
    """Our modules for DeepGEMM and FlashMLA."""
    return importlib.import_module("cpkv.ops.vendor.deep_gemm"), importlib.import_module("cpkv.ops.vendor.flash_mla")


def _too_wide(needs: KernelNeeds) -> str | None:
    return None if needs.dtype == "bfloat16" else f"it takes values of bfloat16, not of {needs.dtype}"


def _kernels(name: str, package: str) -> Kernels:
    latent_rows, index_keys, pages, topk, indexer, indexer_topk, sparse_mla = (
        importlib.import_module(f"{package}.{module}")
        for module in ("latent_rows", "index_keys", "pages", "topk", "indexer", "indexer_topk", "sparse_mla")
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
        chosen_rows=pages.chosen_rows,
        fp8_indexer_topk=indexer_topk.fp8_indexer_topk,
    )
