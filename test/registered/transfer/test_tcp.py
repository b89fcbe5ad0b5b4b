"""What is particular to plain sockets: strangers, malformed frames, the receiver's own check, fences, liars."""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cpkv.errors import ConfigError, HandshakeError, TransferError
from cpkv.protocol.sealing import GREETING_BYTES, FrameSeal, Greeting
from cpkv.testing.backends import SECRET, Memory, eventually, pieces
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer import tcp_receiver
from cpkv.transfer.bounded_socket import BoundedSocket
from cpkv.transfer.runs import Peer, Run
from cpkv.transfer.tcp import TcpBackend
from cpkv.transfer.tcp_wire import ANSWER, HEAD, pack_answer, pack_write, prove

register_cpu_ci(est_time=8, suite="transfer")

PATIENCE_S = 10.0


def untouched(memory: Memory) -> bool:
    return bool((memory.everything == 0xFF).all())


class Raw:
    """A connection to a receiver that has proved the secret and then sends whatever the test likes."""

    def __init__(self, backend: TcpBackend, *, secret: str | None = SECRET) -> None:
        host, _, port = backend.session_id.rpartition(":")
        self.link = BoundedSocket(socket.create_connection((host, int(port)), PATIENCE_S))
        # What is sent has to be there when the connection is reset.
        self.link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if secret is not None:
            prove(self.link, "client", secret, self.deadline())

    @staticmethod
    def deadline() -> float:
        return time.monotonic() + PATIENCE_S

    def send(self, content: bytes) -> None:
        self.link.write(content, self.deadline())

    def answer(self) -> str:
        _, length = ANSWER.unpack(self.link.read(ANSWER.size, self.deadline()))
        return self.link.read(length, self.deadline()).decode()

    def is_closed(self) -> bool:
        """Whether the other end closes it, after what it has sent."""
        try:
            while True:
                self.link.read(1, self.deadline())
        except ConnectionError:
            return True

    def reset(self) -> None:
        self.link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.link.close()


@pytest.fixture
def receiver() -> Iterator[TcpBackend]:
    with TcpBackend(secret=SECRET, transfer_timeout_s=1) as backend:
        yield backend


@pytest.fixture
def target(receiver: TcpBackend) -> Memory:
    memory = Memory(4096)
    receiver.register(memory.region)
    return memory


def check_served(receiver: TcpBackend, memory: Memory) -> None:
    """A good sender gets through, whatever others do."""
    with TcpBackend(secret=SECRET) as sender:
        source = Memory(memory.region.length)
        source.bytes[:] = 9
        sender.register(source.region)
        peer = Peer(receiver.session_id, (memory.region,))
        run = Run(source.region.address, memory.region.address, memory.region.length)
        assert sender.wait(sender.submit(peer, [run]), PATIENCE_S).cause == ""
        assert (memory.bytes == 9).all()
    memory.bytes[:] = 0xFF


def cause_of_write(sender: TcpBackend, session_id: str) -> str:
    source = Memory(64)
    sender.register(source.region)
    run = Run(source.region.address, source.region.address, 64)
    status = sender.wait(sender.submit(Peer(session_id, (source.region,)), [run]), PATIENCE_S)
    assert status.state == "failed"
    sender.unregister(source.region)
    return status.cause


def test_strangers_get_nothing_written(receiver: TcpBackend, target: Memory) -> None:
    write = pack_write(1, [Run(0, target.region.address, 64)]) + bytes(64)
    silent = Raw(receiver, secret=None)
    for says in (b"GET / HTTP/1.1\r\n\r\n", write * 9, bytes(GREETING_BYTES), Greeting.of("").encode() + write):
        stranger = Raw(receiver, secret=None)
        stranger.send(says)
        assert stranger.is_closed()
        stranger.link.close()
    with pytest.raises(HandshakeError, match="another secret"):
        Raw(receiver, secret="not the secret of this run")
    assert silent.is_closed(), "whoever does not prove the secret in time is closed"
    silent.link.close()
    assert untouched(target)
    check_served(receiver, target)


