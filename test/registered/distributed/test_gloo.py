"""Ranks as processes gather what ranks as threads gather, and notice at once that one of them has died."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cpkv.comm.gloo import GlooCommunicator
from cpkv.comm.threads import ThreadGroup
from cpkv.errors import WorkerDiedError
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.ranks import run_on_ranks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=9, suite="distributed")

RANKS = 3
QUICK_S = 15.0

# What every rank gathers, by label; run in each process and in each thread.
CONTRIBUTIONS = """
import torch

def contributions(rank):
    draw = torch.Generator().manual_seed(rank)
    latent = torch.randint(0, 256, (5, 7), generator=draw, dtype=torch.uint8)
    nan = torch.full((4,), 255, dtype=torch.uint8).view(torch.float32)
    return {
        "bytes": latent,
        "one byte": latent[:1, :1].contiguous(),
        "nothing": latent[:0],
        "float32": torch.cat([torch.randn(6, generator=draw), nan, torch.tensor([-0.0])]),
        "float64": torch.randn(2, 3, 4, generator=draw, dtype=torch.float64),
        "int64": torch.arange(3) * (rank + 1) - 2**40,
    }
"""

PROGRAM = (
    CONTRIBUTIONS
    + """
import sys, time
from pathlib import Path
from safetensors.torch import save_file
from cpkv.comm.gloo import GlooCommunicator
from cpkv.errors import WorkerDiedError

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
comm = GlooCommunicator(rank, size, folder / "rendezvous", record=True)
gathered = {label: comm.all_gather(own, label) for label, own in contributions(rank).items()}
save_file(gathered, folder / f"{rank}.safetensors")
(folder / f"{rank}.sequence").write_text(repr(comm.sequence))
print("gathered", flush=True)
sys.stdin.readline()
started = time.monotonic()
try:
    comm.all_gather(torch.zeros(4), "after the death")
    print("no error", flush=True)
except WorkerDiedError as error:
    print(f"{time.monotonic() - started:.3f} {error}", flush=True)
comm.close()
comm.close()
"""
)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[subprocess.Popen[str]]]]:
    """Ranks that have gathered everything and wait for a line."""
    folder = tmp_path_factory.mktemp("gloo")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(RANKS), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    watchdog = threading.Timer(50, lambda: [rank.kill() for rank in ranks])
    watchdog.start()
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "gathered\n"
        yield folder, ranks
    finally:
        watchdog.cancel()
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_processes_gather_what_threads_gather(group: tuple[Path, list[subprocess.Popen[str]]]) -> None:
    folder, _ = group
    scope: dict[str, object] = {}
    exec(CONTRIBUTIONS, scope)
    threads = ThreadGroup(RANKS)
    comms = [threads.communicator(rank, record=True) for rank in range(RANKS)]

    def gather(rank: int) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = scope["contributions"](rank)  # type: ignore[operator]
        return {label: comms[rank].all_gather(tensor, label) for label, tensor in own.items()}

    for rank, expected in enumerate(run_on_ranks(threads, gather)):
        gathered = load_file(folder / f"{rank}.safetensors")
        assert gathered.keys() == expected.keys()
        for label, tensor in expected.items():
            assert tensor.shape[0] == RANKS
            assert_same_bits(gathered[label], tensor, f"{label} on rank {rank}")
        assert (folder / f"{rank}.sequence").read_text() == repr(comms[rank].sequence)
    assert {str(collective.dtype) for collective in comms[0].sequence or []} >= {"torch.uint8", "torch.float64"}


def test_a_dead_peer_is_noticed_at_once(group: tuple[Path, list[subprocess.Popen[str]]]) -> None:
    _, ranks = group
    ranks[1].kill()
    ranks[1].wait()
    started = time.monotonic()
    for rank in (0, 2):
        stdin = ranks[rank].stdin
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()
    for rank in (0, 2):
        stdout = ranks[rank].stdout
        assert stdout is not None
        seconds, _, message = stdout.readline().partition(" ")
        assert f"collective 'after the death' failed on rank {rank}: " in message
        # Gloo's own patience, by the default of the class, is 120 s.
        assert float(seconds) < QUICK_S
        assert ranks[rank].wait(QUICK_S) == 0, "a rank that has reported the death must be able to end"
    assert time.monotonic() - started < 2 * QUICK_S


def test_a_rank_that_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(WorkerDiedError, match="rank 0 could not join the group of 2 ranks"):
        GlooCommunicator(0, 2, tmp_path / "rendezvous", timeout_s=0.5)
    assert not torch.distributed.is_initialized()
