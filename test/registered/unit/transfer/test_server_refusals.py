"""What peers, handlers and the system do wrong to a server of control connections, and that it serves on."""

from __future__ import annotations

import errno
import logging
import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest

from cpkv.errors import ConfigError, HandshakeError, TransferError
from cpkv.protocol.frames import LENGTH, frame_of
from cpkv.protocol.messages import MAX_FRAME_BYTES, Done, Failed, FinishTransfer, ReleaseRequest, ToDecode
from cpkv.protocol.sealing import GREETING_BYTES, Greeting
from cpkv.testing.control import PATIENCE_S, RawClient, StubHandler, is_closed
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer import server as server_module
from cpkv.transfer.channel import connect, listen
from cpkv.transfer.server import MessageServer, ServerLimits

register_cpu_ci(est_time=5, suite="unit")

SECRET = "the secret of this run"
NO_HURRY = ServerLimits(greeting_s=60.0, frame_s=60.0)
Start = Callable[..., MessageServer]
encode = msgspec.msgpack.encode


@pytest.fixture
def server(start_server: Start) -> MessageServer:
    return start_server(limits=NO_HURRY, secret=SECRET)


BODIES = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "no message": encode(7),
    "a message of the other direction": encode(Done()),
    "an unknown message": encode({"type": "Exec", "request_id": "r"}),
    "a field of another type": encode({"type": "ReleaseRequest", "request_id": 7}),
    "a pickle": b"cos\nsystem\n(Vtrue\ntR.",
    "text that is no UTF-8": b"\x82" + encode("type") + encode("ReleaseRequest") + encode("request_id") + b"\xa1\xff",
    "deep nesting": b"\x82" + encode("type") + encode("ReleaseRequest") + encode("x") + b"\x91" * 100_000 + b"\xc0",
    "four billion items": b"\x82"
    + encode("type")
    + encode("DecodeStep")
    + encode("request_ids")
    + b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("what", BODIES)
