"""The whole command in the test's own process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cpkv.cli.main import run


@pytest.fixture
def cpkv(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Any]:
    """The whole command, in this process: (status, stdout, stderr). A module may say its COLUMNS."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("COLUMNS", str(getattr(request.module, "COLUMNS", 100)))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("CPKV_SECRET", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cpkv", *words])
        with pytest.raises(SystemExit) as ended:
            run()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    yield call
    signal.signal(signal.SIGTERM, before)
