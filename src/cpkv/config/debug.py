"""The environment variable that turns diagnostics on."""

from __future__ import annotations

from collections.abc import Mapping

DEBUG_VARIABLE = "CPKV_DEBUG_SHARED_KV"


def debug_requested(environment: Mapping[str, str]) -> bool:
    """Whether synchronising diagnostics are asked for; resolved once, by whoever starts the workers."""
    return environment.get(DEBUG_VARIABLE, "") not in ("", "0")
