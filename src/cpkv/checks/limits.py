"""Limits of this process: locked memory and open files."""

from __future__ import annotations

import resource
from collections.abc import Callable

from cpkv.checks.files import ReadText, read_text
from cpkv.checks.result import CheckResult, mebibytes

MEMLOCK, OPEN_FILES = "locked memory", "open files"
# A server of ours takes up to 256 connections, and every peer of a transfer engine several more.
FEW_FILES, ENOUGH_FILES = 512, 4096
_CAP_IPC_LOCK = 14

Limits = Callable[[int], tuple[int, int]]


def check_memlock(limits: Limits = resource.getrlimit, read: ReadText = read_text) -> CheckResult:
    """RDMA pins what is registered, so that a low limit refuses it; over TCP nothing is pinned."""
    soft, hard = limits(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return CheckResult(MEMLOCK, "ok", "no limit")
    if _may_lock(read("/proc/self/status")):
        return CheckResult(MEMLOCK, "ok", f"limit {mebibytes(soft)}, lifted by CAP_IPC_LOCK")
    hard_words = "none" if hard == resource.RLIM_INFINITY else mebibytes(hard)
    return CheckResult(
        MEMLOCK,
        "warning",
        f"limit {mebibytes(soft)} (hard limit: {hard_words})",
        "enough for TCP and shared memory; RDMA pins whole pools: `ulimit -l unlimited`, or in a container "
        "`--ulimit memlock=-1`",
    )


def check_open_files(limits: Limits = resource.getrlimit) -> CheckResult:
    """Every connection is an open file."""
    soft, hard = limits(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return CheckResult(OPEN_FILES, "ok", "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft:,}")
    can_raise = hard == resource.RLIM_INFINITY or hard >= ENOUGH_FILES
    remedy = f"`ulimit -n {ENOUGH_FILES}`"
    if not can_raise:
        remedy += f", after raising the hard limit of {hard:,} (limits.conf, or `--ulimit nofile` of the container)"
    return CheckResult(OPEN_FILES, "failed" if soft < FEW_FILES else "warning", f"limit {soft:,}", remedy)


def _may_lock(status: str) -> bool:
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)