def test_a_proof_is_of_use_on_one_data_connection_only(receiver: TcpBackend, target: Memory) -> None:
    write = pack_write(1, [Run(0, target.region.address, 64)]) + bytes(64)
    proofs = []
    for text in (b"cpkv data", b""):  # the second is what a control connection proves itself by
        client = Raw(receiver, secret=None)
        ours = Greeting.of(SECRET)
        theirs = Greeting.decode(bytes(client.link.read(GREETING_BYTES, client.deadline())))
        proofs.append(ours.encode() + FrameSeal(SECRET, "client", ours, theirs).seal(text))
        if text:
            client.link.close()
    client.send(proofs[1] + write)
    assert client.is_closed(), "the proof of a control connection was taken"
    client.link.close()
    replayed = Raw(receiver, secret=None)
    replayed.send(proofs[0] + write)
    assert replayed.is_closed(), "a proof that was heard before was taken"
    replayed.link.close()
    assert untouched(target)


@pytest.mark.parametrize(
    ("ours", "says"),
    [("", "this side has no secret and the peer has one"), ("not the secret of this run", "it has another secret")],
)
def test_a_sender_is_told_what_is_wrong_with_its_secret(receiver: TcpBackend, ours: str, says: str) -> None:
    with TcpBackend(secret=ours) as sender:
        assert says in cause_of_write(sender, receiver.session_id)
        if not ours:
            with TcpBackend() as open_receiver, TcpBackend(secret=SECRET) as closed_sender:
                cause = cause_of_write(closed_sender, open_receiver.session_id)
                assert "the peer has no secret and this side has one" in cause


def frames_that_close(address: int) -> list[bytes]:
    runs = [Run(0, address, 1)] * 1024
    return [
        HEAD.pack(1, 0),
        pack_write(1, [Run(0, address, 1)] * 1025) + bytes(1025),
        HEAD.pack(1, (1 << 32) - 1),
        pack_write(1, [Run(0, address, 0)]),
        pack_write(1, [Run(0, address, 8), Run(0, address, 0)]) + bytes(8),
        pack_write(1, [Run(0, address, (1 << 20) + 1)]),
        pack_write(1, [Run(0, address, (1 << 64) - 1)]),
        pack_write(1, [*runs[:-1], Run(0, address, 1 << 20)]),
    ]


