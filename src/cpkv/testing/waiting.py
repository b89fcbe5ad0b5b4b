"""Waiting for what another process or thread does, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 50.0


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds; fail with `what` when it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.005)
