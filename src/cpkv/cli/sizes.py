"""Sizes as people write them: 60GiB of memory, 1M tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from cpkv.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
MAX_DIGITS = 24


def parse_bytes(text: str, option: str) -> int:
    """Bytes of `60GiB`, `512MiB`, `80GB` (powers of 1000) or a plain number; a part of a byte is dropped.

    Raises:
        ConfigError: naming the option and the forms that there are.
    """
    units = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
    units |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    value = _parse(text, units)
    if value is None or value < 1:
        raise ConfigError(f"{option} is {text!r}, which is no size; write it like 60GiB, 512MiB, 80GB or 65536")
    return int(value)


def parse_tokens(text: str, option: str) -> int:
    """Tokens of `128K`, `1M` (powers of 1024) or a plain number.

    Raises:
        ConfigError: naming the option and the forms that there are.
    """
    value = _parse(text, {"": 1, "K": KIB, "M": MIB})
    if value is None or value < 1 or value.denominator != 1:
        raise ConfigError(
            f"{option} is {text!r}, which is no number of tokens from 1 on; write it like 1M, 128K or 8192"
        )
    return int(value)


def _parse(text: str, units: Mapping[str, int]) -> Fraction | None:
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text, flags=re.ASCII)
    if found is None or found[2].upper() not in units or len(found[1]) > MAX_DIGITS:
        return None
    return Fraction(found[1].replace("_", "")) * units[found[2].upper()]


def show_bytes(num_bytes: float) -> str:
    """With the largest unit of which there is at least one: 1.54 GiB."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:g} B"


def show_tokens(tokens: int) -> str:
    """1M, 128K, or the number where it is no whole multiple."""
    if tokens and tokens % MIB == 0:
        return f"{tokens // MIB}M"
    if tokens and tokens % KIB == 0:
        return f"{tokens // KIB}K"
    return str(tokens)
