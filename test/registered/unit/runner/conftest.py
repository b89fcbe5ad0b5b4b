"""A checkout in a temporary folder, with test files written by the test, for the runner to run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

RUN_SUITE = Path(__file__).parents[3] / "run_suite.py"
HEADER = "from cpkv.testing.registration import register_cpu_ci, register_cuda_ci\n"


class Checkout:
    """A root folder; `run` calls the runner on it as a user would."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> Path:
        """Writes a file below the root."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def test(self, path: str, body: str = "def test_one():\n    pass\n", register: str | None = None) -> str:
        """Writes a registered test file below test/registered/; returns its path from the root."""
        suite = path.partition("/")[0]
        register = f'register_cpu_ci(est_time=1, suite="{suite}")' if register is None else register
        self.write(f"test/registered/{path}", f"{HEADER}{register}\n\n\n{body}")
        return f"test/registered/{path}"

    def run(self, *options: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Calls run_suite.py with `--root` and `options`."""
        return subprocess.run(
            [sys.executable, str(RUN_SUITE), "--root", str(self.root), *options],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """An empty checkout."""
    (tmp_path / "test/registered").mkdir(parents=True)
    return Checkout(tmp_path)
