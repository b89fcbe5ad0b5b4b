"""What only the back end inside one process can show: writes that stay in flight, one at a time, and fail to order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cpkv.errors import ConfigError, TransferError
from cpkv.testing.backends import BackendMaker, Memory
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.backend import Peer, Run
from cpkv.transfer.backends import open_backend, why_not
from cpkv.transfer.inprocess import InProcessFabric

register_cpu_ci(est_time=2, suite="transfer")

Held = tuple[InProcessFabric, Any, Peer, Memory, Memory]


@pytest.fixture
def held() -> Iterator[Held]:
    """A sender, a peer and their memory on a fabric that holds every write; 8 writes may be in flight."""
    with BackendMaker("inprocess") as make:
        make.fabric.hold()
        receiver, sender = make(), make(max_outstanding_per_peer=8)
        source, target = Memory(4096), Memory(4096, receiver)
        source.bytes[:] = np.arange(4096) % 251
        sender.register(source.region)
        receiver.register(target.region)
        yield make.fabric, sender, Peer(receiver.session_id, (target.region,)), source, target


def run_between(source: Memory, target: Memory, at: int, to: int, length: int) -> Run:
    return Run(source.region.address + at, target.region.address + to, length)


def test_a_held_fabric_keeps_the_transfer_pending_and_its_source_in_use(held: Held) -> None:
    fabric, sender, peer, source, target = held
    transfer = sender.submit(peer, [run_between(source, target, at, at, 31) for at in range(0, 4096, 64)])
    assert sender.wait(transfer, 0.01).state == "pending" and not sender.drain(0.01)
    assert sender.outstanding() == 8 and (target.bytes == 0xFF).all()
    with pytest.raises(TransferError, match=r"still read by 1 pending transfers \(first: 1\)"):
        sender.unregister(source.region)
    source.bytes[:] = 99  # whoever frees a page too early sends what the next owner wrote
    fabric.release()
    assert sender.drain(5) and sender.poll(transfer).state == "done"
    assert (target.bytes.reshape(-1, 64)[:, :31] == 99).all() and (target.bytes.reshape(-1, 64)[:, 31:] == 0xFF).all()
    sender.unregister(source.region)


def test_one_poll_copies_one_run(held: Held) -> None:
    fabric, sender, peer, source, target = held
    transfer = sender.submit(peer, [run_between(source, target, at, at, 31) for at in range(0, 640, 64)])
    fabric.release()
    for landed in range(1, 11):
        state = sender.poll(transfer).state
        assert (target.bytes[:640:64] != 0xFF).sum() == landed
        assert state == ("done" if landed == 10 else "pending")


def test_after_a_failure_no_run_is_started_and_those_in_flight_end_first(held: Held) -> None:
    fabric, sender, peer, source, target = held
    transfer = sender.submit(peer, [run_between(source, target, at, at, 31) for at in range(0, 4096, 64)])
    fabric.fail_next("the cable was pulled")
    fabric.fail_next("a second cause")
    fabric.release()
    for in_flight in range(7, 0, -1):
        assert sender.poll(transfer).state == "pending", "failed while writes were in flight"
        assert sender.outstanding() == in_flight
    status = sender.poll(transfer)
    assert status.state == "failed" and status.cause.startswith("the cable was pulled (run of 31 bytes from")
    assert sender.started == 8 and (target.bytes[:4096:64] != 0xFF).sum() == 6
    again = sender.submit(peer, [run_between(source, target, 0, 0, 31)])
    assert sender.wait(again, 5).state == "done", "one failure does not end the back end"


def test_it_is_refused_between_processes_with_what_works_there() -> None:
    with pytest.raises(
        ConfigError, match="threads of one process.*use --transfer tcp, shm, nixl or mooncake"
    ) as refusal:
        open_backend("inprocess", "127.0.0.1", secret="", transfer_timeout_s=10)
    assert why_not("inprocess") == str(refusal.value)
