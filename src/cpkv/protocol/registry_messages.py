"""What workers and the registry say to each other. Plain data, msgpack, one tag each.

worker                                  registry
  RegisterWorker ---------------------->  is the name free, or ours?
        <------------- Lease, or Failed with who holds the name
  RenewLease -------------------------->  every third of a lease
        <------------- Lease, or NotRegistered: register again
  ListWorkers ------------------------->
        <---------------------- Workers
  LeaveRegistry ----------------------->
        <------------------------- Done
"""

from __future__ import annotations

import msgspec

from cpkv.protocol.directory import Lease, Role, WorkerRecord
from cpkv.protocol.messages import Done, Failed


class RegisterWorker(msgspec.Struct, frozen=True, tag=True):
    """Hold the record's name; where this instance holds it already, renew it and take the new record."""

    record: WorkerRecord


class RenewLease(msgspec.Struct, frozen=True, tag=True):
    """Hold a name for another lease."""

    name: str
    instance: str


class LeaveRegistry(msgspec.Struct, frozen=True, tag=True):
    """Give a name up. Of an instance that does not hold it, without effect."""

    name: str
    instance: str


class ListWorkers(msgspec.Struct, frozen=True, tag=True):
    """Who is there; role None for every role."""

    role: Role | None = None


class NotRegistered(msgspec.Struct, frozen=True, tag=True):
    """This instance does not hold the name: its lease ended, or the registry has started anew. Register again."""

    name: str


class Workers(msgspec.Struct, frozen=True, tag=True):
    """The workers that hold their names now, by name.

    Attributes:
        registry: drawn at each start of the registry.
        settled: the registry is a lease old, so that every worker that knew its predecessor has come back.
    """

    registry: str
    settled: bool
    workers: tuple[WorkerRecord, ...]


ToRegistry = RegisterWorker | RenewLease | LeaveRegistry | ListWorkers
FromRegistry = Lease | NotRegistered | Workers | Done | Failed
