"""A registry that restarts, stops, answers nonsense or is not there: workers go on with whom they found before."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from registry_cluster import LONG_S, SECRET, Cluster, Odd, ask, count, names_of, odd_registry, record

from cpkv.errors import HandshakeError, TransferError
from cpkv.protocol.registry_messages import (
    ListWorkers,
    RegisterWorker,
    Workers,
)
from cpkv.testing.ports import closed_port
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer import registry_client
from cpkv.transfer.channel import Channel, connect, listen
from cpkv.transfer.registry_client import list_workers
from cpkv.transfer.server import Connection

register_cpu_ci(est_time=8, suite="unit")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="cpkv")
    return caplog


# The registry goes away and comes back.


def test_a_registry_that_restarts_learns_its_workers_again(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    server = cluster.registry()
    port = server.port
    prefill = cluster.member(port, "prefill-0", role="prefill")
    decode = cluster.member(port, "decode-0")
    found = prefill.find("decode")
    server.close()
    for _ in range(20):
        assert prefill.find("decode") == found, "what was found before stays usable"
    assert prefill.wait_for("decode", 1, 0.0) == found
    with pytest.raises(TransferError, match=f"127.0.0.1:{port}"):
        prefill.wait_for("decode", 2, 0.2)
    assert decode.wait_for("prefill", 0, 0.0) == ()
    cluster.registry(port)
    for client in (prefill, decode):
        client.wait_registered(LONG_S)
        assert prefill.find("decode") == found
    assert names_of(list_workers("127.0.0.1", port, secret=SECRET)) == ["decode-0", "prefill-0"]
    assert count(logged, "going on with the workers found before") == 2, "one line of each client"
    assert count(logged, f"the registry at 127.0.0.1:{port} is back") == 2


def test_a_young_registry_makes_nobody_forget_who_has_yet_to_come_back(cluster: Cluster) -> None:
    server = cluster.registry(clock=cluster.clock)
    port = server.port
    prefill = cluster.member(port, "prefill-0", role="prefill")
    channel = cluster.channel(port)
    ask(channel, RegisterWorker(record("decode-0")))
    assert names_of(prefill.find("decode")) == ["decode-0"]
    server.close()
    cluster.registry(port, clock=cluster.clock)
    assert names_of(prefill.find("decode")) == ["decode-0"], "nobody answered the old connection"
    prefill.wait_registered(LONG_S)
    told: Workers = ask(cluster.channel(port), ListWorkers("decode"))
    assert (told.settled, told.workers) == (False, ())
    assert names_of(prefill.find("decode")) == ["decode-0"]
    cluster.clock.now_s += 60
    assert prefill.find("decode") == (), "it had a whole lease"


def test_a_client_may_be_there_before_its_registry(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    port = closed_port()
    decode = cluster.client(port, record("decode-0"))
    for call in (
        lambda: decode.find("decode"),
        lambda: decode.wait_for("decode", 1, 0.1),
        lambda: decode.wait_registered(0.1),
        lambda: list_workers("127.0.0.1", port, secret=SECRET),
    ):
        with pytest.raises(TransferError, match=f"the registry at 127.0.0.1:{port} is not there: .*; start it first"):
            call()
    cluster.registry(port)
    decode.wait_registered(LONG_S)
    assert names_of(decode.find("decode")) == ["decode-0"]
    assert count(logged, f"the registry at 127.0.0.1:{port} is not there") == 1


def test_attempts_are_further_and_further_apart_and_told_once(
    cluster: Cluster, logged: pytest.LogCaptureFixture
) -> None:
    """A listener that ends every connection at once, as a port that another program has would."""
    with closing(listen("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_S)
        cluster.client(listener.getsockname()[1], record("decode-0"))
        times = []
        for _ in range(5):
            connection, _ = listener.accept()
            times.append(time.monotonic())
            connection.close()
    # 0.1, 0.2, 0.4 and 0.8 s, or half of that.
    for attempt, least_s in enumerate((0.04, 0.09, 0.19, 0.39)):
        assert times[attempt + 1] - times[attempt] >= least_s
    assert count(logged, "going on with") == 1


def test_a_registry_that_stops_answering_is_waited_for_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and reads, as a stopped process does."""
    monkeypatch.setattr(registry_client, "ANSWER_S", 0.3)
    with closing(listen("127.0.0.1", 0)) as silent:
        client = cluster.client(silent.getsockname()[1], record("decode-0"))
        started = time.monotonic()
        with pytest.raises(HandshakeError, match="nothing came in time"):
            client.find("decode")
        assert time.monotonic() - started < 5
        client.close()
        with pytest.raises(HandshakeError, match="nothing came in time"):
            list_workers("127.0.0.1", silent.getsockname()[1], secret=SECRET)


def test_a_registry_that_stops_after_the_handshake_costs_no_worker_that_was_found(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_client, "ANSWER_S", 0.3)
    gate = threading.Event()
    gate.set()

    class Stopping(Odd):
        def answer(self, connection: Connection, message: Any) -> Any:
            gate.wait(LONG_S)
            return Workers("one", True, (record("decode-0"),))

    port = odd_registry(cluster, Stopping())
    cluster.stack.callback(gate.set)
    client = cluster.client(port)
    assert names_of(client.find("decode")) == ["decode-0"]
    gate.clear()
    started = time.monotonic()
    assert [names_of(client.find("decode")) for _ in range(100)] == [["decode-0"]] * 100
    assert time.monotonic() - started < 5
    with pytest.raises(TransferError, match="the registry at 127.0.0.1:.* has 1 of 2|does not answer|handshake"):
        client.wait_for("decode", 2, 0.1)
    gate.set()


def test_an_answer_that_fits_no_question_is_an_error_with_the_address(cluster: Cluster) -> None:
    port = odd_registry(cluster, Odd())
    client = cluster.client(port, record("decode-0"))
    says = (
        f"the registry at 127.0.0.1:{port} does not answer: asked {{}}, the registry answered Done; start it again "
        f"with `cpkv registry --host 127.0.0.1 --port {port}`, or wait if it is busy"
    )
    with pytest.raises(TransferError) as told:
        client.wait_registered(0.5)
    assert str(told.value) == says.format("RegisterWorker")
    with pytest.raises(TransferError) as told:
        list_workers("127.0.0.1", port, secret=SECRET)
    assert str(told.value) == says.format("ListWorkers")


def test_a_fault_of_our_own_does_not_end_the_thread(
    cluster: Cluster, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = cluster.registry().port
    faults = [RuntimeError("a fault"), RuntimeError("another")]

    def fails_twice(*args: Any, **kwargs: Any) -> Channel:
        if faults:
            raise faults.pop()
        return connect(*args, **kwargs)

    monkeypatch.setattr(registry_client, "connect", fails_twice)
    cluster.member(port, "decode-0")
    assert not faults and count(logged, "unexpected error at the registry") == 2


def test_closing_takes_no_longer_than_an_answer_whatever_the_registry_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_client, "ANSWER_S", 0.3)
    with closing(socket.socket()) as full:
        # Nobody accepts, and what connects hangs.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        clients = [cluster.client(full.getsockname()[1], record(f"decode-{number}")) for number in range(4)]
        started = time.monotonic()
        for client in clients:
            client.close()
        assert time.monotonic() - started < 8
