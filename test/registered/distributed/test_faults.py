"""Worker processes are killed and stopped and their clients go, while requests are served: what ends, ends right.

Every request ends in time, right or with an error that names who was the cause; every byte of every prompt is compared
at the decode worker; pages, processes, threads and descriptors are all back at the end.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cpkv.testing.faults.harness import inject_faults
from cpkv.testing.faults.options import FaultOptions
from cpkv.testing.faults.report import FaultReport
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=65, suite="distributed")

pytestmark = pytest.mark.parametrize("transfer", ["tcp", "mooncake"])


# Asked in a process of its own: threads of an engine open descriptors once it is imported, and what is open in this
# process at the end and was not at the beginning is a fault here.
WHY_NOT = "import sys; from cpkv.transfer.backends import why_not; print(why_not(sys.argv[1]) or '')"


def run(options: FaultOptions, workspace: Path) -> FaultReport:
    asked = subprocess.run(
        [sys.executable, "-c", WHY_NOT, options.transfer], capture_output=True, text=True, check=True
    )
    if reason := asked.stdout.strip():
        pytest.skip(reason)
    report = inject_faults(options, workspace)
    print(report.text())
    assert not report.violations, report.text()
    assert report.right + report.aborted + report.failed == options.requests
    return report


def test_workers_of_both_sides_are_killed_and_clients_go(transfer: str, tmp_path: Path) -> None:
    options = FaultOptions(
        transfer=transfer, seed=11, kills_prefill=3, kills_decode=3, aborts=20, hiccups=6, lease_s=2.0
    )
    report = run(options, tmp_path)
    assert report.signals["kill (prefill)"] == report.signals["kill (decode)"] == 3
    assert report.aborted == 20
    assert any("was killed by signal" in cause for cause in report.causes)
    assert report.right > 5


def test_a_worker_that_is_stopped_for_five_seconds_is_not_missed(transfer: str, tmp_path: Path) -> None:
    """The lease is shorter than that: the other rank's heartbeats renew it."""
    options = FaultOptions(
        transfer=transfer, seed=11, requests=12, stops=1, stop_s=5.0, lease_s=3.0, transfer_timeout_s=30.0
    )
    report = run(options, tmp_path)
    assert sum(report.signals.values()) == 1
    assert report.right == options.requests
    assert report.slowest_s > 4.0
