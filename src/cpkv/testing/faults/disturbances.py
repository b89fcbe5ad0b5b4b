"""The faults of a run as they happen: signals at their moments, and which failures they excuse."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from cpkv.engine.worker import ProcessWorker
from cpkv.errors import CpkvError, WorkerDiedError
from cpkv.testing.faults.clock import FaultClock
from cpkv.testing.faults.plan import Moment, PlannedFault

LOG = logging.getLogger(__name__)
HOW_IT_ENDED = {
    "kill": "was killed by signal 9 (SIGKILL)",
    "cut off": "is cut off",
    "stop": "did not answer",
    "hiccup": "did not answer",
}
NAMED = re.compile(r"rank \d|ranks \[\d|decode worker")


@dataclass(eq=False)
class Disturbance:
    """One signal.

    Attributes:
        fault: as it was planned.
        worker: the name of whom it hit.
        began_at: time.monotonic().
        ended_at: when the last failure that it excuses may have begun; None until it is over.
    """

    fault: PlannedFault
    worker: str
    began_at: float
    ended_at: float | None = None

    def excuses(self, began_at: float, ended_at: float, error: CpkvError) -> bool:
        """Whether a request that lived from one time to another may have failed so because of it."""
        if not (began_at <= (self.ended_at or ended_at) and self.began_at <= ended_at):
            return False
        if isinstance(error, WorkerDiedError):
            return f"{self.worker} {HOW_IT_ENDED[self.fault.kind]}" in str(error)
        return True


class Disturbances:
    """Sends the signals of a plan.

    Args:
        faults: in order of `after_ended`.
        clock: sends those that are delayed.
        find: the worker that a fault is meant for, now.
        patience_s: a worker that is stopped for less must not be missed by anybody.
    """

    def __init__(
        self,
        faults: tuple[PlannedFault, ...],
        clock: FaultClock,
        find: Callable[[PlannedFault], ProcessWorker],
        patience_s: float,
    ) -> None:
        self._waiting = list(faults)
        self._clock = clock
        self._find = find
        self._patience_s = patience_s
        self.abandoned: int | None = None
        self.done: list[Disturbance] = []

    @property
    def to_come(self) -> int:
        """How many wait for their moment."""
        return len(self._waiting)

    @property
    def open(self) -> list[Disturbance]:
        """Those that are not over."""
        return [disturbance for disturbance in self.done if disturbance.ended_at is None]

    def note(self, moment: Moment, ended: int) -> None:
        """The scheduler is about to do something, and so many requests have ended.

        Raises:
            WorkerDiedError: a rank was cut off.
        """
        for fault in [fault for fault in self._waiting if fault.after_ended <= ended]:
            if fault.moment in ("any", moment):
                self._waiting.remove(fault)
                worker = self._find(fault)
                if fault.kind == "cut off":
                    self._cut_off(fault, worker)
                elif fault.delay_s > 0:
                    self._clock.after(fault.delay_s, lambda fault=fault, worker=worker: self._hit(fault, worker))  # type: ignore[misc]
                else:
                    self._hit(fault, worker)

    def _hit(self, fault: PlannedFault, worker: ProcessWorker) -> None:
        if worker.exit_cause() is not None:
            # Another one was faster: the next in its place gets this.
            self._waiting.append(fault)
            return
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        disturbance = Disturbance(fault, worker.name, time.monotonic())
        self.done.append(disturbance)
        LOG.info("%s: %s to %s (process %d)", fault.kind, number.name, worker.name, worker.pid)
        worker.send_signal(number)
        if number == signal.SIGSTOP:
            self._clock.after(fault.stop_s, lambda: self._continue(disturbance, worker))

    def _cut_off(self, fault: PlannedFault, worker: ProcessWorker) -> None:
        self._hit(fault, worker)
        self.abandoned = fault.rank
        raise WorkerDiedError(f"{worker.name} {HOW_IT_ENDED[fault.kind]} and given up")

    def _continue(self, disturbance: Disturbance, worker: ProcessWorker) -> None:
        LOG.info("SIGCONT to %s (process %d)", worker.name, worker.pid)
        worker.send_signal(signal.SIGCONT)
        if disturbance.fault.kind in ("stop", "hiccup"):
            is_long = disturbance.fault.stop_s > self._patience_s
            # Who was missed for good reason may be missed until the silence before is over.
            disturbance.ended_at = time.monotonic() + 2 * self._patience_s if is_long else disturbance.began_at - 1

    def recovered(self, side: str) -> None:
        """Killed workers of a side have been replaced, and the others know it."""
        for disturbance in self.open:
            if disturbance.fault.side == side and disturbance.fault.kind in ("kill", "cut off"):
                disturbance.ended_at = time.monotonic()

    def why_wrong(self, began_at: float, ended_at: float, error: CpkvError) -> str:
        """What is wrong with a failure, in words; empty when a fault excuses it and it names a cause."""
        if not any(disturbance.excuses(began_at, ended_at, error) for disturbance in self.done):
            return "no fault excuses it"
        if not NAMED.search(str(error)):
            return "it names neither a rank nor the decode worker"
        return ""
