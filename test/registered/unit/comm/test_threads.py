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

register_cpu_ci(est_time=4, suite="unit")

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


@pytest.mark.parametrize("size", SIZES)
def test_a_broadcast_leaves_every_rank_with_the_rows_of_the_source(size: int) -> None:
    group = ThreadGroup(size)
    comms = [group.communicator(rank, record=True) for rank in range(size)]

    def work(rank: int) -> list[list[int]]:
        seen = []
        for source in range(size):
            own = torch.arange(3) + 100 * rank
            assert comms[rank].broadcast(own, source, "rows") is own
            seen.append(own.tolist())
            # The source may reuse its tensor at once.
            own.fill_(-1)
        return seen

    for seen in run_on_ranks(group, work):
        assert seen == [[100 * source + at for at in range(3)] for source in range(size)]
    expected = [Collective(f"broadcast from {source}", "rows", (3,), "torch.int64") for source in range(size)]
    assert [comm.sequence for comm in comms] == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "rows_for",
    [
        lambda sender, taker: (sender + 2 * taker) % 3,
        lambda sender, taker: 5 * (taker == 0),
        lambda sender, taker: 5 * (sender == 0),
        lambda sender, taker: 0,
    ],
    ids=["uneven", "to one", "from one", "nothing"],
)
def test_every_part_of_an_all_to_all_arrives_where_it_belongs(size: int, rows_for: Callable[[int, int], int]) -> None:
    """Rows (sender, taker, number), in order of their senders; the record is the same on all ranks."""
    group = ThreadGroup(size)
    comms = [group.communicator(rank, record=True) for rank in range(size)]

    def parcel(sender: int, taker: int) -> list[list[int]]:
        return [[sender, taker, number] for number in range(rows_for(sender, taker))]

    def work(rank: int) -> list[list[int]]:
        sent = torch.tensor([row for taker in range(size) for row in parcel(rank, taker)], dtype=torch.int64)
        sent = sent.reshape(-1, 3)
        sizes = [rows_for(sender, rank) for sender in range(size)]
        received = torch.full((sum(sizes), 3), -1)
        comms[rank].all_to_all(sent, [rows_for(rank, taker) for taker in range(size)], received, sizes, "parcels")
        sent.fill_(-2)
        return received.tolist()

    for rank, received in enumerate(run_on_ranks(group, work)):
        assert received == [row for sender in range(size) for row in parcel(sender, rank)]
    expected = [Collective("all_to_all", "parcels", (0, 3), "torch.int64")]
    assert [comm.sequence for comm in comms] == [expected] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_gather_in_place_fills_the_other_slots_and_nothing_beside_them(size: int) -> None:
    """Each contribution is its own slot of the result, in the middle of a buffer; again and again in the same one."""
    group = ThreadGroup(size)

    def work(rank: int) -> None:
        comm = group.communicator(rank)
        buffer = torch.full((size + 2, 4), -1)
        out = buffer[1:-1]
        for number in range(100):
            out.fill_(-2)
            out[rank] = 1000 * rank + number
            assert comm.all_gather(out[rank], "in place", out=out) is out
            assert out.tolist() == [[1000 * other + number] * 4 for other in range(size)]
        assert buffer[[0, -1]].tolist() == [[-1] * 4] * 2

    run_on_ranks(group, work)


def test_the_second_group_gathers_while_the_first_does() -> None:
    """The last rank joins the first gather ahead only behind a collective of the main group, so the two overlap."""
    size = 3
    group = ThreadGroup(size, timeout_s=15)
    comms = [group.communicator(rank, record=True) for rank in range(size)]

    def work(rank: int) -> tuple[list[list[int]], list[list[int]]]:
        comm, ahead, joined = comms[rank], [], threading.Event()

        def gather_ahead() -> None:
            if rank == size - 1:
                joined.wait()
            for number in range(100):
                ahead.append(comm.prefetch.all_gather(torch.tensor(1000 * rank + number), "ahead").tolist())

        lane = threading.Thread(target=gather_ahead)
        lane.start()
        comm.all_gather(torch.tensor(rank), "overlapped")
        joined.set()
        main = [comm.all_gather(torch.tensor(-1000 * rank - number), "main").tolist() for number in range(100)]
        lane.join()
        return ahead, main

    for ahead, main in run_on_ranks(group, work):
        assert ahead == [[number, 1000 + number, 2000 + number] for number in range(100)]
        assert main == [[-number, -1000 - number, -2000 - number] for number in range(100)]
    for comm in comms:
        assert [one.label for one in comm.sequence or []] == ["overlapped"] + ["main"] * 100
        assert [one.label for one in comm.prefetch.sequence or []] == ["ahead"] * 100


def test_the_second_group_has_no_group_of_its_own() -> None:
    with pytest.raises(PlanError, match="has no prefetch group of its own"):
        _ = ThreadGroup(2).communicator(0).prefetch.prefetch


def test_a_failure_wakes_a_gather_of_the_second_group_too() -> None:
    group, started = ThreadGroup(2, timeout_s=15), time.monotonic()

    def work(rank: int) -> None:
        if rank == 1:
            raise NumericsError("a score is NaN")
        group.communicator(rank).prefetch.all_gather(torch.zeros(1), "ahead")

    assert outcomes(group, work)[0] == "collective 'ahead' cannot finish: rank 1 failed: a score is NaN"
    assert time.monotonic() - started < 15, "the other was not woken"


@pytest.mark.parametrize("source", [[0, 1], [0, 0]])
def test_a_broadcast_of_different_sources_or_shapes_is_refused_on_every_rank(source: list[int]) -> None:
    group = ThreadGroup(2)

    def work(rank: int) -> None:
        with pytest.raises(PlanError, match="the ranks are not in the same collective"):
            group.communicator(rank).broadcast(torch.zeros(3 if source[rank] == rank else 2), source[rank], "rows")

    run_on_ranks(group, work)


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
    assert comm.all_gather(rows[:1], "into", out=torch.full((1, 1, 3), -1)).tolist() == [[[0, 1, 2]]]
    received = torch.full((2, 3), -1)
    comm.all_to_all(rows, [2], received, [2], "parcels")
    assert torch.equal(received, rows) and torch.equal(comm.broadcast(received, 0, "rows"), rows)
    comm.close()
    comm.close()


def test_no_thread_outlives_a_group() -> None:
    before = threading.active_count()
    group = ThreadGroup(4)
    run_on_ranks(group, lambda rank: group.communicator(rank).all_gather(torch.zeros(1), "rows"))
    assert threading.active_count() <= before
