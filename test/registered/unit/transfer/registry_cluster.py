"""Registries and clients for tests, and a registry that answers whatever a test wants."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from cpkv.protocol.directory import WorkerRecord
from cpkv.protocol.messages import Done
from cpkv.protocol.registry_messages import FromRegistry, ToRegistry
from cpkv.testing.sample_pool import SAMPLE_POOL
from cpkv.transfer.channel import Channel, connect, listen
from cpkv.transfer.registry import RegistryServer, draw_instance
from cpkv.transfer.registry_client import RegistryClient
from cpkv.transfer.server import Connection, MessageServer

SECRET = "a secret of this test"
LONG_S = 15.0


class Clock:
    """The registry's time, as the test says."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def record(name: str, **fields: Any) -> WorkerRecord:
    values: dict[str, Any] = {"role": "decode", "host": "127.0.0.1", "port": 7000, "pool": SAMPLE_POOL, **fields}
    return WorkerRecord(name=name, instance=values.pop("instance", None) or draw_instance(), **values)


class Cluster:
    """Registries and clients of one test, closed with it."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.clock = Clock()

    def registry(self, port: int = 0, *, secret: str = SECRET, lease_s: float = 60.0, **kwargs: Any) -> RegistryServer:
        server = RegistryServer(port=port, secret=secret, lease_s=lease_s, **kwargs)
        self.stack.callback(server.close)
        server.start()
        return server

    def client(self, port: int, worker: WorkerRecord | None = None, *, secret: str = SECRET) -> RegistryClient:
        client = RegistryClient("127.0.0.1", port, worker, secret=secret)
        self.stack.callback(client.close)
        return client

    def member(self, registry_port: int, name: str, **fields: Any) -> RegistryClient:
        """One that has registered."""
        client = self.client(registry_port, record(name, **fields))
        client.wait_registered(LONG_S)
        return client

    def channel(self, port: int) -> Channel:
        channel = connect("127.0.0.1", port, FromRegistry, "the registry", secret=SECRET)
        self.stack.callback(channel.close)
        return channel


def names_of(workers: tuple[WorkerRecord, ...]) -> list[str]:
    return [worker.name for worker in workers]


def count(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in message for message in caplog.messages)


def ask(channel: Channel, question: Any) -> Any:
    channel.send(question)
    return channel.receive(LONG_S)


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does next."""
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Odd:
    """A registry of another mind: it answers everything with Done."""

    def answer(self, connection: Connection, message: Any) -> Any:
        return Done()

    def closed(self, connection: Connection) -> None:
        pass

    def tick(self, now_s: float) -> None:
        pass


def odd_registry(cluster: Cluster, handler: Odd) -> int:
    """The port of one that answers as the handler says."""
    server = MessageServer(listen("127.0.0.1", 0), ToRegistry, handler, secret=SECRET, where="odd")
    cluster.stack.callback(server.close)
    server.start()
    return server.port
