"""What every transfer back end promises, tried on each: in-process copies, and real Mooncake engines over loopback."""

from __future__ import annotations

import gc
import os
import random
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cpkv.errors import ConfigError, TransferError
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.backend import Peer, Region, Run, TransferBackend
from cpkv.transfer.inprocess import InProcessBackend, InProcessFabric
from cpkv.transfer.mooncake import MooncakeBackend

register_cpu_ci(est_time=25, suite="transfer")

GUARD = 4096
Make = Callable[..., TransferBackend]
Held = tuple[InProcessFabric, InProcessBackend, Peer, "Memory", "Memory"]


class Memory:
    """`length` bytes between two guard bands of 0xFF; all of it starts as 0xFF."""

    def __init__(self, length: int) -> None:
        self._all = np.full(length + 2 * GUARD, 0xFF, np.uint8)
        self.bytes = self._all[GUARD : GUARD + length]
        self.region = Region(self.bytes.ctypes.data, length)

    def check_guards(self) -> None:
        assert (self._all[:GUARD] == 0xFF).all(), "bytes landed before the region"
        assert (self._all[-GUARD:] == 0xFF).all(), "bytes landed behind the region"


class Counted:
    """Mixed into a back end: how many writes it started, and the most in flight at one peer and in all."""

    started = 0
    peak_per_peer = 0
    peak = 0

    def _submit_write(self, session_id: str, run: Run) -> int:
        handle = super()._submit_write(session_id, run)  # type: ignore[misc]
        self.started += 1
        self.peak_per_peer = max(self.peak_per_peer, len(self._lanes[session_id].in_flight) + 1)  # type: ignore[attr-defined]
        self.peak = max(self.peak, self.outstanding() + 1)  # type: ignore[attr-defined]
        return handle


class CountedInProcess(Counted, InProcessBackend):
    pass


class CountedMooncake(Counted, MooncakeBackend):
    pass


