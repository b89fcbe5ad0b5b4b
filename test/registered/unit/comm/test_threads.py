"""Ranks as threads: equal sequences of collectives, and one rank's failure ends the wait of all with its cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from cpkv.comm import Collective, ThreadGroup
from cpkv.errors import NumericsError, PlanError, WorkerDiedError
from cpkv.testing.ranks import run_on_ranks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

SIZES = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_every_contribution_in_order_of_rank(size: int) -> None:
    group = ThreadGroup(size)

    def gather(rank: int) -> torch.Tensor:
        return group.communicator(rank).all_gather(torch.tensor([[rank, 10 * rank]]), "numbers")

    for result in run_on_ranks(group, gather):
        assert result.tolist() == [[[rank, 10 * rank]] for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_record_the_same_sequence(size: int) -> None:
    """Kind 32; a rank that contributes no row takes part like the others."""
    group = ThreadGroup(size)
    comms = [group.communicator(rank, record=True) for rank in range(size)]

    def work(rank: int) -> None:
        comms[rank].all_gather(torch.zeros(0, 3), "nothing")
        comms[rank].all_gather(torch.zeros(2, 3, dtype=torch.uint8), "rows")

    run_on_ranks(group, work)
    expected = [
        Collective("all_gather", "nothing", (0, 3), "torch.float32"),
        Collective("all_gather", "rows", (2, 3), "torch.uint8"),
    ]
    assert [comm.sequence for comm in comms] == [expected] * size
    assert group.communicator(0).sequence is None


def test_what_a_rank_does_to_its_tensor_after_a_collective_changes_nothing_elsewhere() -> None:
    """A fast rank may reuse its buffer at once; hundreds of rounds, each with other values."""
    group = ThreadGroup(3)

    def work(rank: int) -> list[list[int]]:
        comm, buffer, seen = group.communicator(rank), torch.empty(1, dtype=torch.int64), []
        for number in range(300):
            buffer.fill_(1000 * rank + number)
            gathered = comm.all_gather(buffer, "round")
            buffer.fill_(-1)
            seen.append(gathered.flatten().tolist())
            gathered.fill_(-2)
        return seen

    for seen in run_on_ranks(group, work):
        assert seen == [[number, 1000 + number, 2000 + number] for number in range(300)]


def outcomes(group: ThreadGroup, function: Callable[[int], object]) -> list[str]:
    """What each rank raised, in words; a rank that raises anything but WorkerDiedError aborts the group."""
    said = [""] * group.size

    def work(rank: int) -> None:
        try:
            function(rank)
        except WorkerDiedError as error:
            said[rank] = str(error)
        except Exception as error:
            said[rank] = f"{type(error).__name__}: {error}"
            group.abort(rank, str(error))

    run_on_ranks(group, work)
    return said


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_rank_that_fails_before_a_collective_wakes_the_others_with_its_cause(size: int) -> None:
    """Kind 32: nobody waits for the end of the group's time, and everybody knows why."""
    group, started = ThreadGroup(size, timeout_s=15), time.monotonic()

    def work(rank: int) -> None:
        comm = group.communicator(rank)
        comm.all_gather(torch.zeros(1), "first")
        if rank == 1:
            raise NumericsError("a score is NaN")
        comm.all_gather(torch.zeros(1), "second")

    said = outcomes(group, work)
    assert time.monotonic() - started < 15, "the others were not woken"
    assert said[1] == "NumericsError: a score is NaN"
    # A slow rank may still be leaving the first collective when the group breaks.
    causes = {words.partition(" cannot finish: ")[2] for words in said[:1] + said[2:]}
    assert causes == {"rank 1 failed: a score is NaN"}


def test_run_on_ranks_raises_the_first_cause_and_not_what_followed_from_it() -> None:
    group = ThreadGroup(4, timeout_s=10)

    def work(rank: int) -> None:
        if rank == 2:
            raise NumericsError("the cause")
        group.communicator(rank).all_gather(torch.zeros(1), "rows")

    with pytest.raises(NumericsError, match="the cause"):
        run_on_ranks(group, work)


def test_the_first_cause_stays_and_ranks_that_come_later_hear_it() -> None:
    group = ThreadGroup(3, timeout_s=10)
    group.abort(2, "out of memory")
    group.abort(0, "a consequence")
    for rank in (0, 1):
        with pytest.raises(WorkerDiedError, match="^collective 'late' cannot finish: rank 2 failed: out of memory$"):
            group.communicator(rank).all_gather(torch.zeros(1), "late")


@pytest.mark.parametrize(
    ("contributions", "says"),
    [
        (
            [("rows", (2, 3)), ("rows", (1, 3))],
            r"the ranks are not in the same collective: rows \(1, 3\) torch.float32, rows \(2, 3\) torch.float32",
        ),
        ([("rows", (2,)), ("rows", (2, 1))], r"rows \(2, 1\) torch.float32, rows \(2,\) torch.float32"),
        ([("rows", (2,)), ("keys", (2,))], r"keys \(2,\) torch.float32, rows \(2,\) torch.float32"),
    ],
    ids=["size", "dimensions", "label"],
)
def test_different_collectives_are_refused_on_every_rank(
    contributions: list[tuple[str, tuple[int, ...]]], says: str
) -> None:
    """Kind 32: a collective of rank-local size, or two different ones."""
    group = ThreadGroup(2)

    def work(rank: int) -> None:
        label, shape = contributions[rank]
        with pytest.raises(PlanError, match=says):
            group.communicator(rank).all_gather(torch.zeros(shape), label)

    run_on_ranks(group, work)


def test_different_dtypes_are_refused_on_every_rank() -> None:
    """Kind 32: processes over gloo would read the other rank's bytes as something else."""
    group = ThreadGroup(2)
    with pytest.raises(PlanError):
        run_on_ranks(
            group,
            lambda rank: group.communicator(rank).all_gather(
                torch.zeros(2, dtype=(torch.int64, torch.int32)[rank]), "rows"
            ),
        )


def test_a_collective_behind_a_condition_of_one_rank_ends_and_shows_in_the_sequences() -> None:
    """Kind 32: rank 1 leaves the collective out; rank 0 gives up after the time that the group was given."""
    group = ThreadGroup(2, timeout_s=0.05)
    comms = [group.communicator(rank, record=True) for rank in range(2)]

    def work(rank: int) -> None:
        if rank == 0:
            with pytest.raises(WorkerDiedError, match="'mine' cannot finish: a rank did not arrive in time"):
                comms[rank].all_gather(torch.zeros(1), "mine")

    run_on_ranks(group, work)
    assert comms[0].sequence == [Collective("all_gather", "mine", (1,), "torch.float32")] != comms[1].sequence


def test_a_group_of_one_needs_nobody() -> None:
    comm = ThreadGroup(1, timeout_s=0.05).communicator(0, record=True)
    rows = torch.arange(6).view(2, 3)
    assert torch.equal(comm.all_gather(rows, "rows"), rows.unsqueeze(0))
    assert comm.sequence == [Collective("all_gather", "rows", (2, 3), "torch.int64")]
    comm.close()
    comm.close()


def test_no_thread_outlives_a_group() -> None:
    before = threading.active_count()
    group = ThreadGroup(4)
    run_on_ranks(group, lambda rank: group.communicator(rank).all_gather(torch.zeros(1), "rows"))
    assert threading.active_count() <= before
