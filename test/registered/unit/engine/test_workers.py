"""Workers watched together: replies by worker, the first cause of a failure by name, and an end for everybody."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cpkv.engine import worker_set as worker_set_module
from cpkv.engine.commands import (
    ClosePool,
    Command,
    OpenPool,
    PoolOpened,
    ReadCounters,
    Reply,
    RunBatch,
    StopWorker,
)
from cpkv.engine.worker import ThreadWorker, WorkerHandle
from cpkv.engine.worker_loop import serve_commands
from cpkv.engine.worker_set import WorkerSet
from cpkv.errors import CapacityError, CpkvError, NumericsError, PlanError, TransferError, WorkerDiedError
from cpkv.layout.plan import BatchSpec
from cpkv.protocol.messages import Done, Failed
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.channel import Channel

register_cpu_ci(est_time=3, suite="unit")

PATIENCE_S = 10.0
BATCH = RunBatch(BatchSpec(0, (), "zigzag", "full"))


class Puppet(WorkerHandle):
    """A worker whose other end the test holds: `replies` is what it says, `death` how it ended."""

    def __init__(self, name: str) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(name, Channel(ours, Reply, name))
        self.replies = Channel(theirs, Command, "the scheduler")
        self.death: str | None = None
        self.ended: list[str] = []

    def exit_cause(self) -> str | None:
        return f"{self.name} {self.death}" if self.death else None

    def kill(self) -> None:
        self.ended.append("killed")

    def wait(self, timeout_s: float) -> None:
        self.ended.append("waited for")

    def stop(self) -> None:
        self.ended.append("stopped")
        self.channel.close()

    def die(self, how: str) -> None:
        """End as a process does: first the connection breaks, and how it ended shows too."""
        self.death = how
        self.replies.close()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Puppet]]:
    """Three of them; the wait for a better cause is short."""
    monkeypatch.setattr(worker_set_module, "FIRST_CAUSE_GRACE_S", 0.3)
    monkeypatch.setattr(worker_set_module, "WATCH_INTERVAL_S", 0.02)
    puppets = [Puppet(f"prefill rank {rank}") for rank in range(2)] + [Puppet("decode worker")]
    yield puppets
    for puppet in puppets:
        puppet.channel.close()
        puppet.replies.close()


@pytest.fixture
def watched(workers: list[Puppet]) -> WorkerSet:
    """A set that watches all of them."""
    together = WorkerSet()
    for worker in workers:
        together.add(worker)
    return together


def ask_ranks(watched: WorkerSet, workers: list[Puppet], command: Any = BATCH) -> dict[WorkerHandle, Any]:
    """Send the two ranks the same command; a reply that never comes fails the test instead of hanging it."""
    return watched.call(dict.fromkeys(workers[:2], command), timeout_s=PATIENCE_S)


def test_replies_by_worker(watched: WorkerSet, workers: list[Puppet]) -> None:
    for number, worker in enumerate(workers[:2]):
        worker.replies.send(PoolOpened(100 + number))
    replies = ask_ranks(watched, workers, OpenPool(True, 4, unified=False, scratch_bytes=None))
    assert [replies[worker] for worker in workers[:2]] == [PoolOpened(100), PoolOpened(101)]
    assert workers[0].replies.receive(PATIENCE_S) == OpenPool(True, 4, unified=False, scratch_bytes=None)


def test_a_failure_comes_back_as_its_own_type_and_says_who(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[0].replies.send(Done())
    workers[1].replies.send(Failed("CapacityError", "no page is free", "prefill rank 1"))
    with pytest.raises(CapacityError, match="^prefill rank 1: no page is free$"):
        ask_ranks(watched, workers, ClosePool())


@pytest.mark.parametrize("kind", ["RuntimeError", "__name__", "CpkvError\0", "annotations"])
def test_a_kind_that_is_none_of_ours_is_still_an_error(watched: WorkerSet, workers: list[Puppet], kind: str) -> None:
    workers[0].replies.send(Failed(kind, "whatever", "prefill rank 0"))
    workers[1].replies.send(Done())
    with pytest.raises(CpkvError, match="prefill rank 0: whatever"):
        ask_ranks(watched, workers, ClosePool())


def test_whoever_only_waited_is_not_the_cause(watched: WorkerSet, workers: list[Puppet]) -> None:
    first_was_taken = threading.Event()
    receive = workers[0].channel.receive

    def received(timeout_s: float | None = None) -> Any:
        reply = receive(timeout_s)
        first_was_taken.set()
        return reply

    workers[0].channel.receive = received  # type: ignore[method-assign]
    workers[0].replies.send(Failed("WorkerDiedError", "collective 'latent' cannot finish", "prefill rank 0"))

    def fail_second() -> None:
        first_was_taken.wait(PATIENCE_S)
        workers[1].replies.send(Failed("NumericsError", "a score is NaN", "prefill rank 1"))

    second = threading.Thread(target=fail_second)
    second.start()
    with pytest.raises(NumericsError, match="^prefill rank 1: a score is NaN$"):
        ask_ranks(watched, workers)
    second.join()


def test_a_death_is_the_cause_of_what_the_others_say(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[0].replies.send(Failed("WorkerDiedError", "connection closed by peer", "prefill rank 0"))
    workers[1].die("was killed by signal 9 (SIGKILL)")
    with pytest.raises(
        WorkerDiedError, match=r"^prefill rank 1 was killed by signal 9 \(SIGKILL\) \(during RunBatch\)$"
    ):
        ask_ranks(watched, workers)
    with pytest.raises(WorkerDiedError, match=r"any more: prefill rank 1 was killed by signal 9 \(SIGKILL\)"):
        ask_ranks(watched, workers, ClosePool())


def test_a_connection_that_broke_by_a_death_is_not_the_cause_of_what_comes_later(
    watched: WorkerSet, workers: list[Puppet]
) -> None:
    workers[1].die("was killed by signal 9 (SIGKILL)")
    killed = r"prefill rank 1 was killed by signal 9 \(SIGKILL\) \(during ClosePool\)"
    with pytest.raises(WorkerDiedError, match=f"^{killed}$"):
        ask_ranks(watched, workers, ClosePool())
    with pytest.raises(WorkerDiedError, match=f"^the group cannot be used any more: {killed}; start another$"):
        ask_ranks(watched, workers)


def test_a_cause_that_was_told_before_the_death_stands(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[0].replies.send(Failed("PlanError", "plans differ", "prefill rank 0"))
    with pytest.raises(PlanError, match="prefill rank 0: plans differ"):
        ask_ranks(watched, workers)


def test_a_worker_that_was_not_asked_dies(watched: WorkerSet, workers: list[Puppet]) -> None:
    """Before the command or while the others answer it; late answers are not taken for those to the next one."""
    receive = workers[0].channel.receive

    def received(timeout_s: float | None = None) -> Any:
        workers[2].die("exited with status 3")
        return receive(timeout_s)

    workers[0].channel.receive = received  # type: ignore[method-assign]
    workers[0].replies.send(Done())
    with pytest.raises(WorkerDiedError, match=r"^decode worker exited with status 3 \(during ReadCounters\)$"):
        ask_ranks(watched, workers, ReadCounters())
    workers[1].replies.send(Done())
    workers[0].replies.send(Done())
    with pytest.raises(WorkerDiedError, match=r"any more: decode worker exited with status 3 \(during ReadCounters\)"):
        ask_ranks(watched, workers, ClosePool())


def test_nobody_is_asked_once_a_worker_is_dead(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[2].die("exited with status 3")
    with pytest.raises(WorkerDiedError, match=r"^decode worker exited with status 3 \(during ClosePool\)$"):
        ask_ranks(watched, workers, ClosePool())
    assert not workers[0].replies.readable()


def test_a_worker_that_was_dead_before_it_was_asked(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[0].die("exited with status 1; it printed last: out of memory")
    with pytest.raises(WorkerDiedError, match="prefill rank 0 exited with status 1; it printed last: out of memory"):
        ask_ranks(watched, workers)


def test_no_answer_in_time_names_who_is_late(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[1].replies.send(Done())
    with pytest.raises(WorkerDiedError, match="^prefill rank 0 did not answer ClosePool within 0 s$"):
        watched.call(dict.fromkeys(workers[:2], ClosePool()), timeout_s=0.1)


def test_a_connection_that_ends_while_the_worker_runs(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[1].replies.close()
    with pytest.raises(WorkerDiedError, match=r"prefill rank 1: .* \(during RunBatch; the worker still runs\)"):
        ask_ranks(watched, workers)


@pytest.mark.parametrize("frame", [b"\0\0\0\x01\xc1", b"\xff\xff\xff\xff"])
def test_a_reply_that_is_none_names_the_worker(watched: WorkerSet, workers: list[Puppet], frame: bytes) -> None:
    workers[1].replies._connection.sendall(frame)
    with pytest.raises(CpkvError, match="prefill rank 1"):
        ask_ranks(watched, workers)


def test_a_reply_to_an_interrupted_command_is_not_taken(
    watched: WorkerSet, workers: list[Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(timeout_s: float | None = None) -> Any:
        raise KeyboardInterrupt

    workers[0].replies.send(PoolOpened(5))
    with monkeypatch.context() as patch:
        patch.setattr(workers[0].channel, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask_ranks(watched, workers, OpenPool(True, 4, unified=False, scratch_bytes=None))
    for worker in workers[:2]:
        worker.replies.send(Done())
    try:
        replies = ask_ranks(watched, workers, ClosePool())
    except CpkvError:
        return
    assert list(replies.values()) == [Done(), Done()]


def test_healthy_workers_are_stopped(watched: WorkerSet, workers: list[Puppet]) -> None:
    watched.close()
    watched.close()
    assert [worker.ended for worker in workers] == [["stopped"]] * 3


def test_after_a_death_the_others_are_killed_and_not_asked(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[0].die("was killed")
    watched.close()
    assert [worker.ended for worker in workers] == [["killed"]] * 3


def test_a_worker_that_hangs_in_a_collective_is_killed(watched: WorkerSet, workers: list[Puppet]) -> None:
    workers[0].replies.send(Failed("NumericsError", "a score is NaN", "prefill rank 0"))
    with pytest.raises(NumericsError):
        ask_ranks(watched, workers)
    watched.close()
    assert workers[1].ended == ["killed"]


# The loop of a worker.


class Counting:
    """A worker that counts batches, and fails when a pool is to be opened."""

    def __init__(self, command: Any) -> None:
        if isinstance(command, ClosePool):
            raise RuntimeError("no such model")
        self.closed = 0

    def ready(self) -> Any:
        return Done()

    def handle(self, command: Any) -> Any:
        if isinstance(command, OpenPool):
            raise KeyError("latent")
        if isinstance(command, RunBatch):
            raise NumericsError("a score is NaN")
        return PoolOpened(7)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def served() -> Iterator[tuple[Channel, list[Counting], list[str], threading.Thread]]:
    """The scheduler's end of a loop in a thread, the workers that it made, and the causes that it passed on."""
    ours, theirs = socket.socketpair()
    made: list[Counting] = []
    causes: list[str] = []

    def note(command: Any, cause: str) -> None:
        causes.append(f"{type(command).__name__}: {cause}")

    def make(command: Any) -> Counting:
        made.append(Counting(command))
        return made[-1]

    loop = threading.Thread(
        target=serve_commands, args=(Channel(theirs, Command, "the scheduler"), "rank 5", make, note)
    )
    loop.start()
    channel = Channel(ours, Reply, "rank 5")
    yield channel, made, causes, loop
    channel.close()
    loop.join(PATIENCE_S)
    assert not loop.is_alive()


