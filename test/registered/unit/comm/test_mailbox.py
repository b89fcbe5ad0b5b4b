"""Mailboxes against the control group that they stand for; ranks are threads, and the mailboxes lie on the CPU."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.comm.communicator import Communicator
from cpkv.comm.mailbox import MailboxCommunicator
from cpkv.comm.threads import ThreadCommunicator, ThreadGroup
from cpkv.errors import PlanError
from cpkv.testing.ranks import run_on_ranks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

PATIENCE_S = 20.0


def joined(control: list[Communicator], mailbox_bytes: int) -> list[MailboxCommunicator]:
    """The ends of all ranks; every rank sees the same mailboxes."""
    mailboxes = [torch.full((mailbox_bytes,), 0xFF, dtype=torch.uint8) for _ in control]
    ahead = [torch.full((mailbox_bytes,), 0xFF, dtype=torch.uint8) for _ in control]
    return [
        MailboxCommunicator(comm, mailboxes, prefetch=MailboxCommunicator(comm.prefetch, ahead)) for comm in control
    ]


def content(rank: int, number: int, size: int) -> torch.Tensor:
    """What a rank brings to a gather."""
    return torch.arange(size, dtype=torch.int32) + 1000 * rank + 7 * number


@given(
    size=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    mailbox_bytes=st.sampled_from([32, 64, 4096]),
    in_place=st.booleans(),
)
def test_gathers_of_any_sizes_bring_everything(size: int, sizes: list[int], mailbox_bytes: int, in_place: bool) -> None:
    """Smaller and larger than a half, in both groups, into a result that holds the own part already or not."""
    group = ThreadGroup(size, timeout_s=PATIENCE_S)
    comms = joined([group.communicator(rank) for rank in range(size)], mailbox_bytes)

    def run(rank: int) -> None:
        for number, count in enumerate(sizes):
            comm = comms[rank].prefetch if number % 3 == 2 else comms[rank]
            own = content(rank, number, count)
            out = torch.full((size, count), -1, dtype=torch.int32)
            if in_place:
                out[rank] = own
                own = out[rank]
            comm.all_gather(own, f"gather {number}", out=out)
            assert torch.equal(out, torch.stack([content(other, number, count) for other in range(size)]))

    run_on_ranks(group, run)


class SlowToRead(ThreadCommunicator):
    """Rank 0 comes out of a barrier only once the others have come to the next one."""

    arrived: defaultdict[int, threading.Semaphore]
    """By number of the barrier."""

    def barrier(self, label: str) -> None:
        number = int(label)
        if self.rank:
            self.arrived[number].release()
        super().barrier(label)
        if self.rank == 0 and number + 1 < GATHERS:
            assert self.arrived[number + 1].acquire(timeout=PATIENCE_S)


GATHERS = 6


def test_a_rank_that_reads_late_reads_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has put its next part into the other half by then."""
    arrived: defaultdict[int, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
    for number in range(GATHERS):
        arrived[number]
    monkeypatch.setattr(SlowToRead, "arrived", arrived, raising=False)
    group = ThreadGroup(2, timeout_s=PATIENCE_S)
    plain = [group.communicator(rank) for rank in range(2)]
    for comm in plain:
        comm.__class__ = SlowToRead
    comms = joined(list(plain), 4096)

    def run(rank: int) -> None:
        for number in range(GATHERS):
            found = comms[rank].all_gather(content(rank, number, 40), str(number))
            assert torch.equal(found, torch.stack([content(other, number, 40) for other in range(2)]))

    run_on_ranks(group, run)


def test_other_memory_and_other_collectives_go_by_the_control_group() -> None:
    """A tensor of another device, a broadcast, an exchange of parts."""
    group = ThreadGroup(2, timeout_s=PATIENCE_S)
    comms = joined([group.communicator(rank) for rank in range(2)], 32)

    def run(rank: int) -> None:
        comm = comms[rank]
        sent = torch.full((3,), float(rank))
        assert torch.equal(comm.broadcast(sent.clone(), 1, "broadcast"), torch.ones(3))
        received = torch.empty(3)
        comm.all_to_all(sent, [1, 2] if rank == 0 else [2, 1], received, [1, 2] if rank == 0 else [2, 1], "parts")
        assert received.tolist() == [0.0, 1.0, 1.0] if rank == 0 else [0.0, 0.0, 1.0]
        comm.barrier("barrier")

    run_on_ranks(group, run)
    with pytest.raises(PlanError, match="no prefetch group of its own"):
        _ = comms[0].prefetch.prefetch
    comms[0].close()