@pytest.fixture(params=["inprocess", "mooncake"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes back ends that can reach each other, and closes them."""
    made: list[TransferBackend] = []
    fabric = InProcessFabric()
    if request.param == "mooncake" and (reason := MooncakeBackend.why_not()):
        pytest.skip(reason)

    def build(**options: int) -> TransferBackend:
        in_process = request.param == "inprocess"
        made.append(CountedInProcess(fabric, **options) if in_process else CountedMooncake(**options))
        return made[-1]

    yield build
    for backend in made:
        backend.close()


@pytest.fixture
def held() -> Iterator[Held]:
    """A sender, a peer and their memory on a fabric that holds every write; 8 writes may be in flight."""
    fabric = InProcessFabric()
    fabric.hold()
    source, target = Memory(4096), Memory(4096)
    source.bytes[:] = np.arange(4096) % 251
    with InProcessBackend(fabric) as receiver, CountedInProcess(fabric, max_outstanding_per_peer=8) as sender:
        sender.register(source.region)
        receiver.register(target.region)
        yield fabric, sender, Peer(receiver.session_id, (target.region,)), source, target


def connect(receiver: TransferBackend, *memories: Memory) -> Peer:
    for memory in memories:
        receiver.register(memory.region)
    return Peer(receiver.session_id, tuple(memory.region for memory in memories))


def run_between(source: Memory, target: Memory, at: int, to: int, length: int) -> Run:
    return Run(source.region.address + at, target.region.address + to, length)


def scattered(count: int) -> list[tuple[int, int, int]]:
    """(offset in the source, offset in the target, length): odd lengths and gaps, and both orders shuffled."""
    rng = random.Random(count)
    lengths = [rng.randrange(1, 900, 2) for _ in range(count)]
    places = []
    for _ in range(2):
        at, offsets = rng.randrange(40), [0] * count
        for i in rng.sample(range(count), count):
            offsets[i] = at
            at += lengths[i] + rng.choice([0, 1, 13])
        places.append(offsets)
    return list(zip(*places, lengths, strict=True))


def test_thousands_of_scattered_runs_land_bit_for_bit(make: Make) -> None:
    pieces = scattered(3000)
    size = max(max(at, to) + length for at, to, length in pieces)
    source, target = Memory(size), Memory(size)
    source.bytes[:] = np.random.default_rng(3).integers(0, 255, size, np.uint8)
    expected = np.full(size, 0xFF, np.uint8)
    for at, to, length in pieces:
        expected[to : to + length] = source.bytes[at : at + length]
    sender, peer = make(), connect(make(), target)
    sender.register(source.region)
    transfer = sender.submit(peer, [run_between(source, target, *piece) for piece in pieces])
    assert sender.wait(transfer, 15).state == "done"
    np.testing.assert_array_equal(target.bytes, expected)
    target.check_guards()
    assert sender.outstanding() == 0 and sender.drain(0)


def test_neighbouring_pages_travel_as_one_write_but_not_over_a_seam(make: Make) -> None:
    source, target = Memory(8192), Memory(8192)
    source.bytes[:] = np.arange(8192) % 253
    seam = [Region(source.region.address, 4096), Region(source.region.address + 4096, 4096)]
    sender, peer = make(), connect(make(), target)
    for region in seam:
        sender.register(region)
    transfer = sender.submit(peer, [run_between(source, target, at, at, 512) for at in range(0, 8192, 512)])
    assert sender.wait(transfer, 10).state == "done"
    np.testing.assert_array_equal(target.bytes, source.bytes)
    assert sender.started == 2


def test_a_run_outside_registered_memory_is_refused_and_nothing_is_sent(make: Make) -> None:
    source, target = Memory(1000), Memory(1000)
    source.bytes[:] = 1
    sender, peer = make(), connect(make(), target)
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


def test_overlapping_and_unknown_registrations_are_refused(make: Make) -> None:
    memory, backend = Memory(4096), make()
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


def test_memory_that_the_peer_withdrew_takes_no_write(make: Make) -> None:
    source, target = Memory(64), Memory(64)
    receiver, sender = make(), make()
    peer = connect(receiver, target)
    sender.register(source.region)
    source.bytes[:] = 1
    receiver.unregister(target.region)
    status = sender.wait(sender.submit(peer, [run_between(source, target, 0, 0, 64)]), 10)
    assert status.state == "failed" and f"{target.region.address:#x} at peer {peer.session_id}" in status.cause
    assert (target.bytes == 0xFF).all()


def test_a_peer_that_is_not_there_fails_the_transfer_soon(make: Make) -> None:
    source = Memory(64)
    sender = make()
    sender.register(source.region)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    for session_id in (nobody, "no session at all"):
        begun = time.monotonic()
        transfer = sender.submit(Peer(session_id, (source.region,)), [run_between(source, source, 0, 0, 64)])
        status = sender.wait(transfer, 10)
        assert status.state == "failed" and time.monotonic() - begun < 10
        assert session_id in status.cause and ("is not there" in status.cause or "no address" in status.cause)
        assert sender.poll(transfer) == status, "the first cause is kept"


def test_other_peers_are_served_while_one_is_gone(make: Make) -> None:
    source, target = Memory(4096), Memory(4096)
    source.bytes[:] = 7
    sender, gone, there = make(), make(), make()
    sender.register(source.region)
    lost, peer = Peer(gone.session_id, (target.region,)), connect(there, target)
    gone.close()
    runs = [run_between(source, target, at, at, 63) for at in range(0, 4096, 64)]
    failing, good = sender.submit(lost, runs), sender.submit(peer, runs)
    assert sender.drain(10)
    assert sender.poll(good).state == "done" and "is not there" in sender.poll(failing).cause


@pytest.mark.parametrize("cap", [1, 3, 16])
def test_the_cap_on_writes_per_peer_is_reached_and_never_exceeded(make: Make, cap: int) -> None:
    source = Memory(1 << 20)
    targets = [Memory(1 << 20), Memory(1 << 20)]
    source.bytes[:] = np.random.default_rng(cap).integers(0, 255, 1 << 20, np.uint8)
    sender = make(max_outstanding_per_peer=cap)
    sender.register(source.region)
    for target in targets:
        peer = connect(make(), target)
        for half in (0, 1 << 19):  # two transfers to one peer share its cap
            sender.submit(
                peer, [run_between(source, target, half + at, half + at, 999) for at in range(0, 1 << 19, 1024)]
            )
    assert sender.drain(15)
    assert sender.peak_per_peer == cap
    assert cap < sender.peak <= 2 * cap, "each peer has a cap of its own"
    for target in targets:
        rows = slice(None), slice(0, 999)
        np.testing.assert_array_equal(target.bytes.reshape(-1, 1024)[rows], source.bytes.reshape(-1, 1024)[rows])
        assert (target.bytes.reshape(-1, 1024)[:, 999:] == 0xFF).all()


def test_a_peer_closed_in_the_middle_fails_the_transfer(make: Make) -> None:
    source, target = Memory(32 << 20), Memory(32 << 20)
    receiver, sender = make(), make()
    peer = connect(receiver, target)
    sender.register(source.region)
    source.bytes[:] = 5
    runs = [run_between(source, target, at, at, (1 << 16) - 1) for at in range(0, 32 << 20, 1 << 16)]
    transfer = sender.submit(peer, runs)
    while not (target.bytes[0] == 5 and sender.poll(transfer).state == "pending"):
        assert sender.poll(transfer).state == "pending", "it was over before the peer could go"
    receiver.close()
    status = sender.wait(transfer, 15)
    assert status.state == "failed" and peer.session_id in status.cause
    assert sender.outstanding() == 0 and sender.drain(0)


def test_close_is_idempotent_final_and_leaves_nothing(make: Make) -> None:
    make().close()  # what the library keeps for the life of the process is there from here on
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    source, target = Memory(64), Memory(64)
    sender, receiver = make(), make()
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
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


def test_an_empty_transfer_is_done_and_unknown_ids_and_caps_are_refused(make: Make) -> None:
    sender, receiver = make(), make()
    assert sender.poll(sender.submit(Peer(receiver.session_id, ()), [])).state == "done"
    for unknown in (0, 2, -1):
        with pytest.raises(TransferError, match=f"transfer {unknown} was never submitted"):
            sender.poll(unknown)
    with pytest.raises(ConfigError, match="max_outstanding_per_peer is 0"):
        make(max_outstanding_per_peer=0)


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
