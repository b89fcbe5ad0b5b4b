"""`benchmarks/transfer.py --quick`: that it runs to its end, and counts what it must."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=12, suite="benchmark")

ROOT = Path(__file__).resolve().parents[3]


def test_quick_run_counts_one_run_per_page_and_pool_and_each_byte_once(tmp_path: Path) -> None:
    """Rates of so few bytes mean nothing; counts do, and the contents of every page were compared."""
    out = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/transfer.py", "--quick", "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads(out.read_text())
    assert results["missed"] == []
    row = results["transfers"]["tcp"]["1 MiB"]
    assert row["descriptors_per_page"] == [1, 1]
    assert row["received_bytes"] == row["expected_bytes"] == row["bytes"]
    assert row["each_byte_once"]
    assert row["ratio"]["middle"] > 0
    assert row["layer_major"]["descriptors_per_page"] == 2 * 61
    assert results["overlap"]["inprocess"]["ratio"]["middle"] > 0