def test_a_body_that_is_no_message_ends_its_connection_only(
    server: MessageServer, stub: StubHandler, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    good, bad = RawClient(server.port, SECRET), RawClient(server.port, SECRET)
    bad.socket.sendall(frame_of(bad.seal, BODIES[what]))
    assert bad.is_closed(), what
    connection = stub.closed_peers.get(timeout=PATIENCE_S)
    assert f"stub: {connection.peer}: it sent a message that is none of those expected here" in caplog.text
    assert not [record for record in caplog.records if record.exc_info], "a peer's fault was logged as one of ours"
    assert good.ask(ReleaseRequest("good")) == Done()
    assert stub.seen == [ReleaseRequest("good")]
    good.close()
    bad.close()


def without_a_seal(client: RawClient) -> bytes:
    body = encode(ReleaseRequest("bad"))
    return LENGTH.pack(len(body)) + bytes(client.seal.num_bytes) + body


def repeated(client: RawClient) -> bytes:
    frame = client.frame(FinishTransfer("first", 1, 0))
    return frame + frame


def too_large(client: RawClient) -> bytes:
    return LENGTH.pack(MAX_FRAME_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "words", "taken"),
    [
        (without_a_seal, "the seal of frame 1 is wrong", 0),
        (repeated, "the seal of frame 2 is wrong", 1),
        (too_large, f"announced a frame of {MAX_FRAME_BYTES + 1} bytes, over the limit", 0),
    ],
)
def test_a_frame_that_cannot_be_believed_ends_its_connection_only(
    server: MessageServer,
    stub: StubHandler,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[RawClient], bytes],
    words: str,
    taken: int,
) -> None:
    good, bad = RawClient(server.port, SECRET), RawClient(server.port, SECRET)
    bad.socket.sendall(make(bad))
    assert bad.is_closed()
    stub.closed_peers.get(timeout=PATIENCE_S)
    assert words in caplog.text
    assert good.ask(ReleaseRequest("good")) == Done()
    assert len(stub.seen) == taken + 1
    good.close()
    bad.close()


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a frame of old": LENGTH.pack(9) + encode(Done()),
    "another version": struct.pack(">8sHHB32s", b"cpkv\r\n\x00\xff", 9, 8, 1, bytes(32)),
    "no secret": Greeting.of("").encode() + LENGTH.pack(0),
    "no proof": Greeting.of(SECRET).encode() + LENGTH.pack(0) + bytes(32),
    "a message instead of the proof": Greeting.of(SECRET).encode() + LENGTH.pack(20) + bytes(52),
    "64 MiB instead of the proof": Greeting.of(SECRET).encode() + LENGTH.pack(MAX_FRAME_BYTES),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_is_told_a_greeting_and_nothing_else(server: MessageServer, stub: StubHandler, what: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as stranger:
        stranger.sendall(STRANGERS[what])
        told = b""
        try:
            while more := stranger.recv(4096):
                told += more
        except ConnectionResetError:
            pass  # of what the server did not read
    assert len(told) <= GREETING_BYTES
    with closing(RawClient(server.port, SECRET)) as good:
        assert good.ask(ReleaseRequest("good")) == Done()
    assert stub.seen == [ReleaseRequest("good")]


def test_a_recorded_conversation_is_worth_nothing_on_another_connection(
    server: MessageServer, stub: StubHandler
) -> None:
    recorded = Greeting.of(SECRET).encode()
    with closing(RawClient(server.port, SECRET)) as client:
        recorded += LENGTH.pack(0) + client.seal.seal(b"") + client.frame(ReleaseRequest("r"))
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as thief:
        thief.sendall(recorded)
        assert is_closed(thief)
    assert stub.seen == []


def test_the_log_has_one_line_a_second_for_an_address(
    start_server: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "LOG_INTERVAL_S", 3600.0)
    server = start_server(limits=NO_HURRY, secret=SECRET)
    for address in ("127.0.0.1", "127.0.0.2"):
        for _ in range(20):
            with socket.socket() as stranger:
                stranger.settimeout(PATIENCE_S)
                stranger.bind((address, 0))
                stranger.connect(("127.0.0.1", server.port))
                stranger.sendall(b"x")
                assert is_closed(stranger)
    with closing(RawClient(server.port, SECRET)) as good:
        assert good.ask(ReleaseRequest("good")) == Done()
    assert len(caplog.records) == 2
    assert server._told.keys() == {"127.0.0.1", "127.0.0.2"}


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("plan", "PlanError", "^the plan is wrong$"),
        ("bug", "CpkvError", r"ZeroDivisionError: by zero \(in .*control.py"),
        ("unknown", "CpkvError", "TypeError: .*unsupported"),
        ("too large", "ProtocolError", f"a DecodedTokens of .* bytes is over the limit of {MAX_FRAME_BYTES}"),
    ],
)
def test_what_goes_wrong_in_a_handler_is_answered_and_the_connection_goes_on(
    server: MessageServer, caplog: pytest.LogCaptureFixture, name: str, kind: str, words: str
) -> None:
    with closing(RawClient(server.port, SECRET)) as client:
        answer = client.ask(ReleaseRequest(name))
        assert isinstance(answer, Failed)
        assert (answer.kind, answer.where) == (kind, "stub")
        assert re.search(words, answer.message)
        assert client.ask(ReleaseRequest("next")) == Done()
    traced = [record for record in caplog.records if record.exc_info]
    assert len(traced) == (kind == "CpkvError"), "a fault of ours is logged with its place, an expected error is not"


def test_a_handshake_error_is_the_last_answer(server: MessageServer, stub: StubHandler) -> None:
    with closing(RawClient(server.port, SECRET)) as client:
        # What comes behind it is not looked at.
        client.socket.sendall(client.frame(ReleaseRequest("handshake")) + client.frame(ReleaseRequest("behind")))
        assert client.channel.receive(PATIENCE_S) == Failed("HandshakeError", "the pools differ", "stub")
        with pytest.raises(TransferError):
            client.channel.receive(PATIENCE_S)
    assert stub.seen == [ReleaseRequest("handshake")]


