"""A check and what it found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed"]

MIB = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckResult:
    """What one check found.

    Attributes:
        name: of the check.
        state: "warning" is what serves, but not every set-up; "failed" is what does not serve.
        figure: what was measured, or the cause of a failure.
        remedy: what to do about it; empty when `state` is "ok".
    """

    name: str
    state: State
    figure: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """A named check; `look` may raise, which is a failure of this check alone."""

    name: str
    look: Callable[[], CheckResult]


def run_check(check: Check) -> CheckResult:
    """Look, and turn an exception into a failed result with its cause."""
    try:
        return check.look()
    except Exception as error:
        _log.info("the check %r raised", check.name, exc_info=error)
        cause = f"the check itself raised {type(error).__name__}: {error}"
        return CheckResult(check.name, "failed", cause, "`cpkv --verbose check` shows where")


def run_checks(checks: Iterable[Check]) -> tuple[CheckResult, ...]:
    """Run all of them in order, whatever each finds."""
    return tuple(run_check(check) for check in checks)


def mebibytes(num_bytes: int) -> str:
    """Bytes in words: 24,576 MiB."""
    return f"{num_bytes // MIB:,} MiB"
