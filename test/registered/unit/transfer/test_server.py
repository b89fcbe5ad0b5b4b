"""A server of control connections: no peer makes another wait, and what one does wrong ends its own connection only."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cpkv.errors import HandshakeError
from cpkv.protocol.messages import DecodeStep, Done, FinishTransfer, FromDecode, ReleaseRequest, TransferComplete
from cpkv.protocol.sealing import GREETING_BYTES, Greeting
from cpkv.testing.control import HUGE, PATIENCE_S, RawClient, StubHandler
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer import server as server_module
from cpkv.transfer.channel import Channel, connect
from cpkv.transfer.server import Connection, MessageServer, ServerLimits

register_cpu_ci(est_time=6, suite="unit")

SECRET = "the secret of this run"
# Nobody is ended by time in a test that is not about time.
NO_HURRY = ServerLimits(greeting_s=60.0, frame_s=60.0)
Start = Callable[..., MessageServer]


@pytest.fixture
def start(start_server: Start) -> Start:
    """Starts a server with the secret."""
    return lambda limits=NO_HURRY, secret=SECRET: start_server(limits=limits, secret=secret)


class Clock:
    """The time, and what a test adds to it."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def call(server: MessageServer, secret: str = SECRET) -> Channel:
    return connect("127.0.0.1", server.port, FromDecode, "the server", secret=secret, timeout_s=PATIENCE_S)


def ask(channel: Channel, message: object) -> object:
    channel.send(message)
    return channel.receive(PATIENCE_S)


@pytest.mark.parametrize("secret", ["", SECRET])
def test_every_connection_gets_its_own_answers_in_order(start: Start, stub: StubHandler, secret: str) -> None:
    server = start(secret=secret)
    channels = [call(server, secret) for _ in range(5)]
    for turn in range(3):
        for number, channel in enumerate(channels):
            assert ask(channel, FinishTransfer(f"r{number}", 1, 0)) == TransferComplete(f"r{number}", turn + 1)
    for channel in channels:
        channel.close()
    over = {stub.closed_peers.get(timeout=PATIENCE_S).state for _ in channels}
    assert over == {3}


def test_questions_sent_together_are_answered_in_order(start: Start) -> None:
    raw = RawClient(start().port, SECRET)
    raw.socket.sendall(b"".join(raw.frame(FinishTransfer(str(number), 1, 0)) for number in range(2000)))
    for number in range(2000):
        assert raw.channel.receive(PATIENCE_S) == TransferComplete(str(number), number + 1)
    raw.close()


def test_a_peer_that_sends_much_at_once_takes_turns_with_the_others(start: Start, stub: StubHandler) -> None:
    server = start()
    greedy, other, patient = (
        RawClient(server.port, SECRET),
        RawClient(server.port, SECRET),
        RawClient(server.port, SECRET),
    )
    patient.channel.send(ReleaseRequest("wait"))
    assert stub.entered.wait(PATIENCE_S)
    # While the server is busy both questions arrive: a hundred of one peer, one of the other.
    greedy.socket.sendall(b"".join(greedy.frame(ReleaseRequest(f"greedy {number}")) for number in range(100)))
    other.channel.send(ReleaseRequest("other"))
    stub.go_on.set()
    assert other.channel.receive(PATIENCE_S) == Done()
    for _ in range(100):
        assert greedy.channel.receive(PATIENCE_S) == Done()
    order = [message.request_id for message in stub.seen]
    assert order.index("other") <= 3, f"the other was answered after {order.index('other')} messages"
    for raw in (greedy, other, patient):
        raw.close()


@pytest.mark.parametrize("keep", [0, 1, 3, 4, 20, 36, -1])
def test_half_a_frame_does_not_delay_another_peer(start: Start, stub: StubHandler, keep: int) -> None:
    server = start()
    slow, quick = RawClient(server.port, SECRET), call(server)
    frame = slow.frame(ReleaseRequest("slow"))
    kept = len(frame) + keep if keep < 0 else keep
    slow.socket.sendall(frame[:kept])
    for number in range(20):
        assert ask(quick, ReleaseRequest(f"quick {number}")) == Done()
    slow.socket.sendall(frame[kept:])
    assert slow.channel.receive(PATIENCE_S) == Done()
    assert [message.request_id for message in stub.seen] == [f"quick {number}" for number in range(20)] + ["slow"]
    slow.close()
    quick.close()


