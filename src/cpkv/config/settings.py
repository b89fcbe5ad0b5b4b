"""The settings of a prefill group and its decode worker, frozen, and what may be combined.

split        zigzag, interleave          any of them with any of
view         current, mixed, full, blocked (shared pool); unified too where the ranks share memory;
             replicated (every rank holds every page)
rows/keys    float64/float64  float32/float32  float32/fp8  bfloat16/bfloat16  bfloat16/fp8
             packed fp8 rows instead of those of float32 and bfloat16, with either kind of keys
transfer     mooncake, tcp, shm, nixl (ranks are processes), inprocess (ranks are threads)
"""

from __future__ import annotations

from typing import get_args

import msgspec

from cpkv.config.names import (
    DeviceName,
    IndexDtype,
    KernelName,
    KvView,
    LatentDtype,
    SplitStrategy,
    TransferName,
    WeightDtype,
)
from cpkv.errors import ConfigError

MAX_CP_SIZE = 8
MAX_PAGE_SIZE = 1024
SHORTEST_TRANSFER_TIMEOUT_S = 5
ROW_FORMATS: tuple[tuple[WeightDtype, IndexDtype], ...] = (
    ("float64", "float64"),
    ("float32", "float32"),
    ("float32", "fp8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "fp8"),
)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that every worker must know and agree on.

    Attributes:
        enable_cp_shared_kv: keep one copy of the KV cache over the ranks; off means that every rank holds it all.
        cp_size: prefill ranks.
        cp_strategy: how tokens are split over them.
        page_size: tokens of a page.
        chunk_size: tokens of a prefill batch at most.
        num_pages: logical pages of the prefill pool, the reserved ones included; a multiple of cp_size.
        dtype: of weights, and of latent rows unless `latent_dtype` says otherwise.
        latent_dtype: of stored latent rows: `dtype` (None), or fp8 for packed rows.
        index_dtype: of stored index keys: `dtype`, or fp8.
        kv_view: the view of every batch of a shared pool; auto takes the cheapest.
        current_reuse: batches without history may read the gathered current rows.
        prefetch: gather a layer's history while the layer before computes, into a second buffer.
        scratch_bytes: bytes that views may hold beside the pool; None for what the largest context of the pool takes.
        device: where models and pages are; ranks take the GPUs of the host in turn, several on one where they are more.
        kernels: on a GPU: the vendors' where they can run (auto), ours, or the vendors' and nothing else.
        transfer: back end that moves pages to the decode worker.
        host: address on which workers listen and are reached.
        latent_norm_eps: eps of q_a_layernorm and kv_a_layernorm.
        debug: synchronising diagnostics (CPKV_DEBUG_SHARED_KV); slow.
        transfer_timeout_s: how long a transfer may stand still.
        overlap: send the pages of finished chunks while the next one is computed.
        verify_transfer: compare a digest of each page after its transfer.
        lease_s: the decode worker takes a prefill that says nothing for so long for dead.
    """

    num_pages: int
    enable_cp_shared_kv: bool = False
    cp_size: int = 1
    cp_strategy: SplitStrategy = "zigzag"
    page_size: int = 64
    chunk_size: int = 2048
    dtype: WeightDtype = "float32"
    latent_dtype: LatentDtype | None = None
    index_dtype: IndexDtype = "float32"
    kv_view: KvView = "auto"
    current_reuse: bool = True
    prefetch: bool = True
    scratch_bytes: int | None = None
    device: DeviceName = "cpu"
    kernels: KernelName = "auto"
    transfer: TransferName = "mooncake"
    host: str = "127.0.0.1"
    latent_norm_eps: float = 1e-6
    debug: bool = False
    transfer_timeout_s: float = 60.0
    overlap: bool = True
    verify_transfer: bool = False
    lease_s: float = 15.0

    @property
    def stored_latent_dtype(self) -> LatentDtype:
        """Of stored latent rows."""
        return self.latent_dtype or self.dtype

    @property
    def compute_item_bytes(self) -> int:
        """Bytes of a value while it is computed with: float64, else float32."""
        return 8 if self.dtype == "float64" else 4


def _one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be from {low} to {high}")


def check_settings(settings: EngineSettings) -> None:
    """Refuse settings that cannot work, before anything is started.

    Raises:
        ConfigError: with the fact, the cause and the remedy.
    """
    _between("cp_size", settings.cp_size, 1, MAX_CP_SIZE)
    _between("chunk_size", settings.chunk_size, 1, 1 << 20)
    shortest = 1 if settings.transfer == "inprocess" else SHORTEST_TRANSFER_TIMEOUT_S
    _between("transfer_timeout_s", settings.transfer_timeout_s, shortest, 3600)
    _one_of("cp_strategy", settings.cp_strategy, ("zigzag", "interleave"))
    _between("lease_s", settings.lease_s, 1, 3600)
    _one_of("transfer", settings.transfer, get_args(TransferName))
    if not 1 <= settings.page_size <= MAX_PAGE_SIZE:
        raise ConfigError(
            f"page_size is {settings.page_size}, which the {settings.transfer} back end does not take: one page is one "
            f"write per pool; use 1 to {MAX_PAGE_SIZE}"
        )
    if (settings.dtype, settings.index_dtype) not in ROW_FORMATS:
        listed = ", ".join(f"{latent}/{index}" for latent, index in ROW_FORMATS)
        raise ConfigError(
            f"rows of {settings.dtype} with index keys of {settings.index_dtype} do not exist; "
            f"choose dtype/index_dtype from {listed}"
        )
    _check_device(settings)
    _check_views(settings)
    if settings.enable_cp_shared_kv and settings.cp_size == 1:
        raise ConfigError(
            "--enable-cp-shared-kv was given with cp_size 1: one rank has nobody to share with; "
            "raise --cp-size to 2 or more, or leave the flag out"
        )


def _check_device(settings: EngineSettings) -> None:
    _one_of("device", settings.device, get_args(DeviceName))
    _one_of("kernels", settings.kernels, get_args(KernelName))
    if settings.device == "cpu" and settings.kernels != "auto":
        raise ConfigError(
            f"--kernels {settings.kernels} chooses between kernels of a GPU, and --device is cpu; leave one of them out"
        )
    if settings.device == "cuda" and settings.dtype == "float64":
        raise ConfigError("--dtype float64 has no kernels on a GPU; give --dtype bfloat16 or float32, or --device cpu")


def _check_views(settings: EngineSettings) -> None:
    _one_of("kv_view", settings.kv_view, get_args(KvView))
    if settings.latent_dtype not in (None, settings.dtype, "fp8") or (
        settings.latent_dtype == "fp8" and settings.dtype == "float64"
    ):
        raise ConfigError(
            f"latent rows of {settings.latent_dtype} with a model of {settings.dtype} do not exist; leave out "
            "--latent-dtype, or give fp8 with --dtype float32 or bfloat16"
        )
    if settings.scratch_bytes is not None:
        _between("scratch_bytes", settings.scratch_bytes, 1, 1 << 50)
    if settings.kv_view == "current" and not settings.current_reuse:
        raise ConfigError("--kv-view current and --no-current-reuse contradict each other; leave one of them out")
    if not settings.enable_cp_shared_kv:
        given = [
            flag
            for flag, value in (
                ("--kv-view", settings.kv_view != "auto"),
                ("--no-current-reuse", not settings.current_reuse),
            )
            if value
        ]
        if given:
            raise ConfigError(
                f"{given[0]} chooses between views of a shared pool, and the pool is replicated; "
                "give --enable-cp-shared-kv too, or leave the option out"
            )


def check_decode_cp_size(cp_size: int) -> None:
    """Refuse a decode worker with context parallelism: it holds the full layout.

    Raises:
        ConfigError: cp_size is not 1.
    """
    if cp_size != 1:
        raise ConfigError(
            f"the decode worker was given cp_size {cp_size}; it holds the full layout and takes only cp_size 1; "
            "start one decode worker without CP"
        )
