"""Every worker killed at a random moment of every phase: the cause is told in time, and nobody is left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=150, suite="distributed", nightly=True)

Run = Callable[..., Any]
SOON_S = 15.0
LONG = ("--cp-size", "2", "--prompt-tokens", "3000", "--chunk-size", "40", "--max-new-tokens", "600", "--json")


@pytest.mark.parametrize("victim", ["prefill rank 0", "prefill rank 1", "decode worker"])
@pytest.mark.parametrize(
    "phase", ["starting", "shared: prefill", "shared: decode", "replicated: prefill", "replicated: decode"]
)
def test_a_worker_dies(demo: Run, phase: str, victim: str) -> None:
    running = demo(*LONG)
    pid = running.wait_for_worker(victim)
    running.wait_for(phase)
    # The moment is what is drawn here; no phase is over that soon.
    delay = random.uniform(0, 1)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    ended = running.end(SOON_S)
    message = ended.err.partition("error: ")[2].strip()
    told = f"{victim} was killed by signal 9 (SIGKILL) (during "
    assert message.startswith(told), f"killed {delay:.3f} s after {phase!r}: {message!r}"
    assert (ended.status, ended.out) == (2, "")
    assert running.leftovers() == []