@pytest.mark.parametrize("keep", [0, 10, GREETING_BYTES, GREETING_BYTES + 10])
def test_half_a_greeting_delays_nobody_and_ends_in_time(start: Start, stub: StubHandler, keep: int) -> None:
    server = start(ServerLimits(greeting_s=0.2, frame_s=60.0))
    # Nobody has proved anything with these bytes, whatever the length behind the greeting says.
    start_of_one = (Greeting.of(SECRET).encode() + bytes(36))[:keep]
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as slow:
        slow.sendall(start_of_one)
        quick = call(server)
        assert ask(quick, ReleaseRequest("quick")) == Done()
        assert len(b"".join(iter(lambda: slow.recv(4096), b""))) == GREETING_BYTES
    quick.close()
    assert stub.closed_peers.get(timeout=PATIENCE_S).peer.startswith("127.0.0.1:")
    assert stub.closed_peers.empty(), "the handler was told of a peer that never greeted"


def test_a_frame_that_is_not_finished_in_time_ends_its_connection(
    start: Start, stub: StubHandler, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(ServerLimits(greeting_s=60.0, frame_s=0.2))
    idle, slow = call(server), RawClient(server.port, SECRET)
    slow.socket.sendall(slow.frame(ReleaseRequest("slow"))[:-1])
    assert slow.is_closed()
    stub.closed_peers.get(timeout=PATIENCE_S)
    assert "a frame that it began was not whole after 0.2 s; connection closed" in caplog.text
    assert ask(idle, ReleaseRequest("idle")) == Done(), "an idle connection has no deadline"
    idle.close()
    slow.close()


def test_the_time_that_an_answer_takes_is_no_peers_lateness(start: Start, stub: StubHandler) -> None:
    server = start(ServerLimits(greeting_s=60.0, frame_s=1.0))
    slow, patient = RawClient(server.port, SECRET), RawClient(server.port, SECRET)
    frame = slow.frame(ReleaseRequest("slow"))
    slow.socket.sendall(frame[:10])
    # What came before this question has been read before its answer.
    patient.ask(FinishTransfer("x", 1, 0))
    patient.channel.send(ReleaseRequest("wait"))
    assert stub.entered.wait(PATIENCE_S)
    stub.go_on.wait(1.2)
    slow.socket.sendall(frame[10:20])
    stub.go_on.set()
    assert patient.channel.receive(PATIENCE_S) == Done()
    patient.ask(FinishTransfer("x", 1, 0))
    slow.socket.sendall(frame[20:])
    assert slow.channel.receive(PATIENCE_S) == Done()
    slow.close()
    patient.close()


def test_what_came_while_the_process_was_stopped_is_heard_before_anybody_is_given_up(
    start: Start, stub: StubHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ticks = Clock(), queue.SimpleQueue[tuple[float, int]]()
    monkeypatch.setattr(server_module, "time", clock)
    # As long as it takes.
    monkeypatch.setattr(server_module, "TICK_S", 10.0)
    monkeypatch.setattr(stub, "tick", lambda now_s: ticks.put((now_s, len(stub.seen))))
    server = start()
    alive, other = call(server), call(server)
    other.send(ReleaseRequest("wait"))
    assert stub.entered.wait(PATIENCE_S)
    for number in range(5):
        alive.send(ReleaseRequest(f"sign of life {number}"))
    clock.ahead_s = 100.0
    woke_s = clock.monotonic()
    stub.go_on.set()
    while (tick := ticks.get(timeout=PATIENCE_S))[0] < woke_s:
        pass
    assert tick[1] == 6, f"a tick 100 s later came when {tick[1]} of 6 messages had been answered"
    for channel in (alive, other):
        channel.close()


def test_ticks_come_however_long_every_answer_takes(
    start: Start, stub: StubHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while there is always one more message to answer."""
    clock, ticks = Clock(), queue.SimpleQueue[int]()
    monkeypatch.setattr(server_module, "time", clock)
    monkeypatch.setattr(stub, "tick", lambda now_s: ticks.put(len(stub.seen)))
    real = stub.answer

    def slow(connection: Connection, message: Any) -> Any:
        clock.ahead_s += 3.0
        return real(connection, message)

    monkeypatch.setattr(stub, "answer", slow)
    raw = RawClient(start().port, SECRET)
    raw.socket.sendall(b"".join(raw.frame(FinishTransfer(str(number), 1, 0)) for number in range(20)))
    for number in range(20):
        assert raw.channel.receive(PATIENCE_S) == TransferComplete(str(number), number + 1)
    between = [count for count in iter(ticks.get, 20) if 0 < count < 20]
    assert len(between) >= 8
    raw.close()


def test_the_time_for_which_the_process_was_stopped_is_no_peers_lateness(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, stopped = Clock(), threading.Event()
    monkeypatch.setattr(server_module, "time", clock)
    server = start(ServerLimits(greeting_s=60.0, frame_s=60.0))
    select = server._selector.select

    def select_and_sleep(patience_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        if stopped.is_set():
            stopped.clear()
            clock.ahead_s += 100.0
        return select(patience_s)

    monkeypatch.setattr(server._selector, "select", select_and_sleep)
    slow, other = RawClient(server.port, SECRET), call(server)
    frame = slow.frame(ReleaseRequest("slow"))
    slow.socket.sendall(frame[:10])
    for _ in range(2):
        assert ask(other, ReleaseRequest("before")) == Done()
    stopped.set()
    for _ in range(3):
        assert ask(other, ReleaseRequest("after")) == Done()
    assert not stopped.is_set()
    slow.socket.sendall(frame[10:])
    assert slow.channel.receive(PATIENCE_S) == Done()
    slow.close()
    other.close()


def test_a_peer_that_never_reads_is_ended_and_delays_nobody(
    start: Start, stub: StubHandler, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(ServerLimits(greeting_s=60.0, frame_s=0.3))
    deaf, quick = RawClient(server.port, SECRET, receive_bytes=4096), call(server)
    deaf.channel.send(DecodeStep(("r",)))
    for number in range(20):
        assert ask(quick, ReleaseRequest(f"quick {number}")) == Done()
    assert stub.closed_peers.get(timeout=PATIENCE_S).peer.endswith(f":{deaf.socket.getsockname()[1]}")
    assert "it read nothing of its answers for 0.3 s; connection closed" in caplog.text
    assert ask(quick, ReleaseRequest("after")) == Done()
    deaf.close()
    quick.close()


def test_answers_that_pile_up_are_bounded(start: Start, stub: StubHandler, caplog: pytest.LogCaptureFixture) -> None:
    server = start(ServerLimits(greeting_s=60.0, frame_s=60.0, unread_bytes=60 << 20))
    deaf = RawClient(server.port, SECRET, receive_bytes=4096)
    deaf.socket.sendall(b"".join(deaf.frame(DecodeStep((str(number),))) for number in range(8)))
    stub.closed_peers.get(timeout=PATIENCE_S)
    assert f"bytes of answers unread, over the limit of {60 << 20}; connection closed" in caplog.text
    assert len(stub.seen) == 3
    deaf.close()


def test_an_answer_larger_than_every_buffer_arrives(start: Start) -> None:
    channel = call(start())
    for _ in range(2):
        assert ask(channel, DecodeStep(("r",))) == HUGE
    channel.close()


def test_more_connections_than_allowed_are_refused_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "LOG_INTERVAL_S", 0.0)
    server = start(ServerLimits(max_connections=2, greeting_s=60.0, frame_s=60.0))
    first, second = call(server), call(server)
    for times_full in (1, 2):
        for _ in range(5):
            with pytest.raises(HandshakeError, match="it has too many connections"):
                call(server)
        assert ask(second, ReleaseRequest("r")) == Done()
        assert caplog.text.count("refused, since 2 connections are open") == times_full
        assert ask(first, ReleaseRequest("r")) == Done()
        first.close()
        # The place is free once the server has noticed, and it answers in the order of what it notices.
        assert ask(second, ReleaseRequest("r")) == Done()
        first = call(server)
    first.close()
    second.close()
