"""The registry: where workers register and find each other. In memory, so it starts empty, and nothing else is kept.

workers --TCP--> RegistryServer --> Directory          (their end: registry_client.py)

One that restarts learns its workers again at their next renewal, a third of a lease later at most.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from cpkv.errors import ProtocolError
from cpkv.protocol.directory import MAX_RECORDS, Directory, Lease, WorkerRecord
from cpkv.protocol.messages import Done
from cpkv.protocol.registry_messages import (
    LeaveRegistry,
    ListWorkers,
    NotRegistered,
    RegisterWorker,
    RenewLease,
    ToRegistry,
    Workers,
)
from cpkv.transfer.channel import listen
from cpkv.transfer.server import Connection, MessageServer, ServerLimits

LOG = logging.getLogger(__name__)
DEFAULT_LEASE_S = 15.0
# Beside the workers, those that only ask.
MAX_CONNECTIONS = MAX_RECORDS + 256


def draw_instance() -> str:
    """A new instance: what tells one start of a process from the next."""
    return secrets.token_hex(8)


class RegistryServer:
    """A registry: one listening port, one thread, in any process.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        secret: what clients must share; empty on loopback only.
        lease_s: how long a worker that is not heard of stays listed.
        clock: seconds.

    Raises:
        ConfigError: no secret beyond loopback, or the lease is too short or too long.
        TransferError: the port is taken or the address is not ours.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        secret: str = "",
        lease_s: float = DEFAULT_LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        handler = _RegistryHandler(Directory(lease_s), clock)
        self.host = host
        self._server = MessageServer(
            listen(host, port),
            ToRegistry,
            handler,
            secret=secret,
            where="registry",
            limits=ServerLimits(max_connections=MAX_CONNECTIONS),
        )

    def __repr__(self) -> str:
        """Where it listens."""
        return f"RegistryServer({self.host}:{self.port})"

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def close(self) -> None:
        """Stop; calling it twice is harmless."""
        self._server.close()


class _RegistryHandler:
    """Answers in the server's thread, which alone touches the directory."""

    def __init__(self, directory: Directory, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._instance = draw_instance()
        self._settled_at_s = clock() + directory.lease_s

    def answer(self, connection: Connection, message: Any) -> Any:
        now = self._clock()
        self._expire(now)
        if isinstance(message, RenewLease):
            return self._directory.renew(message.name, message.instance, now) or NotRegistered(message.name)
        if isinstance(message, ListWorkers):
            workers = self._directory.list(message.role, now)
            return Workers(self._instance, now >= self._settled_at_s, workers)
        if isinstance(message, RegisterWorker):
            return self._register(message.record, now)
        if isinstance(message, LeaveRegistry):
            if self._directory.leave(message.name, message.instance):
                LOG.info("%s leaves", message.name)
            return Done()
        raise ProtocolError(f"the registry has no answer to {type(message).__name__}")

    def _register(self, record: WorkerRecord, now: float) -> Lease:
        before = self._directory.get(record.name, now)
        lease = self._directory.register(record, now)
        if before is None:
            place = f"{record.host}:{record.port}"
            LOG.info("%s joins: %s at %s, instance %s", record.name, record.role, place, record.instance)
        elif record.draining and not before.draining:
            LOG.info("%s drains", record.name)
        return lease

    def closed(self, connection: Connection) -> None:
        """A worker whose connection ended may come back; its lease decides."""

    def tick(self, now_s: float) -> None:
        self._expire(self._clock())

    def _expire(self, now: float) -> None:
        for name in self._directory.expire(now):
            LOG.info("%s was not heard of for %g s and is dropped", name, self._directory.lease_s)
