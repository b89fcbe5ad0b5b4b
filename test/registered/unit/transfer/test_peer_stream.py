"""What a server waits for of one peer, and until when, on a clock that the test holds."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest

from cpkv.protocol.frames import LENGTH, frame_of
from cpkv.protocol.sealing import GREETING_BYTES, FrameSeal, Greeting
from cpkv.testing.control import PATIENCE_S, read
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.peer_stream import PeerStream, ServerLimits

register_cpu_ci(est_time=1, suite="unit")

SECRET = "the secret of this run"
LIMITS = ServerLimits(greeting_s=5.0, frame_s=10.0)
NEVER = float("inf")


@pytest.fixture
def ends() -> Iterator[tuple[PeerStream, socket.socket, FrameSeal]]:
    """A peer accepted at 100 s, and its other end; its seal belongs to a greeting that was not sent yet."""
    theirs, ours = socket.socketpair()
    with theirs:
        theirs.settimeout(PATIENCE_S)
        stream = PeerStream(ours, SECRET, LIMITS, 100.0)
        greeting = Greeting.of(SECRET)
        seal = FrameSeal(SECRET, "client", greeting, Greeting.decode(read(theirs, GREETING_BYTES)))
        theirs.sendall(greeting.encode())
        yield stream, theirs, seal
        stream.close()


def prove(ends: tuple[PeerStream, socket.socket, FrameSeal], now_s: float) -> None:
    stream, theirs, seal = ends
    theirs.sendall(frame_of(seal, b""))
    stream.read(now_s)
    seal.check(b"", read(theirs, LENGTH.size + seal.num_bytes)[LENGTH.size :])


def test_a_peer_has_until_its_proof_and_then_for_ever(ends: tuple[PeerStream, socket.socket, FrameSeal]) -> None:
    stream = ends[0]
    assert stream.deadline_s == 105.0
    stream.read(104.0)
    assert not stream.proved and stream.deadline_s == 105.0
    assert stream.lateness == "it had not greeted after 5.0 s"
    prove(ends, 104.5)
    assert stream.proved and stream.deadline_s == NEVER
    assert stream.events == selectors.EVENT_READ


def test_the_time_of_a_frame_runs_from_its_first_byte(ends: tuple[PeerStream, socket.socket, FrameSeal]) -> None:
    stream, theirs, seal = ends
    prove(ends, 101.0)
    first, second = frame_of(seal, b"first"), frame_of(seal, b"second")
    theirs.sendall(first[:1])
    stream.read(200.0)
    theirs.sendall(first[1:10])
    stream.read(205.0)
    assert stream.deadline_s == 210.0
    assert stream.lateness == "a frame that it began was not whole after 10.0 s"
    theirs.sendall(first[10:] + second[:10])
    stream.read(209.0)
    assert stream.deadline_s == NEVER, "what waits for the server is no delay of the peer"
    assert stream.take(300.0) == b"first"
    assert stream.deadline_s == 310.0, "the next frame has its own time"
    theirs.sendall(second[10:])
    stream.read(301.0)
    assert stream.take(302.0) == b"second"
    assert stream.deadline_s == NEVER


def test_a_peer_is_not_read_on_while_a_frame_of_it_waits(ends: tuple[PeerStream, socket.socket, FrameSeal]) -> None:
    stream, theirs, seal = ends
    prove(ends, 101.0)
    theirs.sendall(frame_of(seal, b"first") + frame_of(seal, b"second"))
    stream.read(102.0)
    for body in (b"first", b"second"):
        assert stream.has_frame and stream.events == 0
        assert stream.take(103.0) == body
    assert not stream.has_frame and stream.events == selectors.EVENT_READ


def test_a_peer_that_reads_a_little_from_time_to_time_has_more_time(
    ends: tuple[PeerStream, socket.socket, FrameSeal],
) -> None:
    stream, theirs, seal = ends
    prove(ends, 101.0)
    body = bytes(4 << 20)
    stream.send(body, 200.0)
    assert stream.deadline_s == 210.0
    assert stream.events == selectors.EVENT_READ | selectors.EVENT_WRITE
    assert stream.lateness == "it read nothing of its answers for 10.0 s"
    stream.write(205.0)
    assert stream.deadline_s == 210.0, "nothing was read"
    taken, now_s = b"", 209.0
    while stream.events & selectors.EVENT_WRITE:
        taken += read(theirs, 1 << 16)
        stream.write(now_s)
        now_s += 9.0
        assert stream.deadline_s >= now_s, "it was late although it reads"
    frame = taken + read(theirs, LENGTH.size + seal.num_bytes + len(body) - len(taken))
    seal.check(frame[LENGTH.size + seal.num_bytes :], frame[LENGTH.size : LENGTH.size + seal.num_bytes])
    assert stream.deadline_s == NEVER


def test_an_ending_peer_is_over_when_its_last_answer_has_left(
    ends: tuple[PeerStream, socket.socket, FrameSeal],
) -> None:
    stream, theirs, seal = ends
    prove(ends, 101.0)
    theirs.sendall(frame_of(seal, b"not looked at"))
    stream.ending = True
    stream.send(bytes(4 << 20), 200.0)
    assert not stream.is_over and stream.events == selectors.EVENT_WRITE and not stream.has_frame
    while not stream.is_over:
        read(theirs, 1 << 16)
        stream.write(201.0)
    assert stream.events == 0
