"""Greetings that do not fit are refused by name, and no frame passes but the next one of the peer, unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import ConfigError, HandshakeError, ProtocolError
from cpkv.protocol.frames import LENGTH, ServerFrames, frame_of
from cpkv.protocol.messages import PROTOCOL_VERSION
from cpkv.protocol.sealing import (
    GREETING_BYTES,
    MAGIC,
    MIN_SECRET_CHARS,
    OLDEST_PROTOCOL_VERSION,
    SEAL_BYTES,
    FrameSeal,
    Greeting,
    agree,
    check_magic,
    check_secret,
)
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

SECRET = "a secret of a run"
BODIES = [b"", b"first", b"second", b"x" * 1000, b"first"]


def seals(secret: str = SECRET, other: str | None = None) -> tuple[FrameSeal, FrameSeal]:
    """Both ends of one connection, the client's first."""
    ours, theirs = Greeting.of(secret), Greeting.of(secret)
    return FrameSeal(secret, "client", ours, theirs), FrameSeal(
        secret if other is None else other, "server", theirs, ours
    )


def greeting(newest: int, oldest: int, *, sealed: bool = False) -> Greeting:
    return replace(Greeting.of(""), version=newest, oldest=oldest, sealed=sealed)


# Greetings.


@pytest.mark.parametrize("secret", ["", SECRET])
def test_a_greeting_is_read_as_it_was_sent_and_never_drawn_twice(secret: str) -> None:
    sent = Greeting.of(secret)
    assert (sent.version, sent.oldest, sent.sealed) == (PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION, bool(secret))
    assert len(sent.encode()) == GREETING_BYTES
    assert Greeting.decode(sent.encode()) == sent
    assert Greeting.of(secret).nonce != sent.nonce
    assert secret.encode() not in sent.encode() or not secret


@given(st.integers(0, GREETING_BYTES - 1))
def test_a_part_of_a_greeting_is_none(cut: int) -> None:
    part = Greeting.of(SECRET).encode()[:cut]
    check_magic(part)
    with pytest.raises(HandshakeError, match=f"has {cut} bytes, not {GREETING_BYTES}"):
        Greeting.decode(part)


@given(st.binary(min_size=1, max_size=2 * GREETING_BYTES))
def test_bytes_of_another_program_are_told_from_a_greeting_at_the_first_difference(data: bytes) -> None:
    first = next((at for at, (one, other) in enumerate(zip(data, MAGIC, strict=False)) if one != other), None)
    if first is None:
        return
    check_magic(data[:first])
    for length in range(first + 1, len(data) + 1):
        with pytest.raises(HandshakeError, match="no greeting of cpkv"):
            check_magic(data[:length])


def test_versions_that_make_no_sense_are_refused() -> None:
    for newest, oldest in ((1, 0), (1, 2), (0, 0)):
        with pytest.raises(HandshakeError, match=f"malformed: versions {oldest} to {newest}"):
            Greeting.decode(greeting(newest, oldest).encode())


@given(*(st.integers(1, 6) for _ in range(4)))
def test_both_ends_come_to_the_same_version_or_both_refuse(a: int, b: int, c: int, d: int) -> None:
    ours, theirs = greeting(max(a, b), min(a, b)), greeting(max(c, d), min(c, d))
    common = set(range(ours.oldest, ours.version + 1)) & set(range(theirs.oldest, theirs.version + 1))
    for one, other in ((ours, theirs), (theirs, ours)):
        if common:
            assert agree(one, other) == max(common)
        else:
            with pytest.raises(HandshakeError, match="the peer speaks version"):
                agree(one, other)


def test_versions_that_do_not_meet_are_named_with_what_to_install() -> None:
    older, newer = greeting(2, 1), greeting(4, 3)
    with pytest.raises(HandshakeError) as refusal:
        agree(older, newer)
    assert "the peer speaks version 3 to 4, this build version 1 to 2" in str(refusal.value)
    assert "install a cpkv that speaks version 3 on this side" in str(refusal.value)
    with pytest.raises(HandshakeError, match="install a cpkv that speaks version 3 there"):
        agree(newer, older)
    with pytest.raises(HandshakeError, match="the peer speaks version 3, this build version 1;"):
        agree(greeting(1, 1), greeting(3, 3))


