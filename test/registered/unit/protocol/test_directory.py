"""Names held for a lease, against a dict; what a client keeps over restarts of the registry; the messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cpkv.errors import ConfigError
from cpkv.protocol.directory import (
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    Directory,
    KnownWorkers,
    Lease,
    Role,
    WorkerRecord,
    check_record,
)
from cpkv.protocol.messages import Done, Failed, PoolDescription
from cpkv.protocol.registry_messages import (
    FromRegistry,
    LeaveRegistry,
    ListWorkers,
    NotRegistered,
    RegisterWorker,
    RenewLease,
    ToRegistry,
    Workers,
)
from cpkv.testing.registration import register_cpu_ci
from cpkv.testing.sample_pool import SAMPLE_POOL

register_cpu_ci(est_time=3, suite="unit")

LEASE_S = 10.0
ROOM = 3
NAMES = st.sampled_from("abcde")
INSTANCES = st.sampled_from(["first", "second", "third"])


def record(name: str = "a", instance: str = "first", **fields: Any) -> WorkerRecord:
    values: dict[str, Any] = {"role": "decode", "host": "127.0.0.1", "port": 7000, "pool": None, **fields}
    return WorkerRecord(name=name, instance=instance, **values)


def pool(model: str = "glm5") -> PoolDescription:
    return msgspec.structs.replace(SAMPLE_POOL, model=model)


class DirectoryMachine(RuleBasedStateMachine):
    """The model: name -> (record, end of its lease). Times are whole numbers, so that a lease also ends exactly now."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(LEASE_S, ROOM)
        self.now = 100.0
        self.model: dict[str, tuple[WorkerRecord, float]] = {}

    @property
    def live(self) -> dict[str, WorkerRecord]:
        return {name: worker for name, (worker, until) in self.model.items() if until > self.now}

    @rule(seconds=st.sampled_from([1, 4, 5, 9, 10, 11]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(name=NAMES, instance=INSTANCES, role=st.sampled_from(["prefill", "decode"]), draining=st.booleans())
    def register(self, name: str, instance: str, role: Role, draining: bool) -> None:
        """Kind 33."""
        new = record(name, instance, role=role, draining=draining)
        holder = self.live.get(name)
        if holder is not None and holder.instance != instance:
            left = self.model[name][1] - self.now
            with pytest.raises(
                ConfigError, match=f"the name {name} is held by instance {holder.instance} at .* for {left} s more"
            ):
                self.directory.register(new, self.now)
        elif holder is None and len(self.live) == ROOM:
            with pytest.raises(ConfigError, match=f"worker {name} is refused: {ROOM} workers are registered"):
                self.directory.register(new, self.now)
        else:
            assert self.directory.register(new, self.now) == Lease(LEASE_S)
            if len(self.model) >= ROOM and name not in self.model:
                # What had ended made room, and is not told any more.
                self.model = {kept: self.model[kept] for kept in self.live}
            self.model[name] = (new, self.now + LEASE_S)

    @rule(name=NAMES, instance=INSTANCES)
    def renew(self, name: str, instance: str) -> None:
        """Kind 35: a late renewal of an older instance does nothing."""
        holder = self.live.get(name)
        if holder is None or holder.instance != instance:
            assert self.directory.renew(name, instance, self.now) is None
        else:
            assert self.directory.renew(name, instance, self.now) == Lease(LEASE_S)
            self.model[name] = (holder, self.now + LEASE_S)

    @rule(name=NAMES, instance=INSTANCES)
    def leave(self, name: str, instance: str) -> None:
        """Kind 35: nor does a late farewell."""
        has = name in self.model and self.model[name][0].instance == instance
        assert self.directory.leave(name, instance) == has
        if has:
            del self.model[name]

    @rule()
    def expire(self) -> None:
        ended = sorted(set(self.model) - set(self.live))
        assert self.directory.expire(self.now) == tuple(ended)
        for name in ended:
            del self.model[name]

    @invariant()
    def listings_agree(self) -> None:
        live = self.live
        assert self.directory.list(None, self.now) == tuple(live[name] for name in sorted(live))
        for role in ("prefill", "decode"):
            of_role = tuple(live[name] for name in sorted(live) if live[name].role == role)
            assert self.directory.list(role, self.now) == of_role
        for name in "abcde":
            assert self.directory.get(name, self.now) == live.get(name)
        assert len(live) <= ROOM and len(self.directory.list(None, -1.0)) <= ROOM


class TestDirectoryAgainstADict(DirectoryMachine.TestCase):  # type: ignore[valid-type, misc]
    settings = settings(max_examples=100, stateful_step_count=40)


def test_a_refusal_says_who_asks_who_holds_and_for_how_long() -> None:
    directory = Directory(15)
    directory.register(record("decode-0", "old", host="10.0.0.1", port=7001), 0)
    with pytest.raises(ConfigError) as refused:
        directory.register(record("decode-0", "new", host="10.0.0.2", port=7002), 2.75)
    assert str(refused.value) == (
        "the name decode-0 is held by instance old at 10.0.0.1:7001 for 12.2 s more, and was asked for by instance new "
        "at 10.0.0.2:7002; give one of them another name, or wait for the lease to end if its holder is dead"
    )


def test_the_successor_is_not_touched_by_what_comes_late() -> None:
    """Kind 35: a worker that was stopped for longer than its lease finds its name taken."""
    directory = Directory(10)
    directory.register(record("a", "old"), 0)
    directory.register(record("a", "new"), 10)
    assert directory.renew("a", "old", 11) is None
    assert not directory.leave("a", "old")
    with pytest.raises(ConfigError, match="held by instance new"):
        directory.register(record("a", "old"), 12)
    assert [worker.instance for worker in directory.list("decode", 19.9)] == ["new"]
    assert directory.list("decode", 20) == ()


def test_the_registry_holds_1024_workers_and_not_one_more() -> None:
    directory = Directory(10)
    names = [f"worker-{number}" for number in range(MAX_RECORDS)]
    for name in names:
        directory.register(record(name), 0)
    with pytest.raises(ConfigError, match="worker late is refused: 1024 workers are registered, which is the limit"):
        directory.register(record("late"), 9)
    directory.register(record("worker-7"), 9)
    directory.register(record("late"), 10)
    assert repr(directory) == "Directory(2 of 1024 names, leases of 10 s)"
    assert [worker.name for worker in directory.list("decode", 10)] == ["late", "worker-7"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": ""}, "the name of a worker is ''; give 1 to 64 characters"),
        ({"name": "a" * 65}, "the name of a worker is 'a{64}[.]{3}'; give 1 to 64 characters"),
        ({"name": "a b"}, "the name of a worker is 'a b'"),
        ({"name": "a\n"}, r"the name of a worker is 'a\\n'"),
        ({"name": "\N{LATIN SMALL LETTER E WITH ACUTE}"}, "the name of a worker is"),
        ({"name": "\N{ARABIC-INDIC DIGIT THREE}"}, "the name of a worker is"),
        ({"instance": ""}, "the instance of a worker is ''"),
        ({"instance": "i" * 65}, "the instance of a worker is"),
        ({"host": ""}, "worker a has host ''; give a host name or an address"),
        ({"host": "h" * 256}, "worker a has host"),
        ({"host": "a\x1b[2J"}, "worker a has host"),
        ({"port": 0}, "worker a has port 0; give the one that it listens on, 1 to 65535"),
        ({"port": 65536}, "worker a has port 65536"),
        ({"pool": pool("m" * MAX_RECORD_BYTES)}, "worker a describes itself in 16[0-9]{3} bytes; 16384 is the limit"),
    ],
)
def test_a_record_that_breaks_a_bound_is_refused_by_the_field(fields: dict[str, Any], says: str) -> None:
    directory = Directory(10)
    with pytest.raises(ConfigError, match=f"^{says}"):
        directory.register(record(**fields), 0)
    assert directory.list(None, 0) == ()


def test_the_longest_names_and_all_characters_are_taken() -> None:
    for name in ("a" * 64, "Rank_0.of-4", "9", "-"):
        check_record(record(name, name, host="fe80::1%eth0", port=65535, pool=pool()))


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 0.09, 3601.0, float("nan"), float("inf")])
def test_a_lease_that_is_no_lease_is_refused(lease_s: float) -> None:
    with pytest.raises(ConfigError, match="it must be from 0.1 to 3600.0 s"):
        Directory(lease_s)


