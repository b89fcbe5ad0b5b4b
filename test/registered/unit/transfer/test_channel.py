"""Frames over a socket: whole messages or a typed error, whatever the peer sends; nothing is unpickled."""

from __future__ import annotations

import os
import pickletools
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import ProtocolError, TransferError
from cpkv.protocol.messages import (
    MAX_FRAME_BYTES,
    DecodedTokens,
    Done,
    Failed,
    FinishTransfer,
    FromDecode,
    Hello,
    OpenTransfer,
    PagesSent,
    Sampling,
    SenderDescription,
    ToDecode,
    TransferOpened,
    Welcome,
)
from cpkv.testing.registration import register_cpu_ci
from cpkv.testing.sample_pool import SAMPLE_POOL
from cpkv.transfer.channel import Channel, connect, listen
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.server import Connection, MessageServer

register_cpu_ci(est_time=3, suite="unit")

MESSAGES = (
    Done(),
    Failed("PlanError", "why", "rank 1"),
    DecodedTokens((3,), (bytes(range(256)) * 5000,)),
    Done(),
)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def frame_of(message: Any) -> bytes:
    return frame(msgspec.msgpack.encode(message))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """A stranger's raw socket, and our channel at the other end."""
    stranger, ours = socket.socketpair()
    with stranger, ours:
        yield stranger, Channel(ours, FromDecode, "the decode worker", max_frame_bytes=2_000_000)


def received_from(raw: bytes, accepts: Any = FromDecode) -> Any:
    """What a channel makes of bytes after which the peer closes."""
    stranger, ours = socket.socketpair()
    with ours:
        stranger.sendall(raw)
        stranger.close()
        return Channel(ours, accepts, "the stranger").receive(10)


def test_messages_arrive_whole_and_in_order(ends: tuple[socket.socket, Channel]) -> None:
    stranger, channel = ends
    sender = Channel(stranger, ToDecode, "the prefill")

    def send_all() -> None:
        for message in MESSAGES:
            sender.send(message)

    writer = threading.Thread(target=send_all)
    writer.start()
    assert [channel.receive(10) for _ in MESSAGES] == list(MESSAGES)
    writer.join()
    channel.send(FinishTransfer("r", 1, 5))
    assert sender.receive(10) == FinishTransfer("r", 1, 5)


def test_a_message_that_comes_byte_by_byte_is_read_whole(ends: tuple[socket.socket, Channel]) -> None:
    stranger, channel = ends
    raw = frame_of(MESSAGES[1]) * 2
    writer = threading.Thread(target=lambda: [stranger.send(raw[at : at + 1]) for at in range(len(raw))])
    writer.start()
    assert channel.receive(10) == channel.receive(10) == MESSAGES[1]
    writer.join()


@pytest.mark.parametrize("length", [2_000_001, 2**31, 2**32 - 1])
def test_a_frame_that_is_too_large_is_refused_before_it_is_read(
    ends: tuple[socket.socket, Channel], length: int
) -> None:
    stranger, channel = ends
    stranger.sendall(struct.pack(">I", length))
    with pytest.raises(
        ProtocolError, match=f"the decode worker announced a frame of {length} bytes, over the limit of 2000000"
    ):
        channel.receive(10)


def test_the_largest_frame_is_read_and_the_default_limit_holds(ends: tuple[socket.socket, Channel]) -> None:
    stranger, channel = ends
    message = DecodedTokens((), (bytes(2_000_000),))
    surplus = len(msgspec.msgpack.encode(message)) - 2_000_000
    message = DecodedTokens((), (bytes(2_000_000 - surplus),))
    writer = threading.Thread(target=stranger.sendall, args=(frame_of(message),))
    writer.start()
    assert channel.receive(10) == message
    writer.join()
    with pytest.raises(ProtocolError, match=f"over the limit of {MAX_FRAME_BYTES}"):
        received_from(struct.pack(">I", MAX_FRAME_BYTES + 1))


