"""Connections over TCP: both ends greet, prove the secret and seal every frame, or a typed error says who did not."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cpkv.errors import ConfigError, HandshakeError, ProtocolError, TransferError
from cpkv.protocol.frames import LENGTH, frame_of
from cpkv.protocol.messages import Done, Failed, FinishTransfer, FromDecode, ToDecode
from cpkv.protocol.sealing import GREETING_BYTES, SEAL_BYTES, FrameSeal, Greeting
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.channel import Channel, connect, listen

register_cpu_ci(est_time=3, suite="unit")

MESSAGES = (Done(), Failed("PlanError", "why", "rank 1"), Done())
SECRET = "the secret of this run"
Serve = Callable[[Callable[[socket.socket], None]], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Lets a function serve the next connection in a thread; returns the port."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(function: Callable[[socket.socket], None]) -> int:
        listener = listen("127.0.0.1", 0)
        listeners.append(listener)

        def accept() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.settimeout(10)
                function(connection)

        threads.append(threading.Thread(target=accept))
        threads[-1].start()
        return int(listener.getsockname()[1])

    yield start
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for listener in listeners:
        listener.close()


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def shake_hands(connection: socket.socket, secret: str = SECRET) -> FrameSeal:
    """The listening end's part, by hand."""
    ours = Greeting.of(secret)
    connection.sendall(ours.encode())
    seal = FrameSeal(secret, "server", ours, Greeting.decode(read(connection, GREETING_BYTES)))
    proof = read(connection, LENGTH.size + seal.num_bytes)
    seal.check(b"", proof[LENGTH.size :])
    connection.sendall(frame_of(seal, b""))
    return seal


@pytest.mark.parametrize("secret", ["", SECRET])
def test_both_ends_of_a_greeted_connection_read_what_the_other_sends(serve: Serve, secret: str) -> None:
    got: list[Any] = []

    def server(connection: socket.socket) -> None:
        channel = Channel(connection, ToDecode, "the client", seal=shake_hands(connection, secret))
        for message in MESSAGES:
            got.append(channel.receive(10))
            channel.send(message)

    client = connect("127.0.0.1", serve(server), FromDecode, "the server", secret=secret, timeout_s=10)
    for number, message in enumerate(MESSAGES):
        client.send(FinishTransfer("r", 1, number))
        assert client.receive(10) == message
    assert got == [FinishTransfer("r", 1, number) for number in range(len(MESSAGES))]
    with pytest.raises(TransferError, match="the server closed the connection"):
        client.receive(10)
    client.close()


def test_what_somebody_between_changes_is_refused_and_nothing_after_it_is_read(serve: Serve) -> None:
    def server(connection: socket.socket) -> None:
        seal = shake_hands(connection)
        body = msgspec.msgpack.encode(Done())
        one, two = frame_of(seal, body), frame_of(seal, body)
        connection.sendall(one + one + two)

    client = connect("127.0.0.1", serve(server), FromDecode, "the server", secret=SECRET, timeout_s=10)
    assert client.receive(10) == Done()
    with pytest.raises(ProtocolError, match="the server: the seal of frame 2 is wrong"):
        client.receive(10)
    with pytest.raises(TransferError, match="cannot be used any more"):
        client.receive(10)
    client.close()


def hang_up(connection: socket.socket) -> None:
    """Not even a greeting."""


def greet_like(greeting: bytes) -> Callable[[socket.socket], None]:
    def server(connection: socket.socket) -> None:
        connection.sendall(greeting)
        read(connection, 10_000)

    return server


def echo(connection: socket.socket) -> None:
    while data := connection.recv(4096):
        connection.sendall(data)


def hang_up_after_the_proof(connection: socket.socket) -> None:
    connection.sendall(Greeting.of(SECRET).encode())
    read(connection, GREETING_BYTES + LENGTH.size + SEAL_BYTES)


def prove_nothing(connection: socket.socket) -> None:
    connection.sendall(Greeting.of(SECRET).encode() + LENGTH.pack(0) + bytes(SEAL_BYTES))
    read(connection, 10_000)


def send_a_message_early(connection: socket.socket) -> None:
    connection.sendall(Greeting.of(SECRET).encode() + LENGTH.pack(100) + bytes(SEAL_BYTES + 100))
    read(connection, 10_000)


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (hang_up, "gave up before it greeted: it has too many connections, or another program has that port"),
        (greet_like(b"HTTP/1.1 400 Bad Request\r\n"), "begins with b'HTTP/1.1', which is no greeting of cpkv"),
        (greet_like(b"+"), r"begins with b'\+', which is no greeting"),
        (greet_like(replace(Greeting.of(SECRET), version=9, oldest=8).encode()), "the peer speaks version 8 to 9"),
        (greet_like(Greeting.of("").encode()), "the peer has no secret and this side has one"),
        (echo, "sends our own greeting back"),
        (hang_up_after_the_proof, "the secret is not that of this run; start both ends with the same"),
        (prove_nothing, "the secret is not that of this run; .*the seal of frame 0 is wrong"),
        (send_a_message_early, "a message came before the empty frame that proves the secret"),
    ],
)
def test_whoever_does_not_greet_as_it_must_is_named(
    serve: Serve, server: Callable[[socket.socket], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[socket.socket] = []
    honest = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: opened.append(honest(*a, **k)) or opened[-1])
    port = serve(server)
    with pytest.raises(HandshakeError, match=f"the handshake with rank 2 at 127.0.0.1:{port} failed: .*{words}"):
        connect("127.0.0.1", port, FromDecode, "rank 2", secret=SECRET, timeout_s=10)
    assert [connection.fileno() for connection in opened] == [-1], "the refused connection is left open"


@pytest.mark.parametrize("greeting", [b"", Greeting.of(SECRET).encode()[:20], Greeting.of(SECRET).encode()])
def test_whoever_stops_at_any_step_of_the_greeting_is_given_up_in_time(serve: Serve, greeting: bytes) -> None:
    port = serve(greet_like(greeting))
    with pytest.raises(HandshakeError, match=f"the server at 127.0.0.1:{port} failed: nothing came in time"):
        connect("127.0.0.1", port, FromDecode, "the server", secret=SECRET, timeout_s=0.1)


def test_a_greeting_that_trickles_does_not_get_more_time(serve: Serve) -> None:
    gave_up = threading.Event()

    def server(connection: socket.socket) -> None:
        for byte in Greeting.of(SECRET).encode():
            connection.send(bytes([byte]))
            gave_up.wait(0.05)

    port = serve(server)
    # Every single byte comes in time, and all of them would take 2 s.
    with pytest.raises(HandshakeError, match="nothing came in time"):
        connect("127.0.0.1", port, FromDecode, "the server", secret=SECRET, timeout_s=0.3)
    gave_up.set()


def test_nobody_is_called_beyond_this_host_without_a_secret() -> None:
    with pytest.raises(ConfigError, match="203.0.113.7 is not a loopback address"):
        connect("203.0.113.7", 1, FromDecode, "the server", timeout_s=0.1)
    with pytest.raises(ConfigError, match="the secret has 5 characters"):
        connect("127.0.0.1", 1, FromDecode, "the server", secret="short", timeout_s=0.1)


def test_a_connection_whose_other_end_vanished_ends_by_itself(serve: Serve) -> None:
    def server(connection: socket.socket) -> None:
        shake_hands(connection)
        read(connection, 1)

    client = connect("127.0.0.1", serve(server), FromDecode, "the server", secret=SECRET, timeout_s=10)
    with socket.socket(fileno=os.dup(client.fileno())) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        values = {
            name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        }
    assert values == {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
    client.close()