# What a client knows.


def told(known: KnownWorkers, registry: str, settled: bool, *names: str) -> str:
    known.learn(registry, settled, [record(name) for name in names])
    return "".join(worker.name for worker in known.find("decode"))


def test_a_restarted_registry_forgets_nobody_until_it_is_a_lease_old() -> None:
    known = KnownWorkers()
    assert told(known, "one", False, "b", "a") == "ab"
    assert told(known, "two", False) == "ab"
    assert told(known, "two", False, "c") == "abc"
    assert told(known, "three", False, "d") == "abcd"
    assert told(known, "three", True, "a", "d") == "ad"


def test_a_worker_that_leaves_is_forgotten_also_while_the_registry_is_young() -> None:
    known = KnownWorkers()
    told(known, "one", False, "a", "b")
    assert told(known, "one", False, "b") == "b"
    told(known, "two", False)
    assert told(known, "two", False, "b") == "b", "it came back"
    assert told(known, "two", False) == "", "and left"


def test_who_came_back_is_known_as_it_is_now() -> None:
    known = KnownWorkers()
    known.learn("one", True, [record("a", "first", port=1), record("p", role="prefill")])
    known.learn("two", False, [record("a", "second", port=2)])
    assert known.find("decode") == (record("a", "second", port=2),)
    assert known.find("prefill") == (record("p", role="prefill"),)


# Messages.


@pytest.mark.parametrize(
    ("message", "union"),
    [
        (RegisterWorker(record(pool=pool())), ToRegistry),
        (RenewLease("a", "first"), ToRegistry),
        (LeaveRegistry("a", "first"), ToRegistry),
        (ListWorkers("prefill"), ToRegistry),
        (ListWorkers(), ToRegistry),
        (Lease(15.0), FromRegistry),
        (NotRegistered("a"), FromRegistry),
        (Workers("r", True, (record(), record("b", pool=pool(), draining=True))), FromRegistry),
        (Done(), FromRegistry),
        (Failed("ConfigError", "why", "registry"), FromRegistry),
    ],
)
def test_messages_come_back_as_they_went(message: Any, union: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "ListWorkers", "role": "router"},
        {"type": "RegisterWorker", "record": {"name": "a"}},
        {"type": "RegisterWorker", "record": msgspec.to_builtins(record()) | {"port": "7000"}},
        {"type": "RenewLease", "name": "a"},
        {"type": "OpenTransfer"},
    ],
)
def test_other_messages_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ToRegistry)


@pytest.mark.parametrize("seconds", [0.0, 0.01, float("nan"), float("inf"), -5.0])
def test_no_lease_makes_a_client_renew_without_a_pause(seconds: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Lease(seconds)), type=FromRegistry)
