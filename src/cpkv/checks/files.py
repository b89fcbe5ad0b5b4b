"""How checks read what the kernel says; tests hand in readers of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ReadText = Callable[[str], str]


def read_text(path: str) -> str:
    """The text of a file; OSError where there is none."""
    return Path(path).read_text(encoding="ascii", errors="replace")
