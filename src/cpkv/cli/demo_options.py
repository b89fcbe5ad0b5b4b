"""The options of the demo as one frozen value, and their checks."""

from __future__ import annotations

from typing import Literal

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
from cpkv.config.settings import EngineSettings, check_settings
from cpkv.errors import ConfigError

FamilyName = Literal["glm5", "glm52", "deepseek-v32"]

MAX_PROMPT_TOKENS = 1 << 20
MAX_REQUESTS = 64
MAX_NEW_TOKENS = 4096


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a demo run; the keys are the flags with underscores. Paths are text, so that JSON takes them."""

    model_family: FamilyName = "glm5"
    model: str | None = None
    dtype: WeightDtype = "float32"
    index_dtype: IndexDtype = "float32"
    latent_dtype: LatentDtype | None = None
    cp_size: int = 4
    cp_strategy: SplitStrategy = "zigzag"
    enable_cp_shared_kv: bool = True
    kv_view: KvView = "auto"
    no_current_reuse: bool = False
    no_prefetch: bool = False
    scratch_bytes: int | None = None
    device: DeviceName = "cpu"
    kernels: KernelName = "auto"
    page_size: int = 64
    chunk_size: int = 2048
    num_pages: int | None = None
    transfer: TransferName = "mooncake"
    no_overlap: bool = False
    verify_transfer: bool = False
    host: str = "127.0.0.1"
    decode_at: str | None = None
    registry: str | None = None
    prompt_tokens: int = 4000
    prompt_file: str | None = None
    requests: int = 1
    max_new_tokens: int = 16
    seed: int = 0
    dump: str | None = None
    json: bool = False
    debug: bool = False

    def settings(self, num_pages: int) -> EngineSettings:
        """The engine's part."""
        return EngineSettings(
            num_pages=num_pages,
            enable_cp_shared_kv=self.enable_cp_shared_kv,
            cp_size=self.cp_size,
            cp_strategy=self.cp_strategy,
            page_size=self.page_size,
            chunk_size=self.chunk_size,
            dtype=self.dtype,
            latent_dtype=self.latent_dtype,
            index_dtype=self.index_dtype,
            kv_view=self.kv_view,
            current_reuse=not self.no_current_reuse,
            prefetch=not self.no_prefetch,
            scratch_bytes=self.scratch_bytes,
            device=self.device,
            kernels=self.kernels,
            transfer=self.transfer,
            overlap=not self.no_overlap,
            verify_transfer=self.verify_transfer,
            host=self.host,
            debug=self.debug,
        )

    def check(self) -> None:
        """Refuse options out of range, before anything is written or started.

        Raises:
            ConfigError: with the range.
        """
        for name, low, high in (
            ("prompt_tokens", 1, MAX_PROMPT_TOKENS),
            ("requests", 1, MAX_REQUESTS),
            ("max_new_tokens", 1, MAX_NEW_TOKENS),
            ("seed", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}; give {low} to {high}")
        elsewhere = self.decode_at is not None or self.registry is not None
        if self.decode_at is not None and self.registry is not None:
            raise ConfigError("--decode-at and --registry both name a decode worker; give one of them")
        if elsewhere and self.dump is not None:
            raise ConfigError(
                "--dump writes the pool of a decode worker on this host; leave out --decode-at and --registry"
            )
        check_settings(self.settings(self.num_pages or 2 * max(1, self.cp_size)))
