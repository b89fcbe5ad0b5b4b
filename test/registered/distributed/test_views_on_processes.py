"""Views on processes: equal to replicated, and a rank that is killed in the middle of its prefill is named."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=45, suite="distributed", nightly=True)

Run = Callable[..., Any]
SOON_S = 15.0
# Prefill lasts for seconds, so that a kill at its beginning falls into its middle.
LONG_PREFILL = ("--cp-size", "2", "--prompt-tokens", "3000", "--chunk-size", "40", "--json")
# About 500 GB of pages, and fewer rows than 2^31.
TOO_MANY_PAGES = "300000"


def cause_of(ended: Any) -> str:
    """The message of a run that must have been refused."""
    assert (ended.status, ended.out) == (2, ""), ended.err
    assert "Traceback" not in ended.err
    return str(ended.err.partition("error: ")[2].strip())


def test_unified_on_processes(demo: Run) -> None:
    running = demo(
        *("--cp-size", "2", "--prompt-tokens", "600", "--chunk-size", "200", "--page-size", "32", "--requests", "2"),
        *("--max-new-tokens", "4", "--kv-view", "unified", "--index-dtype", "fp8", "--json"),
    )
    ended = running.end()
    assert ended.status == 0, ended.err
    report = json.loads(ended.out)
    assert report["bitwise_equal_replicated"] is True
    assert report["tokens_replicated"] == report["tokens"]
    assert report["recall_right"] == report["recall_asked"]
    # 600 and 450 tokens.
    assert report["views"] == {"unified": 6}
    assert report["gathered_bytes"] == 0
    assert running.leftovers() == []


def test_shared_memory_that_is_not_there(demo: Run) -> None:
    """An error of ours and no SIGBUS: the pages are taken before anything is written."""
    running = demo(
        *("--cp-size", "2", "--prompt-tokens", "100", "--page-size", "1024", "--num-pages", TOO_MANY_PAGES),
        *("--kv-view", "unified", "--json"),
    )
    running.wait_for("shared: prefill")
    cause = cause_of(running.end(SOON_S))
    assert re.fullmatch(
        r"prefill rank \d: --kv-view unified on 2 ranks of this host needs \d+ bytes of shared memory and \d+ bytes "
        r"are available; lower --num-pages",
        cause,
    ), cause
    assert running.leftovers() == []


@pytest.mark.parametrize(("view", "shares_memory"), [("unified", True), ("mixed", False)])
def test_a_rank_killed_in_prefill_is_named(demo: Run, view: str, shares_memory: bool) -> None:
    """Readers of its memory and ranks that gather ahead end like any other; `mixed` prefetches by default."""
    running = demo(*LONG_PREFILL, "--kv-view", view, verbose=True)
    victim = running.wait_for_worker("prefill rank 1")
    running.wait_for(f"view {view}, since it was forced")
    for name in ("prefill rank 0", "prefill rank 1"):
        maps = Path(f"/proc/{running.workers[name]}/maps").read_text()
        assert ("/memfd:cpkv-latent" in maps) == shares_memory
    os.kill(victim, signal.SIGKILL)
    cause = cause_of(running.end(SOON_S))
    assert re.fullmatch(
        r"prefill rank 1 was killed by signal 9 \(SIGKILL\) \(during (RunBatch|ReadNews|SendPages)\)", cause
    ), cause
    assert running.leftovers() == []
