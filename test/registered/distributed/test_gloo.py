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

register_cpu_ci(est_time=7, suite="distributed")

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

# The other collectives, with what each rank has in the end, by label.
EXCHANGES = """
import threading

def exchanges(comm):
    rank, size, done = comm.rank, comm.size, {}
    for source in range(size):
        own = torch.arange(5) + 100 * rank
        assert comm.broadcast(own, source, f"broadcast {source}") is own
        done[f"broadcast {source}"] = own
    for label, sizes in {
        "uneven": [[(sender + 2 * taker) % 3 for taker in range(size)] for sender in range(size)],
        "to rank 1 alone": [[4 * (taker == 1) for taker in range(size)] for _ in range(size)],
        "from rank 2 alone": [[3 * (sender == 2)] * size for sender in range(size)],
        "nothing": [[0] * size] * size,
    }.items():
        mine, theirs = sizes[rank], [row[rank] for row in sizes]
        sent = torch.arange(2 * sum(mine)).view(-1, 2) + 1000 * rank
        received = torch.full((sum(theirs), 2), -1)
        comm.all_to_all(sent, mine, received, theirs, label)
        done[label] = received
    whole = torch.full((size, 2, 3), 255, dtype=torch.uint8)
    whole[rank] = rank
    assert comm.all_gather(whole[rank], "in place", out=whole) is whole
    done["in place"] = whole
    inside = torch.full((size + 2, 3), 255, dtype=torch.uint8)
    inside[1 + rank] = rank
    comm.all_gather(inside[1 + rank], "inside a buffer", out=inside[1:-1])
    done["inside a buffer"] = inside
    return done

def both_at_once(comm):
    # The last rank joins the first gather ahead only behind a collective of the main group, so the two overlap.
    ahead, joined = [], threading.Event()

    def gather_ahead():
        if comm.rank == comm.size - 1:
            joined.wait()
        for number in range(40):
            ahead.append(comm.prefetch.all_gather(torch.tensor([1000 * comm.rank + number]), f"ahead {number}"))

    lane = threading.Thread(target=gather_ahead)
    lane.start()
    comm.all_gather(torch.tensor([comm.rank]), "overlapped")
    joined.set()
    main = [comm.all_gather(torch.tensor([-1000 * comm.rank - number]), f"main {number}") for number in range(40)]
    lane.join()
    return {"ahead": torch.cat(ahead), "main": torch.cat(main)}
"""

PROGRAM = (
    CONTRIBUTIONS
    + EXCHANGES
    + """
import sys, time
from pathlib import Path
from safetensors.torch import save_file
from cpkv.comm.gloo import GlooCommunicator
from cpkv.errors import WorkerDiedError

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
comm = GlooCommunicator.join(rank, size, folder / "rendezvous", record=True)
gathered = {label: comm.all_gather(own, label) for label, own in contributions(rank).items()}
gathered |= exchanges(comm) | both_at_once(comm)
save_file(gathered, folder / f"{rank}.safetensors")
(folder / f"{rank}.sequence").write_text(repr((comm.sequence, comm.prefetch.sequence)))
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
    exec(CONTRIBUTIONS + EXCHANGES, scope)
    threads = ThreadGroup(RANKS)
    comms = [threads.communicator(rank, record=True) for rank in range(RANKS)]

    def gather(rank: int) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = scope["contributions"](rank)  # type: ignore[operator]
        gathered = {label: comms[rank].all_gather(tensor, label) for label, tensor in own.items()}
        gathered |= scope["exchanges"](comms[rank])  # type: ignore[operator]
        return gathered | scope["both_at_once"](comms[rank])  # type: ignore[operator]

    for rank, expected in enumerate(run_on_ranks(threads, gather)):
        gathered = load_file(folder / f"{rank}.safetensors")
        assert gathered.keys() == expected.keys()
        for label, tensor in expected.items():
            assert_same_bits(gathered[label], tensor, f"{label} on rank {rank}")
        sequences = (comms[rank].sequence, comms[rank].prefetch.sequence)
        assert (folder / f"{rank}.sequence").read_text() == repr(sequences)
        assert sequences == (comms[0].sequence, comms[0].prefetch.sequence)
    assert {str(collective.dtype) for collective in comms[0].sequence or []} >= {"torch.uint8", "torch.float64"}


def test_each_rank_has_what_the_others_sent_it(group: tuple[Path, list[subprocess.Popen[str]]]) -> None:
    """By hand, apart from what threads do: parts of uneven and no size, in place, and two groups at once."""
    folder, _ = group
    for rank in range(RANKS):
        got = {name: values.tolist() for name, values in load_file(folder / f"{rank}.safetensors").items()}
        for source in range(RANKS):
            assert got[f"broadcast {source}"] == [100 * source + at for at in range(5)]
        # Rank s sends (s + 2 t) % 3 rows to rank t, numbered from its own 1000 s on: s -> sizes for ranks 0, 1, 2.
        sizes = {0: (0, 2, 1), 1: (1, 0, 2), 2: (2, 1, 0)}
        wanted = []
        for sender, mine in sizes.items():
            first = 1000 * sender + 2 * sum(mine[:rank])
            wanted += [[first + 2 * row, first + 2 * row + 1] for row in range(mine[rank])]
        assert got["uneven"] == wanted
        numbers = [1000 * sender + at for sender in range(RANKS) for at in range(8)]
        assert sum(got["to rank 1 alone"], []) == (numbers if rank == 1 else [])
        assert sum(got["from rank 2 alone"], []) == [2000 + 6 * rank + at for at in range(6)]
        assert got["nothing"] == []
        assert got["in place"] == [[[sender] * 3] * 2 for sender in range(RANKS)]
        assert got["inside a buffer"] == [[255] * 3, *([sender] * 3 for sender in range(RANKS)), [255] * 3]
        for label, sign in (("ahead", 1), ("main", -1)):
            rounds = [[sign * (1000 * sender + number)] for number in range(40) for sender in range(RANKS)]
            assert got[label] == rounds


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
        GlooCommunicator.join(0, 2, tmp_path / "rendezvous", timeout_s=0.5)
    assert not torch.distributed.is_initialized()