def test_a_message_over_the_limit_is_not_sent_at_all() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, FromDecode, "the peer", max_frame_bytes=1000)
        with pytest.raises(ProtocolError, match=r"a DecodedTokens of 10\d\d bytes is over the limit of 1000"):
            channel.send(DecodedTokens((), (bytes(1000),)))
        channel.send(Done())
        assert Channel(theirs, FromDecode, "us").receive(10) == Done(), "a part of the refused message was sent"


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, -1])
def test_a_peer_that_closes_at_any_byte_of_a_frame_is_gone(cut: int) -> None:
    with pytest.raises(TransferError, match="the stranger closed the connection") as error:
        received_from(frame_of(MESSAGES[1])[:cut])
    assert not isinstance(error.value, ProtocolError)


@given(st.binary(max_size=60))
def test_garbage_is_a_protocol_error(body: bytes) -> None:
    """Kind 39."""
    try:
        message = received_from(frame(body))
    except ProtocolError as error:
        assert "the stranger sent a message that is none of those expected here" in str(error)
    else:
        assert isinstance(message, FromDecode)


SAMPLES = [
    msgspec.msgpack.encode(sample) for sample in (PagesSent("r", 1, 2, (3, 4), ("d",)), FinishTransfer("r", 1, 2))
]


@given(st.sampled_from(SAMPLES), st.integers(0, 99), st.binary(min_size=1, max_size=3), st.integers(0, 99))
def test_a_damaged_message_is_a_protocol_error_or_a_message(body: bytes, at: int, patch: bytes, cut: int) -> None:
    at %= len(body)
    damaged = (body[:at] + patch + body[at + 1 :])[: len(body) - cut % 4]
    try:
        message = received_from(frame(damaged), ToDecode)
    except ProtocolError:
        return
    assert isinstance(message, ToDecode)


@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
def test_a_claim_of_four_billion_items_is_refused_without_taking_memory_for_them(claim: bytes) -> None:
    encode = msgspec.msgpack.encode
    fields = b"\x85" + encode("type") + encode("PagesSent") + encode("request_id") + encode("r")
    with pytest.raises(ProtocolError):
        received_from(frame(fields + encode("positions") + claim), ToDecode)


def test_deep_nesting_in_a_field_that_nobody_knows_is_a_protocol_error() -> None:
    """Kind 39: a frame of a stranger must not end a worker."""
    encode = msgspec.msgpack.encode
    with pytest.raises(ProtocolError):
        received_from(frame(b"\x82" + encode("type") + encode("Done") + encode("x") + b"\x91" * 100_000 + b"\xc0"))


def test_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    """Kind 39: the bytes would make a folder if anybody unpickled them."""
    made = tmp_path / "made"
    body = b"cos\nmkdir\n(V" + str(made).encode() + b"\ntR."
    assert "os mkdir" in str([argument for _, argument, _ in pickletools.genops(body)])
    with pytest.raises(ProtocolError):
        received_from(frame(body))
    assert not made.exists()


def test_a_message_that_is_not_expected_here_is_refused(ends: tuple[socket.socket, Channel]) -> None:
    stranger, channel = ends
    stranger.sendall(frame_of(FinishTransfer("r", 1, 5)))
    with pytest.raises(ProtocolError, match="the decode worker sent a message that is none of those expected here"):
        channel.receive(10)
    stranger.sendall(frame_of(Done()))
    assert channel.receive(10) == Done(), "the refused frame was not read to its end"


def test_a_silent_peer_is_an_error_after_the_time_that_was_given(ends: tuple[socket.socket, Channel]) -> None:
    stranger, channel = ends
    with pytest.raises(TransferError, match=r"the decode worker sent no whole message for 0.01 s"):
        channel.receive(0.01)
    stranger.sendall(frame_of(Done()))
    assert channel.receive() == Done()


def test_a_channel_that_ran_out_of_time_inside_a_frame_does_not_read_on_in_its_middle(
    ends: tuple[socket.socket, Channel],
) -> None:
    """Kind 35: here the rest of a late frame holds the bytes of another message."""
    stranger, channel = ends
    inside = frame_of(FinishTransfer("other request", 1, 5))
    stranger.sendall(struct.pack(">I", len(inside)))
    with pytest.raises(TransferError):
        channel.receive(0.01)
    stranger.sendall(frame_of(Done()))
    with pytest.raises(TransferError):
        channel.receive(10)


