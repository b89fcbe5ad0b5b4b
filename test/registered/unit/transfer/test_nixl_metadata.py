"""The metadata server and its links: who hears what and when, and that neither end can be harmed by the other."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from cpkv.errors import TransferError
from cpkv.testing.ports import closed_port
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer import nixl_metadata
from cpkv.transfer.nixl_metadata import MAX_ANSWER_BYTES, Metadata, MetadataLink, MetadataServer
from cpkv.transfer.runs import Region

register_cpu_ci(est_time=1, suite="unit")

FIRST = Metadata("engine", "agent-1", b"\x00blob", (Region(4096, 64),))
SECOND = Metadata("engine", "agent-2", b"other", (Region(4096, 64), Region(8192, 128)))
LIMIT_S = 15.0


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    server = MetadataServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def link_to() -> Iterator[Callable[..., MetadataLink]]:
    links: list[MetadataLink] = []

    def connect(port: int, identity: str = "engine") -> MetadataLink:
        links.append(MetadataLink(f"127.0.0.1:{port}/{identity}"))
        return links[-1]

    yield connect
    for link in links:
        link.close()


def heard(link: MetadataLink, is_it: Callable[[Metadata], bool] = lambda _: True) -> Metadata:
    """What the link says once it says it."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if (metadata := link.metadata()) is not None and is_it(metadata):
            return metadata
    raise AssertionError("never heard")


def failure(link: MetadataLink) -> str:
    """The error that the link ends with."""
    with pytest.raises(TransferError) as ended:
        heard(link, lambda _: False)
    return str(ended.value)


def ended(connection: socket.socket) -> bool:
    """Whether the server closes this connection; what it sends before is read."""
    connection.settimeout(LIMIT_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_who_connects_is_told_and_every_change_reaches_every_link(
    server: MetadataServer, link_to: Callable[..., MetadataLink]
) -> None:
    server.publish(FIRST)
    links = [link_to(server.port) for _ in range(3)]
    assert [heard(link) for link in links] == [FIRST] * 3
    server.publish(SECOND)
    assert [heard(link, lambda told: told == SECOND) for link in links] == [SECOND] * 3
    assert heard(link_to(server.port)) == SECOND


def test_a_question_hides_the_old_answer_until_the_new_one_is_there(
    server: MetadataServer, link_to: Callable[..., MetadataLink]
) -> None:
    server.publish(FIRST)
    link = link_to(server.port)
    heard(link)
    with server._lock:  # the server cannot answer now
        asked = link.waiting_since
        link.ask()
        assert link.waiting_since > asked and link.metadata() is None
        server._metadata = SECOND
    assert heard(link) == SECOND


def test_a_closed_server_and_a_free_port_are_nobody(link_to: Callable[..., MetadataLink]) -> None:
    server = MetadataServer("127.0.0.1")
    server.publish(FIRST)
    link = link_to(server.port)
    heard(link)
    server.close()
    assert "is not there (it closed its engine or died); start it, or take its id" in failure(link)
    assert "is not there (Connection refused)" in failure(link_to(closed_port()))


def test_another_engine_on_the_port_is_not_taken_for_the_peer(
    server: MetadataServer, link_to: Callable[..., MetadataLink]
) -> None:
    server.publish(FIRST)
    assert "engine 'engine' has its port now" in failure(link_to(server.port, "earlier"))


@pytest.mark.parametrize("session_id", ["no session at all", "127.0.0.1:80", "127.0.0.1:port/x", "a.b.invalid:1/x"])
def test_an_id_that_leads_nowhere_is_refused(session_id: str) -> None:
    with pytest.raises(TransferError, match=f"peer {session_id} has no address that resolves"):
        MetadataLink(session_id)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"HTTP/1.1 400 Bad Request", r"an answer of 1,213,486,160 bytes, over the limit of 1,048,576"),
        (frame(b"\xc1"), "does not answer like a NIXL engine"),
        (frame(msgspec.msgpack.encode({"questions": 0})), "missing required field `metadata`"),
        (struct.pack(">I", MAX_ANSWER_BYTES + 1), "over the limit"),
    ],
)
def test_what_is_no_answer_fails_the_link(link_to: Callable[..., MetadataLink], sent: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        link = link_to(stranger.getsockname()[1])
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(sent)
            assert says in failure(link)


def test_an_answer_in_pieces_is_put_together(link_to: Callable[..., MetadataLink]) -> None:
    whole = frame(msgspec.msgpack.encode({"metadata": FIRST, "questions": 0}))
    with socket.create_server(("127.0.0.1", 0)) as slow:
        link = link_to(slow.getsockname()[1])
        connection, _ = slow.accept()
        with connection:
            for at in range(len(whole)):
                assert link.metadata() is None
                connection.sendall(whole[at : at + 1])
            assert heard(link) == FIRST


def test_a_stranger_that_talks_nonsense_loses_its_connection_only(
    server: MetadataServer, link_to: Callable[..., MetadataLink]
) -> None:
    server.publish(FIRST)
    good = link_to(server.port)
    heard(good)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert ended(stranger)
    good.ask()
    assert heard(good) == FIRST


def test_a_peer_that_never_reads_is_dropped_and_costs_bounded_memory(
    server: MetadataServer, link_to: Callable[..., MetadataLink]
) -> None:
    server.publish(Metadata("engine", "agent", bytes(MAX_ANSWER_BYTES - 4096), ()))
    with socket.create_connection(("127.0.0.1", server.port)) as deaf:
        deadline = time.monotonic() + LIMIT_S
        while not server._readers:
            assert time.monotonic() < deadline
        while server._readers:
            assert time.monotonic() < deadline, "it is kept for ever"
            assert all(len(reader.unsent) < 8 << 20 for reader in list(server._readers.values()))
            try:
                deaf.sendall(b"?")
            except ConnectionError:
                break
    assert heard(link_to(server.port)).agent == "agent"


def test_links_are_counted(
    server: MetadataServer, link_to: Callable[..., MetadataLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_metadata, "_MAX_LINKS", 2)
    server.publish(FIRST)
    links = [link_to(server.port) for _ in range(2)]
    for link in links:
        heard(link)
    assert "is not there" in failure(link_to(server.port))
    links[0].close()
    deadline = time.monotonic() + LIMIT_S
    while len(server._readers) == 2 and time.monotonic() < deadline:
        pass
    assert heard(link_to(server.port)) == FIRST, "a link that ended makes room"


def test_metadata_that_no_link_would_take_is_refused_here(
    server: MetadataServer, link_to: Callable[..., MetadataLink]
) -> None:
    server.publish(FIRST)
    with pytest.raises(TransferError, match=r"0 registered regions has 1,048,\d{3} bytes .* accepts 1,048,576"):
        server.publish(Metadata("engine", "agent", bytes(MAX_ANSWER_BYTES - 8), ()))
    assert heard(link_to(server.port)) == FIRST
