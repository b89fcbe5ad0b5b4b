"""Every back end between processes: peers that receive, that are killed in the middle, and that stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from cpkv.config.names import TransferName
from cpkv.testing.backends import (
    BETWEEN_PROCESSES,
    BackendMaker,
    Memory,
    PeerProcess,
    eventually,
    expected_bytes,
    peer_processes,
    pieces,
    poll_to_the_end,
    scattered_runs,
)
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.backends import why_not
from cpkv.transfer.runs import Region, Run

register_cpu_ci(est_time=30, suite="transfer")

Spawn = Callable[[int], PeerProcess]
# The least that each takes; a stopped peer is named after half of it.
TIMEOUT_S = {"tcp": 2.0, "shm": 2.0, "mooncake": 5.0, "nixl": 2.0}


@pytest.fixture(params=BETWEEN_PROCESSES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransferName:
    if reason := why_not(request.param):
        pytest.skip(reason)
    if request.param == "mooncake":
        for variable in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
            monkeypatch.setenv(variable, "2")
    elif request.param == "nixl":
        # On one host it would write into the memory of a process without that process.
        monkeypatch.setenv("UCX_TLS", "tcp")
    return request.param


@pytest.fixture
def make(name: TransferName) -> Iterator[BackendMaker]:
    with BackendMaker(name) as maker:
        yield maker


@pytest.fixture
def spawn(name: TransferName) -> Iterator[Spawn]:
    with peer_processes(name) as start:
        yield start


def whole(source: Memory, target: Region) -> list[Run]:
    return [Run(source.region.address, target.address, target.length)]


def test_bytes_of_two_senders_reach_another_process_and_none_after_it_took_its_memory_back(
    make: BackendMaker, spawn: Spawn
) -> None:
    size = 3000 * 913 + 40
    receiver, source = spawn(size), Memory(size)
    source.fill(5)
    runs = scattered_runs(source.region, receiver.region, 3000)
    senders = [make(), make()]
    transfers = []
    for number, sender in enumerate(senders):
        sender.register(source.region)
        transfers.append(sender.submit(receiver.peer, runs[number::2]))
    assert eventually(lambda: all(s.poll(t).state != "pending" for s, t in zip(senders, transfers, strict=True)), 15)
    assert [s.poll(t).cause for s, t in zip(senders, transfers, strict=True)] == ["", ""]
    assert receiver.holds(expected_bytes(source, receiver.region, runs))
    held = receiver.unregister()
    source.fill(6)
    refused = [(sender, sender.submit(receiver.peer, runs)) for sender in senders]
    assert eventually(lambda: all(sender.poll(transfer).state != "pending" for sender, transfer in refused), 15)
    for sender, transfer in refused:
        status = sender.poll(transfer)
        assert status.state == "failed" and receiver.peer.session_id in status.cause
    assert receiver.digest() == held


def test_a_peer_killed_in_the_middle_fails_the_transfer_soon_and_only_it(make: BackendMaker, spawn: Spawn) -> None:
    size = 24 << 20
    victim, other, source = spawn(size), spawn(size), Memory(size)
    source.fill(1)
    sender = make(max_outstanding_per_peer=4)
    sender.register(source.region)
    transfer = sender.submit(victim.peer, pieces(source.region, victim.region, 1 << 15))
    while len(sender._pending[transfer].runs) > 600:
        assert sender.poll(transfer).state == "pending"
    victim.process.kill()
    # No write is started until the process has ended.
    victim.process.wait(10)
    begun = time.monotonic()
    status = sender.wait(transfer, 15)
    assert status.state == "failed" and time.monotonic() - begun < 10
    assert "bytes from 0x" in status.cause and victim.peer.session_id in status.cause
    assert sender.outstanding() == 0 and sender.drain(0)
    again = sender.wait(sender.submit(victim.peer, whole(source, victim.region)), 10)
    assert "is not there" in again.cause
    assert sender.wait(sender.submit(other.peer, whole(source, other.region)), 15).state == "done"
    assert other.holds(source.bytes)


def test_a_peer_that_stops_fails_its_transfer_in_time_and_never_blocks_a_poll(
    name: TransferName, make: BackendMaker, spawn: Spawn
) -> None:
    # More than lies in buffers on the way.
    size = 16 << 20
    receiver, source = spawn(size), Memory(size)
    sender = make.new(transfer_timeout_s=TIMEOUT_S[name])
    with sender:
        sender.register(source.region)
        source.bytes[:] = 1
        receiver.stop()
        state, cause, longest = poll_to_the_end(
            sender, sender.submit(receiver.peer, whole(source, receiver.region)), 12
        )
        assert state == "failed" and "stopped" in cause and longest < 1, "at first contact"
        receiver.go_on()
        assert sender.wait(sender.submit(receiver.peer, whole(source, receiver.region)), 12).state == "done"
        receiver.stop()
        source.bytes[:] = 2
        transfer = sender.submit(receiver.peer, whole(source, receiver.region))
        state, cause, longest = poll_to_the_end(sender, transfer, 12)
        assert longest < 1
        if name == "shm":
            assert state == "done", "the peer has no part in it"
        else:
            assert state == "failed" and "stopped" in cause, "after contact"
        assert sender.outstanding() == 0
        source.bytes[:] = 3
        receiver.go_on()
        landed = receiver.values()
        assert 3 not in landed, "the source was read after the transfer had ended"
        assert name != "tcp" or 2 not in landed, "a receiver that was stopped took what its sender had given up"
        source.fill(4)
        assert sender.wait(sender.submit(receiver.peer, whole(source, receiver.region)), 12).state == "done"
    if name in ("tcp", "shm"):
        assert receiver.holds(source.bytes), "what was reported as failed landed on top of a later transfer"