def test_a_secret_on_one_side_only_names_the_side_without() -> None:
    open_end, sealed_end = Greeting.of(""), Greeting.of(SECRET)
    with pytest.raises(HandshakeError, match="this side has no secret .*; start this side with the same secret"):
        agree(open_end, sealed_end)
    with pytest.raises(HandshakeError, match="the peer has no secret .*; start the peer with the same secret"):
        agree(sealed_end, open_end)


def test_an_echo_of_the_own_greeting_is_refused() -> None:
    ours = Greeting.of(SECRET)
    with pytest.raises(HandshakeError, match="sends our own greeting back"):
        agree(ours, Greeting.decode(ours.encode()))


# Seals.


def test_frames_pass_in_order_and_in_both_directions() -> None:
    client, server = seals()
    for sender, receiver in ((client, server), (server, client)):
        for body in BODIES:
            seal = sender.seal(body)
            assert len(seal) == SEAL_BYTES == sender.num_bytes
            receiver.check(body, seal)


def test_without_a_secret_seals_are_empty() -> None:
    client, server = seals("")
    assert client.num_bytes == 0
    for body in BODIES:
        assert client.seal(body) == b""
        server.check(body, b"")
    with pytest.raises(ProtocolError):
        server.check(b"", bytes(SEAL_BYTES))


@given(st.integers(0, len(BODIES) - 1), st.data())
def test_any_flipped_bit_is_refused(number: int, data: st.DataObject) -> None:
    client, server = seals()
    for body in BODIES[:number]:
        server.check(body, client.seal(body))
    body = BODIES[number]
    seal = client.seal(body)
    bit = data.draw(st.integers(0, 8 * len(seal + body) - 1))
    flipped = bytearray(seal + body)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match=f"the seal of frame {number} is wrong"):
        server.check(bytes(flipped[SEAL_BYTES:]), bytes(flipped[:SEAL_BYTES]))


@given(st.binary(max_size=50), st.integers(1, 50), st.binary(min_size=1, max_size=5))
def test_a_body_that_was_cut_or_lengthened_is_refused(body: bytes, cut: int, more: bytes) -> None:
    for changed in {body[:-cut], body + more} - {body}:
        client, server = seals()
        seal = client.seal(body)
        with pytest.raises(ProtocolError):
            server.check(changed, seal)
    client, server = seals()
    with pytest.raises(ProtocolError):
        server.check(body, client.seal(body)[:-cut])


@given(st.lists(st.integers(0, len(BODIES) - 1), max_size=8))
def test_no_order_of_frames_passes_but_theirs(order: list[int]) -> None:
    """Dropped, repeated and swapped frames: some have equal bodies, and still each is known by its place."""
    client, server = seals()
    sent = [(body, client.seal(body)) for body in BODIES]
    for place, number in enumerate(order):
        if place == number:
            server.check(*sent[number])
            continue
        with pytest.raises(ProtocolError):
            server.check(*sent[number])
        return


@given(st.integers(0, 3), st.binary(max_size=20))
def test_a_frame_that_is_turned_back_is_refused(before: int, body: bytes) -> None:
    client, server = seals()
    for _ in range(before):
        server.check(body, client.seal(body))
        client.check(body, server.seal(body))
    seal = client.seal(body)
    with pytest.raises(ProtocolError):
        client.check(body, seal)
    seal = server.seal(body)
    with pytest.raises(ProtocolError):
        server.check(body, seal)


def test_a_frame_of_another_connection_or_another_secret_is_refused() -> None:
    client, _ = seals()
    _, other = seals()
    with pytest.raises(ProtocolError):
        other.check(b"body", client.seal(b"body"))
    client, server = seals(SECRET, SECRET + " ")
    with pytest.raises(ProtocolError, match="or sealed with another secret"):
        server.check(b"body", client.seal(b"body"))


@pytest.mark.parametrize("changed", [{"version": 3}, {"nonce": bytes(32)}, {"sealed": False}])
def test_a_greeting_that_was_changed_on_its_way_makes_every_seal_wrong(changed: dict[str, object]) -> None:
    """So nobody between can talk two ends down to an older version."""
    ours, theirs = Greeting.of(SECRET), Greeting.of(SECRET)
    client = FrameSeal(SECRET, "client", ours, theirs)
    server = FrameSeal(SECRET, "server", theirs, replace(ours, **changed))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        server.check(b"", client.seal(b""))


# Which secrets do.


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost"])
def test_on_loopback_a_secret_may_be_left_out(host: str) -> None:
    check_secret(host, "")
    check_secret(host, "x" * MIN_SECRET_CHARS)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "fe80::1", "decode-host", "", "localhost.example.org"])
