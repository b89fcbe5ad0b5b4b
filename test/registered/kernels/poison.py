"""Memory that shows when it is read or left unwritten by mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

GUARD = 5
"""Columns of NaN before and behind guarded rows: odd, so that rows are aligned to nothing but their values."""


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What `torch.empty` makes in here is full of NaN, or of the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def guarded(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same rows inside wider ones whose other columns are NaN, and between rows that are all NaN."""
    memory = rows.new_full((len(rows) + 2, rows.shape[1] + 2 * GUARD), float("nan")).to(device)
    inner = memory[1:-1, GUARD:-GUARD]
    inner.copy_(rows)
    return inner
