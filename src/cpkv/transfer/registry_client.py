"""A worker's end of the registry: it stays registered and finds others, also while the registry is away.

        due: renew, every third of a lease          lost: try again, 0.1 s to 2 s apart
thread  ------------------------------------> link -------------------------------------> what was found before
        asked: list                                 back: register, list                   stays usable
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from typing import Any

import msgspec

from cpkv.errors import ConfigError, CpkvError, HandshakeError, TransferError
from cpkv.protocol.directory import KnownWorkers, Lease, Role, WorkerRecord, check_record
from cpkv.protocol.failures import checked_answer
from cpkv.protocol.messages import Done
from cpkv.protocol.registry_messages import (
    FromRegistry,
    LeaveRegistry,
    ListWorkers,
    NotRegistered,
    RegisterWorker,
    RenewLease,
    Workers,
)
from cpkv.protocol.sealing import check_secret
from cpkv.transfer.channel import Channel, connect

LOG = logging.getLogger(__name__)
ANSWER_S = 3.0
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 2.0
POLL_S = 0.2
LOOK_S = 5.0


class RegistryClient:
    """Keeps a worker registered and finds others, in a thread of its own that outlives restarts of the registry.

    Args:
        host: where the registry listens.
        port: its port.
        record: the worker to register; None to find others only.
        secret: what this client and the registry share.

    Raises:
        ConfigError: the record breaks a bound, or there is no secret for a registry beyond loopback.
    """

    def __init__(self, host: str, port: int, record: WorkerRecord | None = None, *, secret: str = "") -> None:
        check_secret(host, secret)
        if record is not None:
            check_record(record)
        self.host, self.port = host, port
        self._secret = secret
        self._changed = threading.Condition()
        # Both sides use these, under the condition.
        self._record = record
        self._known = KnownWorkers()
        self._holds_name = False
        self._lost: CpkvError | None = None
        self._refused: ConfigError | None = None
        self._asked = self._listed = 0
        self._ever_listed = False
        self._closing = False
        # These are the thread's own. What it told the registry last is renewed, anything newer registered.
        self._link: _RegistryLink | None = None
        self._told: WorkerRecord | None = None
        self._due_s = 0.0
        self._delay_s = FIRST_DELAY_S
        self._longest_delay_s = LONGEST_DELAY_S
        self._thread = threading.Thread(target=self._serve, name=f"registry client of {host}:{port}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """The registry, and whether this worker holds its name there."""
        with self._changed:
            holds = "holds its name" if self._holds_name else "holds no name"
            return f"RegistryClient({holds} at {self.host}:{self.port})"

    def find(self, role: Role) -> tuple[WorkerRecord, ...]:
        """The workers of a role by name, draining ones too: as they are now, or as found before if it does not answer.

        Takes a few seconds at most, and no time while the registry is known to be away.

        Raises:
            TransferError: the registry does not answer and never did.
        """
        with self._changed:
            self._look()
            if not self._ever_listed:
                raise self._unanswered()
            return self._known.find(role)

    def wait_for(self, role: Role, count: int, timeout_s: float) -> tuple[WorkerRecord, ...]:
        """Wait until so many workers of a role take requests: all that do, by name.

        Raises:
            TransferError: there are fewer after timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._look(min(timeout_s, 2 * ANSWER_S))
                found = tuple(worker for worker in self._known.find(role) if not worker.draining)
                if len(found) >= count:
                    return found
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait_for(lambda: self._closing, min(POLL_S, left_s))
            if self._lost is not None or not self._ever_listed:
                raise self._unanswered()
            names = ", ".join(worker.name for worker in found) or "none"
            raise TransferError(
                f"the registry at {self.host}:{self.port} has {len(found)} of {count} {role} workers that take "
                f"requests after {timeout_s:g} s: {names}; start the others, with this address as their registry"
            )

    def wait_registered(self, timeout_s: float) -> None:
        """Wait until this worker holds its name.

        Raises:
            ConfigError: it is refused, and still is after timeout_s: another instance holds the name, or there is
                no room.
            TransferError: the registry does not answer, and still does not after timeout_s.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._holds_name, timeout_s):
                raise self._refused if self._refused is not None and self._lost is None else self._unanswered()

    def drain(self) -> None:
        """Tell the others that this worker takes no new requests."""
        with self._changed:
            if self._record is not None:
                self._record = msgspec.structs.replace(self._record, draining=True)
                self._changed.notify_all()

    def close(self) -> None:
        """Leave, if the registry answers, and end the thread; a few seconds at most. Calling it twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _look(self, timeout_s: float = 2 * ANSWER_S) -> None:
        """Have the thread list once more, and wait for that unless the registry is known to be away."""
        self._asked += 1
        wanted = self._asked
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._listed >= wanted or self._lost is not None or self._closing, timeout_s)
        if self._closing:
            raise TransferError(f"this client of the registry at {self.host}:{self.port} was closed; make another")

    def _unanswered(self) -> CpkvError:
        cause = self._lost or "it has not answered yet"
        kind = HandshakeError if isinstance(cause, HandshakeError) else TransferError
        return kind(_with_address(self.host, self.port, cause))

    # From here on, the thread.

    def _serve(self) -> None:
        while self._wait():
            try:
                self._exchange()
            except Exception as error:  # the thread must outlive whatever the registry does
                self._lose(error)
        self._leave()

    def _wait(self) -> bool:
        """Wait until there is something to do; False once this client is closed."""
        with self._changed:
            while not self._closing:
                left_s = self._due_s - time.monotonic()
                asked = self._asked != self._listed or self._record is not self._told
                if left_s <= 0 or (asked and self._link is not None):
                    return True
                self._changed.wait(left_s)
        return False

    def _exchange(self) -> None:
        """Connect if need be, register or renew what is due, list if somebody asked; then tell the other side."""
        if self._link is None:
            self._link = _RegistryLink(self.host, self.port, self._secret)
        with self._changed:
            record, wanted, listed, was_refused = self._record, self._asked, self._listed, self._refused
        now_s = time.monotonic()
        due = now_s >= self._due_s
        refused, workers = was_refused, None
        if record is None:
            self._due_s, self._delay_s = now_s + LOOK_S, FIRST_DELAY_S
        elif due or record is not self._told:
            refused = self._hold(self._link, record)
        if wanted != listed or (record is None and due):
            workers = self._link.ask(ListWorkers(), Workers)
        with self._changed:
            was_lost, self._lost = self._lost, None
            self._refused = refused
            self._holds_name = record is not None and refused is None
            if workers is not None:
                self._known.learn(workers.registry, workers.settled, workers.workers)
                self._listed, self._ever_listed = wanted, True
            self._changed.notify_all()
        if was_lost is not None:
            LOG.warning("the registry at %s:%d is back", self.host, self.port)
        if refused is not None and was_refused is None:
            LOG.warning("not registered at %s:%d, tries again: %s", self.host, self.port, refused)
        elif refused is None and was_refused is not None:
            LOG.warning("registered at %s:%d now", self.host, self.port)

    def _hold(self, link: _RegistryLink, record: WorkerRecord) -> ConfigError | None:
        """Renew the lease, or register where there is none; why the registry refuses."""
        asked_s = time.monotonic()
        reply: Any = None
        try:
            if record is self._told:
                reply = link.ask(RenewLease(record.name, record.instance), Lease, NotRegistered)
            if not isinstance(reply, Lease):
                reply = link.ask(RegisterWorker(record), Lease)
        except ConfigError as error:
            self._told = record
            self._back_off()
            return error
        self._told = record
        self._delay_s = FIRST_DELAY_S
        self._longest_delay_s = min(LONGEST_DELAY_S, reply.seconds / 3)
        self._due_s = asked_s + reply.seconds / 3
        return None

    def _lose(self, error: Exception) -> None:
        """Note that the registry does not answer, and when to try again."""
        if not isinstance(error, CpkvError):
            LOG.error("unexpected error at the registry %s:%d", self.host, self.port, exc_info=error)
            error = TransferError(f"unexpected {type(error).__name__}: {error}")
        if self._link is not None:
            self._link.close()
        self._link = None
        self._back_off()
        with self._changed:
            was_lost, self._lost = self._lost, error
            self._holds_name = False
            self._changed.notify_all()
        if was_lost is None:
            LOG.warning("%s; going on with the workers found before", _with_address(self.host, self.port, error))

    def _back_off(self) -> None:
        # Of many workers that lost one registry, not all come back in the same moment.
        self._due_s = time.monotonic() + self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, self._longest_delay_s)

    def _leave(self) -> None:
        if self._link is None:
            return
        if self._told is not None:
            with contextlib.suppress(CpkvError):
                self._link.ask(LeaveRegistry(self._told.name, self._told.instance), Done)
        self._link.close()


