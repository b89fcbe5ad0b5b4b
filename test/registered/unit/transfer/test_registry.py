"""Workers find each other over a registry, and one name has one holder."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from registry_cluster import LONG_S, SECRET, Cluster, Odd, ask, count, names_of, odd_registry, record, until

from cpkv.errors import ConfigError, CpkvError, HandshakeError, TransferError
from cpkv.protocol.directory import MAX_RECORDS, Lease, WorkerRecord
from cpkv.protocol.messages import Done, Failed
from cpkv.protocol.registry_messages import (
    LeaveRegistry,
    ListWorkers,
    NotRegistered,
    RegisterWorker,
    RenewLease,
)
from cpkv.testing.registration import register_cpu_ci
from cpkv.testing.sample_pool import SAMPLE_POOL
from cpkv.transfer.registry import RegistryServer
from cpkv.transfer.registry_client import RegistryClient, list_workers
from cpkv.transfer.server import Connection

register_cpu_ci(est_time=5, suite="unit")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="cpkv")
    return caplog


def test_prefill_and_decode_workers_find_each_other(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    port = cluster.registry().port
    prefill = cluster.member(port, "prefill-0", role="prefill", pool=None)
    cluster.member(port, "decode-1")
    cluster.member(port, "decode-0", port=7001)
    assert names_of(prefill.find("decode")) == ["decode-0", "decode-1"]
    assert prefill.find("decode")[0].pool == SAMPLE_POOL and prefill.find("decode")[0].port == 7001
    observer = cluster.client(port)
    assert names_of(observer.wait_for("prefill", 1, LONG_S)) == ["prefill-0"]
    assert names_of(list_workers("127.0.0.1", port, secret=SECRET)) == ["decode-0", "decode-1", "prefill-0"]
    assert names_of(list_workers("127.0.0.1", port, "prefill", secret=SECRET)) == ["prefill-0"]
    assert count(logged, "decode-0 joins: decode at 127.0.0.1:7001, instance ") == 1
    assert repr(prefill) == f"RegistryClient(holds its name at 127.0.0.1:{port})"
    assert repr(observer) == f"RegistryClient(holds no name at 127.0.0.1:{port})"


def test_a_worker_that_closes_has_left(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    port = cluster.registry().port
    prefill = cluster.member(port, "prefill-0", role="prefill")
    decode = cluster.member(port, "decode-0")
    assert names_of(prefill.find("decode")) == ["decode-0"]
    decode.close()
    decode.close()
    assert prefill.find("decode") == ()
    assert count(logged, "decode-0 leaves") == 1
    with pytest.raises(TransferError, match=f"this client of the registry at 127.0.0.1:{port} was closed; make anoth"):
        decode.find("decode")
    with pytest.raises(TransferError, match="was closed"):
        decode.wait_for("decode", 1, LONG_S)


def test_a_draining_worker_is_seen_and_not_waited_for(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    port = cluster.registry().port
    prefill = cluster.member(port, "prefill-0", role="prefill")
    decode = cluster.member(port, "decode-0")
    cluster.member(port, "decode-1")
    assert names_of(prefill.wait_for("decode", 2, LONG_S)) == ["decode-0", "decode-1"]
    decode.drain()
    until(lambda: prefill.find("decode")[0].draining)
    assert names_of(prefill.wait_for("decode", 1, LONG_S)) == ["decode-1"]
    with pytest.raises(TransferError) as short:
        prefill.wait_for("decode", 2, 0.1)
    assert str(short.value) == (
        f"the registry at 127.0.0.1:{port} has 1 of 2 decode workers that take requests after 0.1 s: decode-1; start "
        "the others, with this address as their registry"
    )
    assert count(logged, "decode-0 drains") == 1 and count(logged, "decode-0 joins") == 1


def test_waiting_ends_when_the_last_one_joins(cluster: Cluster) -> None:
    port = cluster.registry().port
    prefill = cluster.member(port, "prefill-0", role="prefill")
    found: list[tuple[WorkerRecord, ...]] = []
    waiting = threading.Thread(target=lambda: found.append(prefill.wait_for("decode", 3, LONG_S)))
    waiting.start()
    for number in range(3):
        assert not found
        cluster.member(port, f"decode-{number}")
    waiting.join()
    assert names_of(found[0]) == ["decode-0", "decode-1", "decode-2"]


# One name, two workers.


def test_the_second_worker_of_a_name_is_refused_and_the_first_one_stays(
    cluster: Cluster, logged: pytest.LogCaptureFixture
) -> None:
    """Kind 33."""
    port = cluster.registry().port
    first = cluster.member(port, "decode-0", instance="one", port=7001)
    second = cluster.client(port, record("decode-0", instance="two", port=7002))
    with pytest.raises(ConfigError, match="the name decode-0 is held by instance one at 127.0.0.1:7001 for .* s more"):
        second.wait_registered(1.0)
    assert [(worker.instance, worker.port) for worker in second.find("decode")] == [("one", 7001)]
    assert count(logged, f"not registered at 127.0.0.1:{port}, tries again: registry: the name decode-0 is held") == 1
    first.close()
    second.wait_registered(LONG_S)
    assert [(worker.instance, worker.port) for worker in second.find("decode")] == [("two", 7002)]
    assert count(logged, f"registered at 127.0.0.1:{port} now") == 1


def test_a_client_that_is_refused_does_not_take_the_name_away_when_it_closes(cluster: Cluster) -> None:
    port = cluster.registry().port
    first = cluster.member(port, "decode-0", instance="one")
    second = cluster.client(port, record("decode-0", instance="two"))
    with pytest.raises(ConfigError):
        second.wait_registered(0.1)
    second.close()
    assert [worker.instance for worker in first.find("decode")] == ["one"]


def test_after_its_lease_a_name_is_free_and_the_late_holder_changes_nothing(
    cluster: Cluster, logged: pytest.LogCaptureFixture
) -> None:
    """Kinds 33 and 35, as a worker of any build would do it."""
    port = cluster.registry(lease_s=10.0, clock=cluster.clock).port
    old, new = (record("decode-0", instance=instance) for instance in ("one", "two"))
    late, channel = cluster.channel(port), cluster.channel(port)
    assert ask(late, RegisterWorker(old)) == Lease(10.0)
    cluster.clock.now_s += 9.5
    assert isinstance(ask(channel, RegisterWorker(new)), Failed)
    assert ask(late, RenewLease("decode-0", "one")) == Lease(10.0)
    cluster.clock.now_s += 10
    assert ask(channel, RegisterWorker(new)) == Lease(10.0)
    assert ask(late, RenewLease("decode-0", "one")) == NotRegistered("decode-0")
    assert ask(late, LeaveRegistry("decode-0", "one")) == Done()
    assert isinstance(ask(late, RegisterWorker(old)), Failed)
    assert [worker.instance for worker in ask(channel, ListWorkers()).workers] == ["two"]
    assert count(logged, "decode-0 was not heard of for 10 s and is dropped") == 1
    assert count(logged, "decode-0 joins") == 2 and count(logged, "decode-0 leaves") == 0


def test_a_worker_that_was_stopped_for_too_long_finds_its_name_taken(
    cluster: Cluster, logged: pytest.LogCaptureFixture
) -> None:
    """Kind 35: it says so, and does not take the name back."""
    port = cluster.registry(clock=cluster.clock).port
    late = cluster.member(port, "decode-0", instance="one")
    cluster.clock.now_s += 60
    successor = cluster.member(port, "decode-0", instance="two")
    late.drain()
    until(lambda: "holds no name" in repr(late))
    with pytest.raises(ConfigError, match="the name decode-0 is held by instance two"):
        late.wait_registered(0)
    late.close()
    assert [(worker.instance, worker.draining) for worker in successor.find("decode")] == [("two", False)]
    assert count(logged, "not registered at") == 1


def test_the_lease_of_a_worker_that_is_not_heard_of_ends(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    port = cluster.registry(lease_s=60.0, clock=cluster.clock).port
    prefill = cluster.client(port)
    decode = cluster.member(port, "decode-0")
    cluster.clock.now_s += 59.9
    assert names_of(prefill.find("decode")) == ["decode-0"]
    cluster.clock.now_s += 0.2
    assert prefill.find("decode") == ()
    decode.drain()
    until(lambda: prefill.find("decode") != ())
    assert count(logged, "decode-0 was not heard of for 60 s") == 1 and count(logged, "decode-0 joins") == 2


def test_leases_end_without_anybody_asking(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    port = cluster.registry(lease_s=10.0, clock=cluster.clock).port
    ask(cluster.channel(port), RegisterWorker(record("decode-0")))
    cluster.clock.now_s += 10
    until(lambda: count(logged, "decode-0 was not heard of") == 1)


def test_a_client_registers_again_where_its_lease_ended(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    """At its next renewal; with leases of 0.3 s they are 0.1 s apart."""
    port = cluster.registry(lease_s=0.3, clock=cluster.clock).port
    cluster.member(port, "decode-0")
    for jump in range(1, 4):
        cluster.clock.now_s += 1
        until(lambda joins=jump + 1: count(logged, "decode-0 joins") == joins)  # type: ignore[misc]
    assert count(logged, "decode-0 was not heard of") == 3


def test_a_client_renews_every_third_of_a_lease_and_asks_for_nothing_else(cluster: Cluster) -> None:
    heard: list[tuple[float, Any]] = []

    class Listening(Odd):
        def answer(self, connection: Connection, message: Any) -> Any:
            heard.append((time.monotonic(), message))
            return NotRegistered("decode-0") if len(heard) == 4 else Lease(0.3)

    worker = record("decode-0", instance="one")
    cluster.client(odd_registry(cluster, Listening()), worker)
    until(lambda: len(heard) == 7)
    register, renew = RegisterWorker(worker), RenewLease("decode-0", "one")
    assert [message for _, message in heard[:7]] == [register, renew, renew, renew, register, renew, renew]
    pauses = [later[0] - earlier[0] for earlier, later in itertools.pairwise(heard[:7])]
    renewals = pauses[:3] + pauses[4:]
    assert 0.08 < min(renewals) < 0.25, "a third of a lease, but for the time that an answer takes"


# Secrets and bounds.


def test_a_wrong_secret_gets_nothing_and_says_so(cluster: Cluster, logged: pytest.LogCaptureFixture) -> None:
    port = cluster.registry().port
    says = f"registry at 127.0.0.1:{port} failed: "
    for secret in ("another secret than that", ""):
        stranger = cluster.client(port, record("decode-0"), secret=secret)
        calls: list[Callable[[], Any]] = [
            lambda stranger=stranger: stranger.find("decode"),
            lambda stranger=stranger: stranger.wait_registered(0.1),
            lambda secret=secret: list_workers("127.0.0.1", port, secret=secret),
        ]
        for call in calls:
            with pytest.raises(HandshakeError, match=says + (".*the secret is not that" if secret else ".*no secret")):
                call()
    assert count(logged, "joins") == 0
    assert names_of(cluster.member(port, "decode-0").find("decode")) == ["decode-0"]


def test_beyond_loopback_a_secret_is_needed() -> None:
    for make in (
        lambda: RegistryServer("0.0.0.0"),
        lambda: RegistryClient("10.1.2.3", 7400),
        lambda: list_workers("10.1.2.3", 7400),
    ):
        with pytest.raises(ConfigError, match="is not a loopback address"):
            make()
    with pytest.raises(ConfigError, match="the secret has 5 characters"):
        RegistryServer(secret="short")


def test_a_record_that_no_registry_takes_is_refused_at_once(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="the name of a worker is 'a b'"):
        RegistryClient("127.0.0.1", 1, record("a b"))
    port = cluster.registry().port
    answer = ask(cluster.channel(port), RegisterWorker(record("a b")))
    assert isinstance(answer, Failed) and (answer.kind, answer.where) == ("ConfigError", "registry")


def test_a_port_that_is_taken_is_told(cluster: Cluster) -> None:
    with pytest.raises(TransferError, match="cannot listen on 127.0.0.1:.*; give a free port"):
        RegistryServer(port=cluster.registry().port)


def test_many_workers_at_once(cluster: Cluster) -> None:
    """More connections than other servers take, and 100 clients that register and ask at the same moment."""
    port = cluster.registry().port
    channels = [cluster.channel(port) for _ in range(200)]
    for number, channel in enumerate(channels):
        assert ask(channel, RegisterWorker(record(f"idle-{number:03}"))) == Lease(60.0)
    clients = [cluster.client(port, record(f"prefill-{number:03}", role="prefill")) for number in range(100)]
    for client in clients:
        client.wait_registered(LONG_S)
    expected = [f"prefill-{number:03}" for number in range(100)]
    failures: list[str] = []

    def look(client: RegistryClient) -> None:
        try:
            for role, names in (("prefill", expected), ("decode", [f"idle-{number:03}" for number in range(200)])):
                if names_of(client.find(role)) != names:  # type: ignore[arg-type]
                    failures.append(role)
        except CpkvError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=look, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_listing_of_as_many_workers_as_there_can_be_arrives(cluster: Cluster) -> None:
    port = cluster.registry().port
    channel = cluster.channel(port)
    for number in range(MAX_RECORDS):
        ask(channel, RegisterWorker(record(f"decode-{number}", instance="one")))
    assert "1024 workers are registered" in ask(channel, RegisterWorker(record("late"))).message
    assert len(cluster.client(port).find("decode")) == MAX_RECORDS
