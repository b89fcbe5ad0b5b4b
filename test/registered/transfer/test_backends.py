"""What every back end promises, on each that can run here: memory in process, sockets, shared memory, real engines."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from cpkv.errors import ConfigError, TransferError
from cpkv.testing.backends import (
    ALL_BACKENDS,
    BackendMaker,
    Memory,
    eventually,
    expected_bytes,
    pieces,
    scattered_runs,
)
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.backend import Peer, Region, Run, TransferBackend
from cpkv.transfer.backends import why_not

register_cpu_ci(est_time=25, suite="transfer")


Spares = dict[str, list[TransferBackend]]


@pytest.fixture(scope="module")
def spares() -> Iterator[Spares]:
    """Engines that are slow to start and to end, for the next test."""
    kept: Spares = {"mooncake": [], "nixl": []}
    yield kept
    for backend in [*kept["mooncake"], *kept["nixl"]]:
        backend.close()


@pytest.fixture(params=ALL_BACKENDS)
def make(request: pytest.FixtureRequest, spares: Spares) -> Iterator[BackendMaker]:
    """Makes back ends that can reach each other, and closes them."""
    if request.param != "inprocess" and (reason := why_not(request.param)):
        pytest.skip(reason)
    with BackendMaker(request.param, spares.get(request.param)) as maker:
        yield maker


def connect(receiver: TransferBackend, *memories: Memory) -> Peer:
    for memory in memories:
        receiver.register(memory.region)
    return Peer(receiver.session_id, tuple(memory.region for memory in memories))


def run_between(source: Memory, target: Memory, at: int, to: int, length: int) -> Run:
    return Run(source.region.address + at, target.region.address + to, length)


def test_thousands_of_scattered_runs_land_bit_for_bit(make: BackendMaker) -> None:
    size = 3000 * 913 + 40
    sender, receiver = make(), make()
    source, target = Memory(size), Memory(size, receiver)
    source.fill(3)
    peer = connect(receiver, target)
    sender.register(source.region)
    runs = scattered_runs(source.region, target.region, 3000)
    assert sender.wait(sender.submit(peer, runs), 15).state == "done"
    np.testing.assert_array_equal(target.bytes, expected_bytes(source, target.region, runs))
    target.check_guards()
    assert sender.outstanding() == 0 and sender.drain(0)


def test_neighbouring_pages_travel_as_one_write_but_not_over_a_seam(make: BackendMaker) -> None:
    sender, receiver = make(runs_per_write=1), make()
    source, target = Memory(8192), Memory(8192, receiver)
    source.fill(4)
    for region in (Region(source.region.address, 4096), Region(source.region.address + 4096, 4096)):
        sender.register(region)
    peer = connect(receiver, target)
    over_the_seam = run_between(source, target, 4000, 4000, 200)
    with pytest.raises(TransferError, match="not inside one region that is registered here"):
        sender.submit(peer, [over_the_seam])
    transfer = sender.submit(peer, [run_between(source, target, at, at, 512) for at in range(0, 8192, 512)])
    assert sender.wait(transfer, 10).state == "done"
    np.testing.assert_array_equal(target.bytes, source.bytes)
    assert sender.started == 2


def test_one_transfer_fills_several_regions_and_long_runs_arrive_whole(make: BackendMaker) -> None:
    sender, receiver = make(), make()
    sources = [Memory(3_000_001), Memory(5000)]
    targets = [Memory(3_000_001, receiver), Memory(5000, receiver)]
    peer = connect(receiver, *targets)
    runs = []
    for seed, (source, target) in enumerate(zip(sources, targets, strict=True)):
        source.fill(seed)
        sender.register(source.region)
        runs.append(Run(source.region.address, target.region.address, source.region.length))
    short = [Run(runs[1].source + at, runs[1].target + at, 7) for at in range(0, 4990, 10)]
    assert sender.wait(sender.submit(peer, [runs[0], *short]), 15).state == "done"
    np.testing.assert_array_equal(targets[0].bytes, sources[0].bytes)
    np.testing.assert_array_equal(targets[1].bytes, expected_bytes(sources[1], targets[1].region, short))


def test_a_run_outside_registered_memory_is_refused_and_nothing_is_sent(make: BackendMaker) -> None:
    sender, receiver = make(), make()
    source, target = Memory(1000), Memory(1000, receiver)
    source.bytes[:] = 1
    peer = connect(receiver, target)
    sender.register(source.region)
    good = run_between(source, target, 0, 0, 8)
    for offset in (-1, 1000 - 7, 1 << 40):
        for owner, bad in (
            (source.region, run_between(source, target, offset, 0, 8)),
            (target.region, run_between(source, target, 0, offset, 8)),
        ):
            with pytest.raises(TransferError, match="run 1 of 2") as refusal:
                sender.submit(peer, [good, bad])
            outside = owner.address + offset
            for number in (outside, outside + 8, owner.address, owner.end):
                assert f"{number:#x}" in str(refusal.value)
            assert sender.drain(0) and sender.started == 0, "a part of a refused transfer was sent"
    assert (target.bytes == 0xFF).all()


def test_overlapping_and_unknown_registrations_are_refused(make: BackendMaker) -> None:
    backend = make()
    memory = Memory(4096, backend)
    region = memory.region
    backend.register(region)
    for other in (region, Region(region.end - 1, 64), Region(region.address - 63, 64), Region(region.address + 8, 8)):
        with pytest.raises(TransferError, match=f"overlaps.*{region.address:#x}.*registered already"):
            backend.register(other)
    with pytest.raises(TransferError, match="must both be above 0"):
        backend.register(Region(region.end, 0))
    with pytest.raises(TransferError, match="is not registered here"):
        backend.unregister(Region(region.address, 8))
    backend.unregister(region)
    backend.register(region)


@pytest.mark.parametrize("contact", ["before", "never"])
def test_memory_that_the_peer_withdrew_takes_no_write(make: BackendMaker, contact: str) -> None:
    receiver, sender = make(), make()
    source, target, other = Memory(64), Memory(64, receiver), Memory(64, receiver)
    peer = connect(receiver, target, other)
    sender.register(source.region)
    run = run_between(source, target, 0, 0, 64)
    if contact == "before":
        source.bytes[:] = 1
        assert sender.wait(sender.submit(peer, [run]), 10).state == "done"
        target.bytes[:] = 0xFF
    source.bytes[:] = 2
    receiver.unregister(target.region)
    status = sender.wait(sender.submit(peer, [run]), 10)
    assert status.state == "failed" and f"{target.region.address:#x} at peer {peer.session_id}" in status.cause
    assert (target.bytes == 0xFF).all()
    again = sender.submit(peer, [run_between(source, other, 0, 0, 64)])
    assert sender.wait(again, 10).state == "done" and (other.bytes == 2).all(), "one refusal ends nothing else"


def test_a_peer_that_is_not_there_fails_the_transfer_soon(make: BackendMaker) -> None:
    source = Memory(64)
    sender, gone = make(), make.new()  # no engine that the sender knows from an earlier test
    sender.register(source.region)
    gone.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    for session_id in (nobody, gone.session_id, "no session at all"):
        begun = time.monotonic()
        transfer = sender.submit(Peer(session_id, (source.region,)), [run_between(source, source, 0, 0, 64)])
        status = sender.wait(transfer, 10)
        assert status.state == "failed" and time.monotonic() - begun < 10
        assert session_id in status.cause and ("is not there" in status.cause or "no address" in status.cause)
        assert sender.poll(transfer) == status, "the first cause is kept"


def test_other_peers_are_served_while_one_is_gone(make: BackendMaker) -> None:
    sender, gone, there = make(), make.new(), make()
    source, target = Memory(4096), Memory(4096, there)
    source.bytes[:] = 7
    sender.register(source.region)
    lost, peer = Peer(gone.session_id, (target.region,)), connect(there, target)
    gone.close()
    runs = [run_between(source, target, at, at, 63) for at in range(0, 4096, 64)]
    failing, good = sender.submit(lost, runs), sender.submit(peer, runs)
    assert sender.drain(10)
    assert sender.poll(good).state == "done" and "is not there" in sender.poll(failing).cause


@pytest.mark.parametrize("cap", [1, 3, 16])
def test_the_cap_on_writes_per_peer_is_reached_and_never_exceeded(make: BackendMaker, cap: int) -> None:
    sender = make(max_outstanding_per_peer=cap, runs_per_write=1)
    receivers = [make(), make()]
    source = Memory(1 << 20)
    targets = [Memory(1 << 20, receiver) for receiver in receivers]
    source.fill(cap)
    sender.register(source.region)
    for receiver, target in zip(receivers, targets, strict=True):
        peer = connect(receiver, target)
        runs = pieces(source.region, target.region, 1024)
        for half in (runs[:512], runs[512:]):  # two transfers to one peer share its cap
            sender.submit(peer, half)
    assert sender.drain(15)
    assert sender.peak_per_peer == cap
    assert cap < sender.peak <= 2 * cap, "each peer has a cap of its own"
    for target in targets:
        rows = target.bytes.reshape(-1, 1024)
        np.testing.assert_array_equal(rows[:, :1023], source.bytes.reshape(-1, 1024)[:, :1023])
        assert (rows[:, 1023] == 0xFF).all()


def test_two_senders_fill_one_receiver(make: BackendMaker) -> None:
    receiver, senders = make(), [make(), make()]
    target = Memory(4 << 20, receiver)
    peer = connect(receiver, target)
    sources = [Memory(4 << 20), Memory(4 << 20)]
    transfers = []
    for number, (sender, source) in enumerate(zip(senders, sources, strict=True)):
        source.bytes[:] = number + 1
        sender.register(source.region)
        runs = pieces(source.region, target.region, 4096)[number::2]
        transfers.append(sender.submit(peer, runs))
    assert eventually(lambda: all(s.poll(t).state != "pending" for s, t in zip(senders, transfers, strict=True)), 15)
    assert [s.poll(t).state for s, t in zip(senders, transfers, strict=True)] == ["done", "done"]
    assert all(sender.peak_bytes <= sender.max_bytes_per_write for sender in senders)
    rows = target.bytes.reshape(-1, 2, 4096)
    assert (rows[:, 0, :-1] == 1).all() and (rows[:, 1, :-1] == 2).all() and (rows[:, :, -1] == 0xFF).all()


def test_a_peer_closed_in_the_middle_fails_the_transfer(make: BackendMaker) -> None:
    # Few writes are in flight, so that most of the transfer waits for a poll that comes after the end.
    receiver, sender = make(), make(max_outstanding_per_peer=2, runs_per_write=4)
    source, target = Memory(16 << 20), Memory(16 << 20, receiver)
    peer = connect(receiver, target)
    sender.register(source.region)
    source.bytes[:] = 5
    transfer = sender.submit(peer, pieces(source.region, target.region, 1 << 16))
    while not (target.bytes[0] == 5 and sender.poll(transfer).state == "pending"):
        assert sender.poll(transfer).state == "pending", "it was over before the peer could go"
    receiver.close()
    target.bytes[:] = 0xFF
    status = sender.wait(transfer, 15)
    assert status.state == "failed" and peer.session_id in status.cause
    assert (target.bytes == 0xFF).all(), "close is a fence at the receiver"
    assert sender.outstanding() == 0 and sender.drain(0)


def test_an_engine_can_be_closed_and_made_again_over_the_same_memory(make: BackendMaker) -> None:
    sender, receiver = make(), make()
    source, target = Memory(4096), Memory(4096, receiver)
    sender.register(source.region)
    peer = connect(receiver, target)
    for seed, rebuilt in enumerate(("", "receiver", "sender")):
        if rebuilt == "receiver":
            receiver.close()
            receiver = make.new()
            peer = connect(receiver, target)
        elif rebuilt == "sender":
            sender.close()
            sender = make.new()
            sender.register(source.region)
        source.fill(seed)
        status = sender.wait(sender.submit(peer, [run_between(source, target, 0, 0, 4096)]), 10)
        assert status.state == "done", f"{rebuilt} rebuilt: {status.cause}"
        np.testing.assert_array_equal(target.bytes, source.bytes)
    sender.close()
    receiver.close()


def test_close_is_idempotent_final_and_leaves_nothing(make: BackendMaker) -> None:
    exchange_and_close(make)  # what the library keeps for the life of the process is there from here on
    before = open_files_and_threads()
    exchange_and_close(make)
    # The system takes a moment for a thread that has ended, and what earlier tests left may end meanwhile.
    eventually(lambda: all(now <= then for now, then in zip(open_files_and_threads(), before, strict=True)), 5)
    assert all(now <= then for now, then in zip(open_files_and_threads(), before, strict=True)), "something was left"


def open_files_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def exchange_and_close(make: BackendMaker) -> None:
    sender, receiver = make(), make()
    source, target = Memory(64), Memory(64, receiver)
    peer = connect(receiver, target)
    sender.register(source.region)
    done = sender.submit(peer, [run_between(source, target, 0, 0, 64)])
    assert sender.wait(done, 10).state == "done"
    late = sender.submit(peer, [run_between(source, target, i, i, 1) for i in range(0, 64, 2)])
    for _ in range(2):
        sender.close()
        receiver.close()
    assert sender.poll(done).state == "done" and "closed before" in sender.poll(late).cause
    assert sender.drain(0) and sender.outstanding() == 0 and "closed" in repr(sender)
    for refused in (lambda: sender.register(source.region), lambda: sender.submit(peer, [])):
        with pytest.raises(TransferError, match="is closed; make a new one"):
            refused()
    gc.collect()


def test_an_empty_transfer_is_done_and_unknown_ids_and_caps_are_refused(make: BackendMaker) -> None:
    sender, receiver = make(), make()
    transfer = sender.submit(Peer(receiver.session_id, ()), [])
    assert sender.poll(transfer).state == "done"
    for unknown in (0, transfer + 1, -1):
        with pytest.raises(TransferError, match=f"transfer {unknown} was never submitted"):
            sender.poll(unknown)
    with pytest.raises(ConfigError, match="max_outstanding_per_peer is 0"):
        make(max_outstanding_per_peer=0)