def test_a_malformed_write_ends_its_connection_and_no_other(
    receiver: TcpBackend, target: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    good = Raw(receiver)
    for frame in frames_that_close(target.region.address):
        bad = Raw(receiver)
        caplog.clear()
        bad.send(frame)
        assert bad.is_closed() and "it announced a write of" in caplog.text
        bad.link.close()
    assert untouched(target)
    good.send(pack_write(5, [Run(0, target.region.address, 3)]) + b"abc")
    assert good.answer() == "" and bytes(target.bytes[:3]) == b"abc"
    good.link.close()


def test_the_receiver_itself_refuses_what_lies_outside_of_one_region(receiver: TcpBackend, target: Memory) -> None:
    start, end = target.region.address, target.region.end
    neighbour = Memory(64)
    client = Raw(receiver)
    for address, length in (
        (start - 1, 2),
        (end - 1, 2),
        (end, 1),
        (start - 64, (1 << 20) - 8),
        (0, 1),
        ((1 << 64) - 1, 1),
        (neighbour.region.address, 64),
    ):
        client.send(pack_write(7, [Run(0, start, 8), Run(0, address, length)]) + b"x" * (8 + length))
        assert "is not inside one region that is registered there" in client.answer()
        assert untouched(target) and untouched(neighbour), "a part of a refused write has landed"
    client.send(pack_write(8, [Run(0, start, 4), Run(0, end - 2, 2)]) + b"abcdyz")
    assert client.answer() == "" and bytes(target.bytes[:4]) == b"abcd" and bytes(target.bytes[-2:]) == b"yz"
    client.link.close()
    target.check_guards()


@pytest.mark.parametrize("registered_again", [False, True])
def test_memory_taken_back_in_the_middle_of_a_write_gets_no_further_byte(
    receiver: TcpBackend, target: Memory, registered_again: bool
) -> None:
    other = Memory(64)
    receiver.register(other.region)
    client = Raw(receiver)
    client.send(pack_write(3, [Run(0, target.region.address, 4096)]) + b"a" * 1000)
    assert eventually(lambda: bool(target.bytes[999] == ord("a")))
    receiver.unregister(target.region)
    target.bytes[:] = 0xFF
    if registered_again:
        receiver.register(target.region)
    client.send(b"b" * 3096)
    assert "withdrawn in the middle" in client.answer() and untouched(target)
    client.send(pack_write(4, [Run(0, other.region.address, 64)]) + b"c" * 64)
    assert client.answer() == "" and (other.bytes == ord("c")).all(), "the connection goes on behind the dropped bytes"
    client.link.close()


def test_unregister_waits_for_the_piece_that_is_being_written(receiver: TcpBackend, target: Memory) -> None:
    client = Raw(receiver)
    assert eventually(lambda: len(receiver._receiver._connections) == 1)
    (connection,) = receiver._receiver._connections
    with connection.lock:  # as while the kernel fills memory
        fence = threading.Thread(target=receiver.unregister, args=(target.region,))
        fence.start()
        fence.join(0.05)
        assert fence.is_alive()
    fence.join(PATIENCE_S)
    assert not fence.is_alive()
    client.link.close()


def test_what_a_sender_gave_up_does_not_land_later(receiver: TcpBackend, target: Memory) -> None:
    client = Raw(receiver)
    assert eventually(lambda: len(receiver._receiver._connections) == 1)
    (connection,) = receiver._receiver._connections
    client.send(pack_write(1, [Run(0, target.region.address, 4096)]) + b"a")
    assert eventually(lambda: bool(target.bytes[0] == ord("a")))
    with connection.lock:  # as a receiver that is stopped, whose kernel goes on
        client.send(b"a" * 4095)
        client.reset()
    connection.thread.join(PATIENCE_S)
    assert not connection.thread.is_alive() and (target.bytes[1:] == 0xFF).all()


def lying_receiver(behave: Callable[[BoundedSocket], None]) -> tuple[str, threading.Thread, socket.socket]:
    """Takes connections, proves the secret and then does what the test says; its session id."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                behave(BoundedSocket(connection))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread, listener


def with_proof(says: bytes, *, hold: bool = True) -> Callable[[BoundedSocket], None]:
    def behave(link: BoundedSocket) -> None:
        deadline = time.monotonic() + PATIENCE_S
        prove(link, "server", SECRET, deadline)
        link.write(says, deadline)
        while hold and not link.look(select.POLLIN) & (select.POLLHUP | select.POLLERR):
            link.wait(0, deadline)

    return behave


def greets_garbage(link: BoundedSocket) -> None:
    link.write(b"SSH-2.0-OpenSSH_9.2\r\n" * 9, time.monotonic() + PATIENCE_S)


@pytest.mark.parametrize(
    ("behave", "says"),
    [
        (with_proof(pack_answer(77, "")), "answered what it was not asked"),
        (with_proof(ANSWER.pack(1, 1001) + bytes(1001)), "answered what it was not asked"),
        (with_proof(pack_answer(1, "no " * 300)), "refused the write: no no"),
        (with_proof(b""), "has not answered for 0.25 s: it is stopped or cut off"),
        (with_proof(b"", hold=False), "broke"),
        (greets_garbage, "which is no greeting of cpkv"),
    ],
)
def test_a_receiver_that_misbehaves_fails_its_writes_and_is_connected_anew(
    behave: Callable[[BoundedSocket], None], says: str
) -> None:
    session_id, thread, listener = lying_receiver(behave)
    with TcpBackend(secret=SECRET, transfer_timeout_s=0.5) as sender:
        causes = []
        for _ in range(2):
            begun = time.monotonic()
            causes.append(cause_of_write(sender, session_id))
            assert session_id in causes[-1] and time.monotonic() - begun < 5
        # The second write has another number than the one that the liar answers.
        assert says in causes[0]
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_receiver_that_was_made_again_at_the_same_port_is_found_by_the_next_submit(
    receiver: TcpBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(receiver.session_id.rpartition(":")[2])
    source, target = Memory(1 << 16), Memory(1 << 16)
    source.fill(8)
    receiver.register(target.region)
    peer = Peer(receiver.session_id, (target.region,))
    with TcpBackend(secret=SECRET) as sender:
        sender.register(source.region)
        assert sender.wait(sender.submit(peer, pieces(source.region, target.region, 64)), PATIENCE_S).cause == ""
        receiver.close()
        listen = tcp_receiver._listen

        def at_same_port(host: str) -> socket.socket:
            listen(host).close()
            return socket.create_server((host, port))

        monkeypatch.setattr(tcp_receiver, "_listen", at_same_port)
        with TcpBackend(secret=SECRET) as again:
            assert again.session_id == peer.session_id
            again.register(target.region)
            target.bytes[:] = 0xFF
            run = Run(source.region.address, target.region.address, 1 << 16)

            def lands() -> bool:
                return sender.wait(sender.submit(peer, [run]), PATIENCE_S).state == "done"

            assert eventually(lands), "at most the write that finds the old connection broken fails"
            np.testing.assert_array_equal(target.bytes, source.bytes)


def test_too_many_connections_and_a_lack_of_descriptors_are_survived(
    receiver: TcpBackend, target: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_receiver, "MAX_CONNECTIONS", 2)
    first, second = Raw(receiver), Raw(receiver)
    third = Raw(receiver, secret=None)
    assert third.is_closed()
    third.link.close()
    for client in (first, second):
        client.send(pack_write(1, [Run(0, target.region.address, 1)]) + b"a")
        assert client.answer() == ""
        client.link.close()
    assert eventually(lambda: not receiver._receiver._connections)
    listener = receiver._receiver._listener
    refusals = [errno.EMFILE, errno.ECONNABORTED]

    class Failing:
        def accept(self) -> tuple[socket.socket, tuple]:
            if refusals:
                raise OSError(refusals.pop(), "as the system says")
            return listener.accept()

    monkeypatch.setattr(receiver._receiver, "_listener", Failing())
    target.bytes[:] = 0xFF
    check_served(receiver, target)
    assert not refusals


def test_beyond_loopback_a_secret_is_needed_and_only_the_given_address_listens() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "some.host"):
        with pytest.raises(ConfigError, match="is not a loopback address"):
            TcpBackend(host)
    with pytest.raises(ConfigError, match="16 are the least"):
        TcpBackend(secret="short")
    with pytest.raises(ConfigError, match="transfer_timeout_s is 0"):
        TcpBackend(transfer_timeout_s=0)
    with pytest.raises(TransferError, match="host 'no.such.host.invalid' does not resolve"):
        TcpBackend("no.such.host.invalid", secret=SECRET)
    with pytest.raises(TransferError, match=r"cannot listen on 192.0.2.1"):
        TcpBackend("192.0.2.1", secret=SECRET)
    with TcpBackend("127.0.0.2") as elsewhere, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(elsewhere.session_id.rpartition(":")[2])))


def test_what_came_while_this_process_was_stopped_has_come_in_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = BoundedSocket(ours)
        with pytest.raises(TimeoutError):
            link.wait(select.POLLIN, time.monotonic() - 1)
        theirs.send(b"x")
        assert link.wait(select.POLLIN, time.monotonic() - 1) & select.POLLIN