class _RegistryLink:
    """A connection to a registry: one question and one answer at a time, each within ANSWER_S."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._channel: Channel = connect(host, port, FromRegistry, "the registry", secret=secret, timeout_s=ANSWER_S)

    def ask(self, question: Any, *answers: type) -> Any:
        """Send a message and wait for an answer of one of these types.

        Raises:
            CpkvError: what the registry reported.
            TransferError: it is gone, or late.
            ProtocolError: it answered something else.
        """
        self._channel.send(question)
        reply = self._channel.receive(ANSWER_S)
        return checked_answer(question, reply, answers, self._channel.peer)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def list_workers(host: str, port: int, role: Role | None = None, *, secret: str = "") -> tuple[WorkerRecord, ...]:
    """Ask a registry once who is there, by name.

    Raises:
        ConfigError: no secret for a registry beyond loopback.
        HandshakeError: it has another secret, or speaks another version.
        TransferError: it does not answer.
    """
    check_secret(host, secret)
    link = None
    try:
        link = _RegistryLink(host, port, secret)
        told: Workers = link.ask(ListWorkers(role), Workers)
        return told.workers
    except TransferError as error:
        raise type(error)(_with_address(host, port, error)) from error
    finally:
        if link is not None:
            link.close()


def _with_address(host: str, port: int, cause: object) -> str:
    # What `connect` raises names the address and what to do already.
    if f"{host}:{port}" in str(cause):
        return str(cause)
    return (
        f"the registry at {host}:{port} does not answer: {cause}; start it again with "
        f"`cpkv registry --host {host} --port {port}`, or wait if it is busy"
    )
