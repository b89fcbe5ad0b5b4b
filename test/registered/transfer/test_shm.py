"""What is particular to shared memory: where a peer may be, what may be mapped, taking memory back, liars."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from cpkv.errors import ConfigError, TransferError
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.row_format import RowFormat
from cpkv.pool.page_pool import PagePool
from cpkv.testing.backends import Memory, PeerProcess, eventually, pieces
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer import shm_receiver, shm_wire
from cpkv.transfer.runs import Peer, Region, Run
from cpkv.transfer.shm import ShmBackend
from cpkv.transfer.shm_segment import NEEDED_SEALS, address_of, allocate_segment, find_segment, why_not_segment
from cpkv.transfer.shm_wire import (
    SHM_VERSION,
    Ask,
    Call,
    Gone,
    PacketSocket,
    Refused,
    Segment,
    ToReceiver,
    ToSender,
    Withdraw,
    address_of_token,
    make_session_id,
    socket_address,
)

register_cpu_ci(est_time=8, suite="transfer")

PATIENCE_S = 10.0
SENDER_PROGRAM = """
import sys
from cpkv.testing.backends import Memory
from cpkv.transfer.runs import Peer, Region, Run
from cpkv.transfer.shm import ShmBackend
with ShmBackend() as sender:
    source = Memory(64)
    source.bytes[:] = 7
    sender.register(source.region)
    target = Region(int(sys.argv[2]), 64)
    run = Run(source.region.address, target.address, 64)
    print(sender.wait(sender.submit(Peer(sys.argv[1], (target,)), [run]), 10).state, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def receiver() -> Iterator[ShmBackend]:
    if reason := ShmBackend.why_not():
        pytest.skip(reason)
    with ShmBackend(transfer_timeout_s=1) as backend:
        yield backend


def cause_of_write(sender: ShmBackend, session_id: str, target: Region) -> str:
    """Why a write of 64 bytes failed; empty if it did not."""
    source = Memory(64)
    source.bytes[:] = 3
    sender.register(source.region)
    run = Run(source.region.address, target.address, 64)
    status = sender.wait(sender.submit(Peer(session_id, (target,)), [run]), PATIENCE_S)
    assert status.state != "pending"
    sender.unregister(source.region)
    return status.cause


def packets_to(address: bytes) -> PacketSocket:
    """A raw sender."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    connection.connect(address)
    return PacketSocket(connection, ToSender)


def is_closed(packets: PacketSocket) -> bool:
    try:
        while True:
            _, descriptor = packets.receive()
            assert descriptor is None, "memory was handed out"
    except ConnectionError:
        packets.socket.close()
        return True


def test_a_peer_elsewhere_is_refused_with_the_reason_and_what_works_there(receiver: ShmBackend) -> None:
    here, network = shm_wire.host_word().split("/")
    for place, says in (
        (f"00000000-1111-2222-3333-444444444444/{network}", f"runs on another host .*{here} here"),
        (f"{here}/1", f"another network namespace of this host .1 there, {network} here"),
    ):
        session_id = receiver.session_id.replace(f"{here}/{network}", place)
        with ShmBackend() as sender:
            cause = cause_of_write(sender, session_id, Region(4096, 64))
        assert session_id in cause and "use --transfer tcp or mooncake" in cause
        with pytest.raises(TransferError, match=says):
            socket_address(session_id)


def test_other_memory_can_be_sent_from_but_not_written_to(receiver: ShmBackend) -> None:
    ordinary, shared = Memory(64), Memory(64, receiver)
    for memory in (ordinary, shared):
        receiver.register(memory.region)
    with ShmBackend() as sender:
        cause = cause_of_write(sender, receiver.session_id, ordinary.region)
        assert "memory of allocate_target" in cause and (ordinary.bytes == 0xFF).all()
        assert cause_of_write(sender, receiver.session_id, shared.region) == "" and (shared.bytes == 3).all()


def test_a_pool_on_such_memory_takes_its_pages(receiver: ShmBackend) -> None:
    geometry = PoolGeometry(RowFormat("bfloat16", 5, 2, "fp8", 4), 4, index_slots((True, False)))
    latent_bytes, index_bytes = 6 * geometry.latent_page_bytes, 6 * geometry.index_page_bytes
    memory = [
        torch.frombuffer(receiver.allocate_target(size), dtype=torch.uint8) for size in (latent_bytes, index_bytes)
    ]
    sent, taken = PagePool(geometry, 6), PagePool(geometry, 6, memory=(memory[0], memory[1]))
    regions = [Region(*span) for span in taken.regions()]
    assert not any(taken.latent.flatten()) and not any(taken.index.flatten())
    with ShmBackend() as sender:
        for here, there in zip(sent.regions(), regions, strict=True):
            sender.register(Region(*here))
            receiver.register(there)
        sent.poison([3])
        runs = [
            Run(source.address, target.address, source.length)
            for source, target in zip(sent.page_spans(3), taken.page_spans(5), strict=True)
        ]
        assert sender.wait(sender.submit(Peer(receiver.session_id, tuple(regions)), runs), PATIENCE_S).cause == ""
    assert taken.page_digest(5) == sent.page_digest(3) and taken.page_digest(4) == sent.page_digest(1)


def test_a_sender_that_is_stopped_holds_memory_until_it_has_ended(receiver: ShmBackend) -> None:
    target, other = Memory(64, receiver), Memory(64, receiver)
    for memory in (target, other):
        receiver.register(memory.region)
    command = [sys.executable, "-c", SENDER_PROGRAM, receiver.session_id, str(target.region.address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "done\n" and (target.bytes == 7).all()
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        begun = time.monotonic()
        receiver.unregister(other.region)
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"process {process.pid} has not let go of .*within 0.5 s"):
                receiver.unregister(target.region)
        assert 0.9 < time.monotonic() - begun < 5
        with ShmBackend() as sender:
            assert "is not inside one region" in cause_of_write(sender, receiver.session_id, target.region)
        process.kill()
        process.wait(PATIENCE_S)
        receiver.unregister(target.region)


def test_memory_is_let_go_of_by_senders_that_run_and_mapped_anew(receiver: ShmBackend) -> None:
    target = Memory(1 << 20, receiver)
    source = Memory(1 << 20)
    source.fill(4)
    runs = pieces(source.region, target.region, 256)
    mappings = Path("/proc/self/maps")
    with ShmBackend() as sender:
        sender.register(source.region)
        before = mappings.read_text().count("/memfd:cpkv-transfer")
        for _ in range(3):
            receiver.register(target.region)
            peer = Peer(receiver.session_id, (target.region,))
            assert sender.wait(sender.submit(peer, runs), PATIENCE_S).cause == ""
            assert mappings.read_text().count("/memfd:cpkv-transfer") == before + 1
            receiver.unregister(target.region)
            assert mappings.read_text().count("/memfd:cpkv-transfer") == before, "the sender still maps it"
    np.testing.assert_array_equal(target.bytes.reshape(-1, 256)[:, :-1], source.bytes.reshape(-1, 256)[:, :-1])


def test_memory_stays_valid_at_the_sender_when_the_peer_has_died() -> None:
    peer = PeerProcess("shm", 1 << 20, 10)
    try:
        with ShmBackend() as sender:
            assert cause_of_write(sender, peer.peer.session_id, peer.region) == ""
            (mapped,) = sender._peers[peer.peer.session_id]._mapped
            memory = np.frombuffer(mapped.memory, np.uint8)
            peer.process.kill()
            peer.process.wait(PATIENCE_S)
            memory[:] = 5
            segment = find_segment(Region(memory.ctypes.data, memory.size))
            assert segment is not None
            with pytest.raises(PermissionError):
                os.ftruncate(segment.descriptor, 0)
            os.close(segment.descriptor)
            assert memory.sum() == 5 * memory.size, "touching it would end this process otherwise"
            assert eventually(lambda: bool(sender._peers[peer.peer.session_id].broken))
            assert "is not there" in cause_of_write(sender, peer.peer.session_id, peer.region)
    finally:
        peer.close()


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\xc1 no message",
        bytes(5000),
        msgspec.msgpack.encode(Ask(0, 64)),
        msgspec.msgpack.encode(Call(SHM_VERSION + 1)),
        msgspec.msgpack.encode(Refused("that is for you to say")),
        b"\x91" * 4000,
    ],
)
def test_a_malformed_packet_ends_its_connection_and_no_other(receiver: ShmBackend, says: bytes) -> None:
    target = Memory(64, receiver)
    receiver.register(target.region)
    with ShmBackend() as sender:
        assert cause_of_write(sender, receiver.session_id, target.region) == ""
        open_files = len(os.listdir("/proc/self/fd"))
        for descriptors in ([], [0], [0] * 5):
            packets = packets_to(socket_address(receiver.session_id))
            socket.send_fds(packets.socket, [says], descriptors)
            assert is_closed(packets)
        packets = packets_to(socket_address(receiver.session_id))
        socket.send_fds(packets.socket, [msgspec.msgpack.encode(Call(SHM_VERSION))], [0])
        assert is_closed(packets), "nobody needs our descriptors"
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) == open_files), "descriptors that came were kept"
        target.bytes[:] = 0xFF
        assert cause_of_write(sender, receiver.session_id, target.region) == "" and (target.bytes == 3).all()


def test_another_user_and_too_many_senders_are_refused(receiver: ShmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Memory(64, receiver)
    receiver.register(target.region)
    ours = os.geteuid()
    with monkeypatch.context() as patch, ShmBackend() as sender:
        patch.setattr(os, "geteuid", lambda: ours + 1)
        assert f"runs as user {ours} and this one as {ours + 1}" in cause_of_write(
            sender, receiver.session_id, target.region
        )
        packets = packets_to(socket_address(receiver.session_id))
        packets.send(Call(SHM_VERSION))
        assert is_closed(packets)
    monkeypatch.setattr(shm_receiver, "MAX_CONNECTIONS", 0)
    assert is_closed(packets_to(socket_address(receiver.session_id)))
    monkeypatch.undo()
    with ShmBackend() as sender:
        assert cause_of_write(sender, receiver.session_id, target.region) == ""


def memory_file(size: int, *, allocate: bool = True, seals: int = NEEDED_SEALS) -> int:
    descriptor = os.memfd_create("cpkv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if allocate:
        os.posix_fallocate(descriptor, 0, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: memory_file(1 << 16), None),
        (lambda: memory_file(1 << 16, seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "not sealed against shrinking"),
        (lambda: memory_file(1 << 16, seals=NEEDED_SEALS | 0x10), "sealed against writing"),
        (lambda: memory_file(4096), "has 4096 bytes and 65536 are needed"),
        (lambda: memory_file(1 << 16, allocate=False), "only 0 of its 65536 bytes have memory"),
        (lambda: os.open(__file__, os.O_RDONLY), "a file on a disk"),
        (lambda: os.pipe()[0], "no memory file"),
    ],
)
def test_only_memory_that_cannot_vanish_is_mapped(make: Callable[[], int], says: str | None) -> None:
    descriptor = make()
    reason = why_not_segment(descriptor, 1 << 16)
    os.close(descriptor)
    assert (reason is None) if says is None else (reason is not None and says in reason)


class LyingReceiver:
    """A receiver whose every packet the test sends."""

    def __init__(self) -> None:
        token = f"test{os.getpid()}x{id(self)}"
        self.session_id = make_session_id(token)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(address_of_token(token))
        self.listener.listen(1)
        self.listener.settimeout(PATIENCE_S)

    def accept(self) -> PacketSocket:
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE_S)
        packets = PacketSocket(connection, ToReceiver)
        assert packets.receive() == (Call(SHM_VERSION), None)
        return packets


@pytest.fixture
def liar() -> Iterator[LyingReceiver]:
    found = LyingReceiver()
    yield found
    found.listener.close()


def test_a_region_taken_back_while_another_is_asked_for_is_not_written_to(liar: LyingReceiver) -> None:
    source = Memory(128)
    first, second = Region(1 << 30, 64), Region(1 << 31, 64)
    runs = [Run(source.region.address, first.address, 64), Run(source.region.address + 64, second.address, 64)]
    with ShmBackend() as sender:
        sender.register(source.region)
        transfer = sender.submit(Peer(liar.session_id, (first, second)), runs)
        packets = liar.accept()
        segments = [memory_file(4096) for _ in range(2)]
        assert packets.receive()[0] == Ask(first.address, 64)
        packets.send(Segment(first.address, 64, 0), segments[0])
        assert packets.receive()[0] == Ask(second.address, 64)
        packets.send(Withdraw(first.address, 64))
        packets.send(Segment(second.address, 64, 0), segments[1])
        assert packets.receive()[0] == Gone(first.address, 64)
        assert packets.receive()[0] == Ask(first.address, 64)
        packets.send(Refused("it is gone"))
        assert "refused the write: it is gone" in sender.wait(transfer, PATIENCE_S).cause
        for descriptor in segments:
            with mmap.mmap(descriptor, 4096) as memory:
                assert not any(memory[:64]), "a part of a refused write has landed"
            os.close(descriptor)
        packets.socket.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Segment(1 << 30, 63, 0), "a region that was not asked for"),
        (Segment(1 << 30, 64, 4090), "has 4096 bytes and 4154 are needed"),
        (None, "has not answered for 0.25 s: it is stopped"),
        (b"\xc1", "none of those expected here"),
        (b"", "it has died or was closed"),
    ],
)
def test_a_receiver_that_misbehaves_fails_its_writes(
    liar: LyingReceiver, answer: Segment | bytes | None, says: str
) -> None:
    source = Memory(64)
    with ShmBackend(transfer_timeout_s=0.5) as sender:
        sender.register(source.region)
        run = Run(source.region.address, 1 << 30, 64)
        transfer = sender.submit(Peer(liar.session_id, (Region(1 << 30, 64),)), [run])
        packets = liar.accept()
        assert packets.receive()[0] == Ask(1 << 30, 64)
        if isinstance(answer, Segment):
            descriptor = memory_file(4096)
            packets.send(answer, descriptor)
            os.close(descriptor)
        elif answer:
            packets.socket.send(answer)
        elif answer is not None:
            packets.socket.close()
        assert says in sender.wait(transfer, PATIENCE_S).cause
        packets.socket.close()


def test_a_mapping_that_the_system_has_split_is_found_whole() -> None:
    memory = allocate_segment(3 * 4096)
    whole = memory.obj
    assert isinstance(whole, mmap.mmap)
    whole.madvise(mmap.MADV_DONTFORK, 4096, 4096)
    start = address_of(memory)
    for offset, length in ((0, 3 * 4096), (100, 8192), (8192, 4096)):
        segment = find_segment(Region(start + offset, length))
        assert segment is not None and segment.offset == offset
        os.close(segment.descriptor)
    # A mapping of the file's first page alone: the file goes on, the mapping does not.
    segment = find_segment(Region(start, 1))
    assert segment is not None
    with mmap.mmap(segment.descriptor, 4096) as first_page:
        assert find_segment(Region(address_of(first_page), 4097)) is None
    os.close(segment.descriptor)
    assert find_segment(Memory(64).region) is None


def test_bad_sizes_are_refused() -> None:
    with ShmBackend() as backend:
        with pytest.raises(ConfigError, match="0 bytes of shared memory"):
            backend.allocate_target(0)
        with pytest.raises(ConfigError, match="bytes are available"):
            backend.allocate_target(1 << 50)
    with pytest.raises(ConfigError, match="transfer_timeout_s is -1"):
        ShmBackend(transfer_timeout_s=-1)
