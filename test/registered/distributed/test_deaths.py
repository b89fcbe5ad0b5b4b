"""A worker killed, a rank that fails, or the command itself killed: the cause is told, and nobody is left behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=52, suite="distributed")

Run = Callable[..., Any]
SOON_S = 15.0
# For processes to start, where the machine has other work.
START_S = 30.0
UNIFIED = "view unified, since the ranks share memory"
# Prefill or decode lasts for seconds, so that a kill at its beginning falls into its middle.
LONG_PREFILL = ("--cp-size", "2", "--prompt-tokens", "3000", "--chunk-size", "40", "--json")
# One rank, since nothing here is about ranks.
LONG_DECODE = ("--cp-size", "1", "--prompt-tokens", "200", "--max-new-tokens", "600", "--json")


@pytest.mark.parametrize(
    ("arguments", "moment", "victim", "doing"),
    [
        (LONG_PREFILL, "starting 2 prefill ranks", "prefill rank 1", "StartRank"),
        (LONG_PREFILL, UNIFIED, "prefill rank 1", "(RunBatch|ReadNews|SendPages)"),
        # The first step may still be ahead, and the trace is turned on before it.
        (LONG_DECODE, "shared: decode", "decode worker", "(TraceDecode|DecodeStep)"),
    ],
    ids=["start", "prefill", "decode"],
)
def test_a_killed_worker_is_named(demo: Run, arguments: tuple[str, ...], moment: str, victim: str, doing: str) -> None:
    running = demo(*arguments, verbose=True)
    pid = running.wait_for_worker(victim)
    running.wait_for(moment)
    if moment == UNIFIED:
        for name in ("prefill rank 0", "prefill rank 1"):
            assert "/memfd:cpkv-latent" in Path(f"/proc/{running.workers[name]}/maps").read_text()
    os.kill(pid, signal.SIGKILL)
    ended = running.end(SOON_S)
    message = ended.err.partition("error: ")[2].strip()
    assert re.fullmatch(rf"{victim} was killed by signal 9 \(SIGKILL\) \(during {doing}\)", message), message
    assert (ended.status, ended.out) == (2, "")
    assert running.leftovers() == []


def test_workers_end_when_the_command_is_killed(demo: Run, until: Run, processes: Run) -> None:
    """Also one that waits for another in a collective, and that one when it goes on."""
    running = demo(*LONG_PREFILL, verbose=True)
    stopped = running.wait_for_worker("prefill rank 1")
    running.wait_for(UNIFIED)
    assert len(processes(running.folder)) == 4
    os.kill(stopped, signal.SIGSTOP)
    running.process.kill()
    running.end(SOON_S)
    until(lambda: len(processes(running.folder)) == 1, "rank 0 and the decode worker have ended", SOON_S)
    os.kill(stopped, signal.SIGCONT)
    until(lambda: not processes(running.folder), "rank 1 has ended", SOON_S)


def test_the_command_cleans_up_when_it_is_told_to_end(demo: Run) -> None:
    running = demo(*LONG_DECODE)
    running.wait_for("shared: decode")
    running.process.send_signal(signal.SIGTERM)
    ended = running.end(SOON_S)
    assert (ended.status, ended.out) == (128 + signal.SIGTERM, "")
    assert "Traceback" not in ended.err
    assert running.leftovers() == []


def test_the_command_cleans_up_when_it_is_interrupted(demo: Run, until: Run) -> None:
    running = demo(*LONG_PREFILL)
    running.wait_for_worker("prefill rank 0")
    running.process.send_signal(signal.SIGINT)
    ended = running.end(SOON_S)
    assert (ended.status, ended.out) == (130, "")
    assert "Traceback" not in ended.err
    # A worker that was being started at that very moment ends by itself, once it has found its scheduler gone.
    until(lambda: not running.leftovers(), "all workers have ended", SOON_S)


@pytest.fixture
def poisoned(tmp_path: Path) -> tuple[str, ...]:
    """A model that has NaN for one token, and a prompt that ends with it.

    No query but that of the last token sees it, so one rank fails, in the first layer that scores more tokens than
    index_topk, and the others wait for it in a collective of the second.
    """
    folder = write_hot_checkpoint(tmp_path / "poisoned", "glm5")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][200] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    prompt = tmp_path / "prompt.bin"
    prompt.write_bytes(bytes(range(100)) * 2 + bytes([200]))
    return ("--model", str(folder), "--prompt-file", str(prompt), "--page-size", "16", "--cp-strategy")


# 201 tokens: a zigzag over three ranks leaves the last token to rank 0, an interleave to rank 2.
@pytest.mark.parametrize(("strategy", "rank"), [("zigzag", 0), ("interleave", 2)])
def test_a_rank_thread_that_fails_is_the_cause(cpkv: Run, poisoned: tuple[str, ...], strategy: str, rank: int) -> None:
    check_cause(cpkv("demo", "--transfer", "inprocess", "--cp-size", "3", *poisoned, strategy), rank)


def test_a_rank_process_that_fails_is_the_cause(cpkv: Run, poisoned: tuple[str, ...]) -> None:
    """Also of a rank that gathers ahead, as those of `mixed` do."""
    ended = cpkv("demo", "--cp-size", "2", "--kv-view", "mixed", "--chunk-size", "100", *poisoned, "zigzag")
    check_cause(ended, 0, START_S + SOON_S)


def check_cause(ended: Any, rank: int, within_s: float = SOON_S) -> None:
    """The first cause, by the rank that failed and not by one that waited for it."""
    assert ended.status == 2
    assert "Traceback" not in ended.err
    message = ended.err.partition("error: ")[2].strip()
    assert re.fullmatch(rf"prefill rank {rank}: .*NaN.*", message), message
    assert ended.seconds < within_s