def ask(channel: Channel, command: Any) -> Any:
    channel.send(command)
    return channel.receive(PATIENCE_S)


Served = tuple[Channel, list[Counting], list[str], threading.Thread]


def test_a_failed_command_is_answered_and_the_worker_goes_on(served: Served) -> None:
    channel, made, causes, _ = served
    assert ask(channel, ReadCounters()) == Done()
    assert ask(channel, BATCH) == Failed("NumericsError", "a score is NaN", "rank 5")
    assert causes == ["RunBatch: a score is NaN"], "the others of the group must be let go"
    unexpected = ask(channel, OpenPool(True, 2, unified=False, scratch_bytes=None))
    assert (unexpected.kind, unexpected.where) == ("CpkvError", "rank 5")
    assert re.fullmatch(r"KeyError: 'latent' \(in .* at test_workers.py:\d+\)", unexpected.message)
    assert ask(channel, ReadCounters()) == PoolOpened(7)
    assert ask(channel, StopWorker()) == Done()
    assert len(made) == 1


def test_a_worker_that_cannot_start_says_why_and_may_be_told_again(served: Served) -> None:
    channel, made, _, _ = served
    assert ask(channel, ClosePool()).message.startswith("RuntimeError: no such model (in make at test_workers.py:")
    assert made == []
    assert ask(channel, ReadCounters()) == Done()


@pytest.mark.parametrize("politely", [True, False])
def test_the_worker_is_closed_however_the_loop_ends(served: Served, politely: bool) -> None:
    channel, made, _, loop = served
    ask(channel, ReadCounters())
    if politely:
        ask(channel, StopWorker())
    channel.close()
    loop.join(PATIENCE_S)
    assert made[0].closed == 1


def test_a_worker_thread_ends_when_it_is_killed() -> None:
    def serve(channel: Channel) -> None:
        with pytest.raises(TransferError):
            channel.receive()

    worker = ThreadWorker("prefill rank 9", serve, Command)
    assert worker.exit_cause() is None
    worker.kill()
    assert worker.exit_cause() == "prefill rank 9 ended"
    worker.stop()
