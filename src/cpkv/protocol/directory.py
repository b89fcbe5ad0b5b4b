"""Which workers are there: names held for a lease. No I/O and no clock: `now` is an argument, in seconds.

register   name free, or held by the same instance ----> held until now + lease
           name held by another instance --------------> refused, with who holds it and for how long
renew      held by this instance ----------------------> held until now + lease
           anything else ------------------------------> None: register
leave      held by this instance ----------------------> free at once
           (no renewal until the lease ends) ----------> free, and named once by `expire`

An instance is drawn once per start of a process. What comes late from an earlier start of a worker therefore never
touches the record of its successor, which has the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from cpkv.errors import ConfigError
from cpkv.protocol.messages import PoolDescription

MAX_RECORDS = 1024
MAX_NAME_CHARS = 64
MAX_RECORD_BYTES = 16 << 10
MIN_LEASE_S, MAX_LEASE_S = 0.1, 3600.0
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME_CHARS}}}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")

Role = Literal["prefill", "decode"]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells of itself.

    Attributes:
        name: by which others know it; one live instance has it at a time.
        role: what it does.
        instance: drawn at each start of its process.
        host: where it is reached.
        port: its port there.
        pool: its pages, as the handshake will compare them; None where it has none yet.
        draining: it takes no new requests.
    """

    name: str
    role: Role
    instance: str
    host: str
    port: int
    pool: PoolDescription | None
    draining: bool = False


class Lease(msgspec.Struct, frozen=True, tag=True):
    """A name is held for so many seconds from when it was asked for."""

    seconds: Annotated[float, msgspec.Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]


def check_record(record: WorkerRecord) -> None:
    """Refuse a record that no directory takes.

    Raises:
        ConfigError: naming the field, and what it may be.
    """
    for field, text in (("name", record.name), ("instance", record.instance)):
        if not _NAME.fullmatch(text):
            raise ConfigError(
                f"the {field} of a worker is {_shortened(text)}; give 1 to {MAX_NAME_CHARS} characters of "
                "A-Z a-z 0-9 . _ -"
            )
    if not _HOST.fullmatch(record.host):
        raise ConfigError(f"worker {record.name} has host {_shortened(record.host)}; give a host name or an address")
    if not 1 <= record.port <= 65535:
        raise ConfigError(f"worker {record.name} has port {record.port}; give the one that it listens on, 1 to 65535")
    size = len(msgspec.msgpack.encode(record))
    if size > MAX_RECORD_BYTES:
        raise ConfigError(
            f"worker {record.name} describes itself in {size} bytes; {MAX_RECORD_BYTES} is the limit: shorten the "
            "name of its model"
        )


def _shortened(text: str) -> str:
    return repr(text if len(text) <= MAX_NAME_CHARS else f"{text[:MAX_NAME_CHARS]}...")


@dataclass(frozen=True)
class _Held:
    record: WorkerRecord
    until: float


class Directory:
    """Names and who holds them.

    Args:
        lease_s: seconds for which a registration or a renewal holds.
        max_records: workers at most.

    Raises:
        ConfigError: the lease is too short or too long.
    """

    def __init__(self, lease_s: float, max_records: int = MAX_RECORDS) -> None:
        if not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
            raise ConfigError(f"the lease is {lease_s} s; it must be from {MIN_LEASE_S} to {MAX_LEASE_S} s")
        self.lease_s = lease_s
        self._max_records = max_records
        self._held: dict[str, _Held] = {}

    def __repr__(self) -> str:
        """How many names are held, ended leases included until `expire` is called."""
        return f"Directory({len(self._held)} of {self._max_records} names, leases of {self.lease_s} s)"

    def register(self, record: WorkerRecord, now: float) -> Lease:
        """Hold a name, or renew it and replace its record where the same instance holds it.

        Raises:
            ConfigError: the record breaks a bound, the name is held by another instance, or there is no room.
        """
        check_record(record)
        held = self._live(record.name, now)
        if held is None:
            self._make_room(record.name, now)
        elif held.record.instance != record.instance:
            holder = held.record
            raise ConfigError(
                f"the name {record.name} is held by instance {holder.instance} at {holder.host}:{holder.port} for "
                f"{held.until - now:.1f} s more, and was asked for by instance {record.instance} at "
                f"{record.host}:{record.port}; give one of them another name, or wait for the lease to end if its "
                "holder is dead"
            )
        self._held[record.name] = _Held(record, now + self.lease_s)
        return Lease(self.lease_s)

    def _make_room(self, name: str, now: float) -> None:
        if len(self._held) >= self._max_records and name not in self._held:
            self.expire(now)
            if len(self._held) >= self._max_records:
                raise ConfigError(
                    f"worker {name} is refused: {self._max_records} workers are registered, which is the limit; "
                    "start another registry for some of them"
                )

    def renew(self, name: str, instance: str, now: float) -> Lease | None:
        """Hold a name for another lease; None where this instance does not hold it and has to register."""
        held = self._live(name, now)
        if held is None or held.record.instance != instance:
            return None
        self._held[name] = _Held(held.record, now + self.lease_s)
        return Lease(self.lease_s)

    def leave(self, name: str, instance: str) -> bool:
        """Give a name up; False where this instance does not have it."""
        held = self._held.get(name)
        if held is None or held.record.instance != instance:
            return False
        del self._held[name]
        return True

    def get(self, name: str, now: float) -> WorkerRecord | None:
        """Who holds a name."""
        held = self._live(name, now)
        return None if held is None else held.record

    def list(self, role: Role | None, now: float) -> tuple[WorkerRecord, ...]:
        """The workers of a role, or of every role, by name."""
        return tuple(
            held.record
            for _, held in sorted(self._held.items())
            if now < held.until and role in (None, held.record.role)
        )

    def expire(self, now: float) -> tuple[str, ...]:
        """Drop the records whose leases have ended: their names, sorted, each told once."""
        names = tuple(sorted(name for name, held in self._held.items() if now >= held.until))
        for name in names:
            del self._held[name]
        return names

    def _live(self, name: str, now: float) -> _Held | None:
        held = self._held.get(name)
        return held if held is not None and now < held.until else None


class KnownWorkers:
    """What one who asks has been told, over restarts of the registry.

    A registry that has just started knows only the workers that have come back to it. Until it is a lease old, workers
    that its predecessor told of stay known.
    """

    def __init__(self) -> None:
        self._registry = ""
        self._told: dict[str, WorkerRecord] = {}
        self._earlier: dict[str, WorkerRecord] = {}

    def learn(self, registry: str, settled: bool, workers: Iterable[WorkerRecord]) -> None:
        """Take a listing.

        Args:
            registry: the registry's own instance.
            settled: whether it is a lease old.
            workers: every worker that it knows.
        """
        if registry != self._registry:
            self._earlier |= self._told
            self._registry = registry
        self._told = {worker.name: worker for worker in workers}
        kept = {} if settled else self._earlier
        self._earlier = {name: worker for name, worker in kept.items() if name not in self._told}

    def find(self, role: Role) -> tuple[WorkerRecord, ...]:
        """The workers of a role, by name."""
        known = {**self._earlier, **self._told}
        return tuple(worker for _, worker in sorted(known.items()) if worker.role == role)