def test_beyond_loopback_a_secret_is_mandatory(host: str) -> None:
    check_secret(host, "x" * MIN_SECRET_CHARS)
    with pytest.raises(ConfigError, match=f"{host} is not a loopback address.*secret of {MIN_SECRET_CHARS} or more"):
        check_secret(host, "")


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_a_short_secret_is_refused_everywhere_and_not_repeated(host: str) -> None:
    with pytest.raises(ConfigError, match=f"has 15 characters, {MIN_SECRET_CHARS} are the least") as refusal:
        check_secret(host, "hunter2hunter2!")
    assert "hunter2" not in str(refusal.value)


# The listening end, as bytes.


def talk(secret: str, bodies: list[bytes]) -> tuple[ServerFrames, bytes, FrameSeal]:
    """A listening end, everything that a client sends to it, and the client's seal."""
    frames = ServerFrames(secret)
    ours = Greeting.of(secret)
    seal = FrameSeal(secret, "client", ours, Greeting.decode(frames.greeting))
    return frames, ours.encode() + b"".join(frame_of(seal, body) for body in [b"", *bodies]), seal


@pytest.mark.parametrize("secret", ["", SECRET])
@given(cuts=st.lists(st.integers(1, 200), min_size=1))
def test_frames_are_found_wherever_the_network_cuts(secret: str, cuts: list[int]) -> None:
    frames, sent, seal = talk(secret, BODIES)
    taken, answered, at = [], b"", 0
    for cut in [*cuts, len(sent)]:
        answered += frames.feed(sent[at : at + cut])
        at += cut
        while frames.has_frame:
            taken.append(frames.take())
    assert taken == BODIES
    assert frames.proved and not frames.begun
    assert answered[: LENGTH.size] == LENGTH.pack(0)
    seal.check(b"", answered[LENGTH.size :])
    frame = frames.frame(b"answer")
    seal.check(b"answer", frame[LENGTH.size : LENGTH.size + seal.num_bytes])


@given(st.data())
def test_nothing_of_a_changed_stream_is_taken_from_the_change_on(data: st.DataObject) -> None:
    frames, sent, _ = talk(SECRET, BODIES)
    bit = data.draw(st.integers(0, 8 * len(sent) - 1))
    changed = bytearray(sent)
    changed[bit // 8] ^= 1 << bit % 8
    taken: list[bytes] = []
    refused = False
    try:
        frames.feed(bytes(changed))
        while frames.has_frame:
            taken.append(frames.take())
    except (HandshakeError, ProtocolError):
        refused = True
    # A length that grew is waited for, and ends by the time that a frame may take.
    assert refused or frames.begun
    ends = [GREETING_BYTES + LENGTH.size + SEAL_BYTES]
    for body in BODIES:
        ends.append(ends[-1] + LENGTH.size + SEAL_BYTES + len(body))
    whole = sum(end <= bit // 8 for end in ends[1:])
    assert taken == BODIES[:whole]
    assert frames.proved == (bit // 8 >= ends[0])


@pytest.mark.parametrize("length", [1, 65536, 2**32 - 1])
def test_before_the_proof_no_frame_with_a_body_is_even_begun(length: int) -> None:
    frames, ours = ServerFrames(SECRET), Greeting.of(SECRET)
    assert frames.feed(ours.encode()) == b""
    with pytest.raises(HandshakeError, match="a message before the empty frame that proves the secret"):
        frames.feed(LENGTH.pack(length))


def test_a_wrong_secret_is_refused_without_an_answer() -> None:
    frames, ours = ServerFrames(SECRET), Greeting.of("another secret of a run")
    seal = FrameSeal("another secret of a run", "client", ours, Greeting.decode(frames.greeting))
    with pytest.raises(HandshakeError, match="its secret is another than that of this side"):
        frames.feed(ours.encode() + frame_of(seal, b""))
    assert not frames.proved


def test_a_frame_over_the_limit_is_refused_by_its_length_alone_and_not_sent() -> None:
    _, sent, _ = talk("", [b"x" * 1001])
    frames = ServerFrames("", max_frame_bytes=1000)
    frames.feed(sent[: GREETING_BYTES + 2 * LENGTH.size])
    assert frames.has_frame
    with pytest.raises(ProtocolError, match="announced a frame of 1001 bytes, over the limit of 1000"):
        frames.take()
    with pytest.raises(ProtocolError, match="a message of 1001 bytes is over the limit of 1000"):
        frames.frame(b"x" * 1001)