class LateDecode:
    """Welcomes everybody, and opens transfers only once it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def answer(self, connection: Connection, message: Any) -> Any:
        if isinstance(message, Hello):
            return Welcome(SAMPLE_POOL, 15.0)
        self.may_answer.wait(10)
        return TransferOpened("r", message.attempt, (0,), (10 * message.attempt,), ())

    def closed(self, connection: Connection) -> None:
        pass

    def tick(self, now_s: float) -> None:
        pass


def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_question() -> None:
    """Kind 35: pages of attempt 1 would be written in attempt 2."""
    decode = LateDecode()
    server = MessageServer(listen("127.0.0.1", 0), ToDecode, decode, secret="", where="decode worker")
    server.start()
    try:
        sender = SenderDescription(rank=-1, cp_size=4, strategy="zigzag", instance="test")
        link = DecodeLink("127.0.0.1", server.port, Hello(SAMPLE_POOL, sender), timeout_s=1)
        with pytest.raises(TransferError, match="sent no whole message for 1 s"):
            link.ask(OpenTransfer("r", 1, 4, 1, (0,), Sampling()), TransferOpened)
        decode.may_answer.set()
        with pytest.raises(TransferError, match="connect again"):
            link.ask(OpenTransfer("r", 2, 4, 1, (0,), Sampling()), TransferOpened)
        link.close()
    finally:
        decode.may_answer.set()
        server.close()


def test_a_connection_that_the_other_end_has_ended_is_seen_before_the_next_question() -> None:
    decode = LateDecode()
    decode.may_answer.set()
    server = MessageServer(listen("127.0.0.1", 0), ToDecode, decode, secret="", where="decode worker")
    server.start()
    sender = SenderDescription(rank=-1, cp_size=4, strategy="zigzag", instance="test")
    link = DecodeLink("127.0.0.1", server.port, Hello(SAMPLE_POOL, sender), timeout_s=5)
    link.close_if_ended()
    assert not link.closed
    server.close()
    link.close_if_ended()
    assert link.closed


def test_a_send_to_a_peer_that_has_gone_says_so(ends: tuple[socket.socket, Channel]) -> None:
    stranger, channel = ends
    stranger.close()
    with pytest.raises(TransferError, match="the decode worker is gone"):
        channel.send(Done())


def test_a_channel_can_be_closed_twice_and_is_of_no_use_then(ends: tuple[socket.socket, Channel]) -> None:
    _, channel = ends
    assert channel.fileno() >= 0
    assert repr(channel) == "Channel(to the decode worker)"
    channel.close()
    channel.close()
    assert channel.fileno() == -1
    for use in (lambda: channel.send(Done()), channel.receive):
        with pytest.raises(TransferError, match="the decode worker is gone"):
            use()


def test_a_worker_that_is_not_there_is_named_with_its_address() -> None:
    with socket.socket() as bound:
        # Bound but not listening: nobody else can take the port, and a connection is refused.
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(TransferError, match=f"rank 2 at 127.0.0.1:{port} is not there: .*start it first, or give"):
            connect("127.0.0.1", port, FromDecode, "rank 2", timeout_s=5)


def test_a_port_in_use_is_refused_and_port_0_takes_a_free_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        before = set(os.listdir("/proc/self/fd"))
        says = f"cannot listen on 127.0.0.1:{port}: .*give a free port, or 0 to take"
        # Its traceback keeps the socket of the refused call alive, if nobody has closed it.
        with pytest.raises(TransferError, match=says) as refused:
            listen("127.0.0.1", port)
        assert refused.value.__traceback__ is not None
        assert set(os.listdir("/proc/self/fd")) <= before, "the refused socket is left open"


def test_a_peer_that_reads_nothing_does_not_hold_a_sender_for_ever() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, FromDecode, "the peer", send_timeout_s=0.05)
        channel.send(Done())
        with pytest.raises(TransferError, match=r"the peer did not read a message in 0.05 s"):
            channel.send(DecodedTokens((), (bytes(8 << 20),)))
        # What left of it would make the next message a part of it.
        for use in (lambda: channel.send(Done()), channel.receive):
            with pytest.raises(TransferError, match="cannot be used any more: a part of a message may have been sent"):
                use()