def test_a_handler_that_fails_at_a_tick_or_at_an_end_stops_nobody(
    server: MessageServer, stub: StubHandler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()

    def fail(*_: Any) -> None:
        over.set()
        raise ZeroDivisionError

    monkeypatch.setattr(stub, "tick", fail)
    monkeypatch.setattr(stub, "closed", fail)
    for _ in range(2):
        over.clear()
        with closing(RawClient(server.port, SECRET)) as client:
            assert client.ask(ReleaseRequest("r")) == Done()
        assert over.wait(PATIENCE_S)
    assert {"stub: tick failed", "stub: closed failed"} <= {record.getMessage() for record in caplog.records}


def test_ticks_come_without_any_peer(server: MessageServer, stub: StubHandler) -> None:
    first, second = stub.ticks.get(timeout=PATIENCE_S), stub.ticks.get(timeout=PATIENCE_S)
    assert 0 < second - first < PATIENCE_S


def test_on_start_runs_first_and_in_the_servers_thread(start_server: Start) -> None:
    names: list[str] = []
    server = start_server(secret="", on_start=lambda: names.append(threading.current_thread().name))
    RawClient(server.port, "").close()
    assert names == ["stub server"]


class Exhausted:
    """A listening socket whose process has no descriptor left, the first few times."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener = listener
        self.times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def accept(self) -> Any:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


def test_running_out_of_descriptors_is_survived(
    stub: StubHandler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "ACCEPT_PAUSE_S", 0.05)
    exhausted = Exhausted(listen("127.0.0.1", 0), times=3)
    server = MessageServer(exhausted, ToDecode, stub, secret=SECRET, where="stub")  # type: ignore[arg-type]
    server.start()
    with closing(server), closing(RawClient(server.port, SECRET)) as client:
        assert client.ask(ReleaseRequest("r")) == Done()
    assert exhausted.times == 0
    assert caplog.text.count("cannot accept: [Errno 24] Too many open files; trying again in 0.05 s") == 3


def test_a_server_ends_all_its_connections_and_its_port_is_free_at_once(start_server: Start, stub: StubHandler) -> None:
    first = start_server(limits=NO_HURRY, secret=SECRET)
    clients = [RawClient(first.port, SECRET) for _ in range(3)]
    half = socket.create_connection(("127.0.0.1", first.port), PATIENCE_S)
    clients[1].socket.sendall(clients[1].frame(ReleaseRequest("r"))[:10])
    assert clients[0].ask(ReleaseRequest("r")) == Done()
    first.close()
    first.close()
    assert all(client.is_closed() for client in clients) and is_closed(half)
    assert stub.closed_peers.qsize() == 3
    half.close()
    # Some of the old connections are still closing, seen from the clients.
    second = start_server(port=first.port, limits=NO_HURRY, secret=SECRET)
    with closing(connect("127.0.0.1", second.port, Done | Failed, "the server", secret=SECRET)) as again:
        again.send(ReleaseRequest("again"))
        assert again.receive(PATIENCE_S) == Done()
    for client in clients:
        with pytest.raises(TransferError):
            client.ask(ReleaseRequest("old"))
        client.close()


def test_a_server_that_was_never_started_gives_its_port_back(stub: StubHandler) -> None:
    server = MessageServer(listen("127.0.0.1", 0), ToDecode, stub, secret=SECRET, where="stub")
    server.close()
    server.close()
    listen("127.0.0.1", server.port).close()


@pytest.mark.parametrize(("host", "secret"), [("0.0.0.0", ""), ("127.0.0.1", "short")])
def test_a_server_without_a_good_secret_is_refused_and_gives_its_port_back(
    stub: StubHandler, host: str, secret: str
) -> None:
    listener = listen(host, 0)
    port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match="secret"):
        MessageServer(listener, ToDecode, stub, secret=secret, where="stub")
    listen(host, port).close()


def test_beyond_loopback_only_the_secret_opens(stub: StubHandler, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    server = MessageServer(listen("0.0.0.0", 0), ToDecode, stub, secret=SECRET, where="stub")
    server.start()
    with closing(server):
        for guess in ("", "another secret of a run"):
            with pytest.raises(HandshakeError):
                connect("127.0.0.1", server.port, Done | Failed, "the server", secret=guess)
        with closing(RawClient(server.port, SECRET)) as client:
            assert client.ask(ReleaseRequest("r")) == Done()
    assert stub.seen == [ReleaseRequest("r")]
