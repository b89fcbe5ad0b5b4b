"""Locked memory and open files, from limits that the test hands in."""

from __future__ import annotations

import resource

import pytest

from cpkv.checks.limits import check_memlock, check_open_files
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")

NO_LIMIT = resource.RLIM_INFINITY
PLAIN = "Name:\tpython\nCapEff:\t00000000a80425fb\n"
MAY_LOCK = "Name:\tpython\nCapEff:\t00000000a80465fb\n"


@pytest.mark.parametrize(
    ("soft", "status", "state", "figure"),
    [
        (NO_LIMIT, PLAIN, "ok", "no limit"),
        (8 << 20, MAY_LOCK, "ok", "limit 8 MiB, lifted by CAP_IPC_LOCK"),
        (8 << 20, PLAIN, "warning", "limit 8 MiB (hard limit: none)"),
        (8 << 20, "", "warning", "limit 8 MiB (hard limit: none)"),
    ],
)
def test_locked_memory(soft: int, status: str, state: str, figure: str) -> None:
    asked: list[int] = []

    def limits(which: int) -> tuple[int, int]:
        asked.append(which)
        return soft, NO_LIMIT

    found = check_memlock(limits, {"/proc/self/status": status}.__getitem__)
    assert (found.state, found.figure) == (state, figure) and asked == [resource.RLIMIT_MEMLOCK]
    assert ("ulimit -l unlimited" in found.remedy) == (state == "warning")


@pytest.mark.parametrize(
    ("soft", "hard", "state", "remedy"),
    [
        (NO_LIMIT, NO_LIMIT, "ok", ""),
        (4096, 4096, "ok", ""),
        (4095, NO_LIMIT, "warning", "`ulimit -n 4096`"),
        (512, 4096, "warning", "`ulimit -n 4096`"),
        (511, 4096, "failed", "`ulimit -n 4096`"),
        (1024, 2048, "warning", "`ulimit -n 4096`, after raising the hard limit of 2,048 (limits.conf, or"),
    ],
)
def test_open_files(soft: int, hard: int, state: str, remedy: str) -> None:
    asked: list[int] = []

    def limits(which: int) -> tuple[int, int]:
        asked.append(which)
        return soft, hard

    found = check_open_files(limits)
    assert found.state == state and found.remedy.startswith(remedy) and bool(found.remedy) == bool(remedy)
    assert asked == [resource.RLIMIT_NOFILE]
    assert found.figure == ("no limit" if soft == NO_LIMIT else f"limit {soft:,}")
