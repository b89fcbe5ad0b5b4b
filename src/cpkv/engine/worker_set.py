"""All workers of a run, watched together: whoever dies first is named, and everyone ends.

call(command) --> every rank --> replies by rank
                     |  meanwhile: any worker, also one that was not asked, may die
                     v
                  WorkerDiedError("prefill rank 2 was killed by signal 9 (SIGKILL) during RunBatch")
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from cpkv.engine.worker import WorkerHandle
from cpkv.errors import CpkvError, TransferError, WorkerDiedError
from cpkv.protocol.failures import raise_failure
from cpkv.protocol.messages import Failed

WATCH_INTERVAL_S = 0.1
FIRST_CAUSE_GRACE_S = 2.0
STUCK_REPLY_S = 10.0
# These say that somebody else failed; the one with another kind is the cause.
SECONDARY_KINDS = ("WorkerDiedError",)
# In these a rank that fails leaves the others waiting, so not all replies can be expected.
COLLECTIVE_COMMANDS = ("RunBatch",)


class WorkerSet:
    """Workers that live and die together."""

    def __init__(self) -> None:
        self._workers: list[WorkerHandle] = []
        self._broken = ""

    def add(self, worker: WorkerHandle) -> None:
        """Watch one more worker."""
        self._workers.append(worker)

    def check_alive(self, doing: str) -> None:
        """Raise when a worker has ended; the others are of no use then.

        Raises:
            WorkerDiedError: its name, how it ended, and what was being done.
        """
        for worker in self._workers:
            cause = worker.exit_cause()
            if cause is not None:
                error = WorkerDiedError(f"{cause} (during {doing})")
                self._broken = self._broken or str(error)
                raise error

    def check_alive_soon(self, doing: str) -> None:
        """Raise when a worker has ended, waiting a moment for its end to show: a connection breaks before that.

        Raises:
            WorkerDiedError: see `check_alive`.
        """
        deadline = time.monotonic() + FIRST_CAUSE_GRACE_S
        while time.monotonic() < deadline:
            self.check_alive(doing)
            time.sleep(WATCH_INTERVAL_S / 10)

    def call(self, commands: Mapping[WorkerHandle, Any], timeout_s: float | None = None) -> dict[WorkerHandle, Any]:
        """Send each worker its command and wait for all replies.

        Raises:
            CpkvError: the first cause that any of them reports, as its own type.
            WorkerDiedError: a worker died, asked or not, or did not answer in time.
        """
        doing = type(next(iter(commands.values()))).__name__
        self._refuse_broken(doing)
        try:
            return self._call(commands, doing, timeout_s)
        except CpkvError as error:
            if self._broken:
                # Later calls name what came first too, and not the connection that broke by it.
                self._broken = str(error)
            raise
        except BaseException:
            self._broken = self._broken or f"{doing} was interrupted, and replies to it may still come"
            raise

    def _refuse_broken(self, doing: str) -> None:
        if self._broken:
            raise WorkerDiedError(f"the group cannot be used any more: {self._broken}; start another")
        self.check_alive(doing)

    def _call(
        self, commands: Mapping[WorkerHandle, Any], doing: str, timeout_s: float | None
    ) -> dict[WorkerHandle, Any]:
        for worker, command in commands.items():
            try:
                worker.channel.send(command)
            except TransferError as error:
                self._raise_first_cause([], doing, f"{worker.name}: {error}")
        replies: dict[WorkerHandle, Any] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for worker in commands:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            while len(replies) < len(commands):
                for key, _ in selector.select(WATCH_INTERVAL_S):
                    self._take_reply(key.data, replies, selector, doing)
                if len(replies) < len(commands):
                    self.check_alive(doing)
                if deadline is not None and time.monotonic() > deadline:
                    late = ", ".join(worker.name for worker in commands if worker not in replies)
                    self._broken = f"{late} did not answer {doing}"
                    raise WorkerDiedError(f"{late} did not answer {doing} within {timeout_s:.0f} s")
        failures = [reply for reply in replies.values() if isinstance(reply, Failed)]
        if failures:
            raise_failure(_first_cause(failures))
        return replies

    def _take_reply(
        self,
        worker: WorkerHandle,
        replies: dict[WorkerHandle, Any],
        selector: selectors.BaseSelector,
        doing: str,
    ) -> None:
        try:
            reply = worker.channel.receive(STUCK_REPLY_S)
        except CpkvError as error:
            failures = [reply for reply in replies.values() if isinstance(reply, Failed)]
            self._raise_first_cause(failures, doing, f"{worker.name}: {error}")
        replies[worker] = reply
        selector.unregister(worker.channel)
        if isinstance(reply, Failed) and doing in COLLECTIVE_COMMANDS:
            self._collect_failures(reply, replies, selector, doing)

    def _collect_failures(
        self, first: Failed, replies: dict[WorkerHandle, Any], selector: selectors.BaseSelector, doing: str
    ) -> None:
        """A worker failed: give the others a moment, since the first to report need not be the cause."""
        failures = [first]
        deadline = time.monotonic() + FIRST_CAUSE_GRACE_S
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(WATCH_INTERVAL_S):
                try:
                    reply = key.data.channel.receive(STUCK_REPLY_S)
                except CpkvError as error:
                    self._raise_first_cause(failures, doing, f"{key.data.name}: {error}")
                replies[key.data] = reply
                selector.unregister(key.data.channel)
                if isinstance(reply, Failed):
                    failures.append(reply)
            if _first_cause(failures).kind in SECONDARY_KINDS:
                self.check_alive(doing)
        self._raise_first_cause(failures, doing, "")

    def _raise_first_cause(self, failures: Sequence[Failed], doing: str, broken: str) -> NoReturn:
        # Replies that are still to come would be taken for those to the next command.
        self._broken = broken or f"{doing} failed: {_first_cause(failures).message}"
        if failures and _first_cause(failures).kind not in SECONDARY_KINDS:
            raise_failure(_first_cause(failures))
        self.check_alive_soon(doing)
        if failures:
            raise_failure(_first_cause(failures))
        raise WorkerDiedError(f"{broken} (during {doing}; the worker still runs)")

    def close(self) -> None:
        """Stop every worker; none is left behind."""
        broken = bool(self._broken) or any(worker.exit_cause() is not None for worker in self._workers)
        if not broken:
            for worker in self._workers:
                worker.ask_to_stop()
        for worker in reversed(self._workers):
            if broken:
                worker.kill()
                worker.channel.close()
            else:
                worker.stop()
        self._workers.clear()


def _first_cause(failures: Sequence[Failed]) -> Failed:
    primary = [failure for failure in failures if failure.kind not in SECONDARY_KINDS]
    return (primary or list(failures))[0]
