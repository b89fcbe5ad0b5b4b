"""One run of the harness: requests are served while what the plan holds goes wrong, and at the end all must be back.

A rank dies: every admitted request fails with that cause, and a group with a new instance takes its place. The decode
worker dies: another one takes its port, and the group goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

from cpkv.config.settings import EngineSettings
from cpkv.engine.worker import ProcessWorker
from cpkv.errors import CpkvError, WorkerDiedError
from cpkv.protocol.messages import DecodeStep, OpenTransfer
from cpkv.testing.faults.clock import FaultClock
from cpkv.testing.faults.disturbances import Disturbances
from cpkv.testing.faults.plan import FaultPlan, Moment, PlannedFault, PlannedRequest
from cpkv.testing.faults.processes import DECODE, DecodeHost, PrefillGroup, WorkerStock, rank_name
from cpkv.testing.faults.report import FaultReport
from cpkv.testing.faults.scheduler import SeededScheduler
from cpkv.testing.faults.tries import Outcomes
from cpkv.testing.leaks import child_processes

LOG = logging.getLogger(__name__)
IDLE_WAIT_S = 0.01
# The next burst arrives when so few requests are left.
LOW_WATER = 3
RESTART_S = 20.0
# The decode worker looks for what is over once a second.
TICK_S = 1.5
FINAL_GRACE_S = 10.0
# Of a worker that has nothing to do: some threads per peer and engine, and no more after a thousand requests.
MAX_THREADS = 24
MAX_DESCRIPTORS = 120


class FaultRun:
    """A run.

    Args:
        settings: of the workers; the transfer must be one between processes.
        plan: what is asked and what goes wrong.
        workspace: an empty folder for logs.
        decode_pages: of the decode worker, over all owners.
        decode_owners: places that its pages are spread over.
        replay: the command that runs it again.
    """

    def __init__(
        self,
        settings: EngineSettings,
        plan: FaultPlan,
        workspace: Path,
        *,
        decode_pages: int,
        decode_owners: int = 1,
        replay: str = "",
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._workspace = workspace
        self._decode_pages = decode_pages
        self._decode_owners = decode_owners
        longest_stop = max((fault.stop_s for fault in plan.faults), default=0.0)
        name = f"{settings.transfer}, {settings.cp_size} ranks, {len(plan.requests)} requests, seed {plan.seed}"
        # A request may wait for pages that a dead group holds, then for silence, then once more after a restart.
        bound_s = 2 * settings.transfer_timeout_s + settings.lease_s + longest_stop + RESTART_S
        self.report = FaultReport(name, replay, bound_s=bound_s)
        self._names = [DECODE, *(rank_name(rank) for rank in range(settings.cp_size))]
        self._cut_off: list[ProcessWorker] = []
        self._lives = 0
        self._decode_is_new = False

    def run(self) -> FaultReport:
        """Run it to its end. What must not happen is in `violations`; nothing is left running."""
        started, began = time.time(), time.monotonic()
        before = _held()
        handler = logging.FileHandler(self._workspace / "scheduler.log")
        handler.setFormatter(logging.Formatter("%(created).3f %(message)s"))
        logger, level = logging.getLogger("cpkv"), logging.getLogger("cpkv").level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            self._serve()
        except CpkvError as error:
            LOG.exception("the run ended early")
            self.report.violations.append(f"the run ended early: {type(error).__name__}: {error}")
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            handler.close()
        self.report.seconds = time.monotonic() - began
        self.report.violations += [f"left behind: {what}" for what in sorted(_held() - before)]
        self.report.logs = [self._workspace / "scheduler.log", *self._stock.logs]
        self.report.read_logs(started)
        return self.report

    def _serve(self) -> None:
        secret = secrets.token_hex(16)
        self._stock = WorkerStock(self._workspace)
        self._clock = FaultClock(self.report.bound_s, self._stalled)
        self._disturbances = Disturbances(
            self._plan.faults, self._clock, self._find, patience_s=self._settings.transfer_timeout_s / 2
        )
        self._outcomes = Outcomes(self.report, self._disturbances, self._again, self._clock.keep_going)
        self._scheduler = SeededScheduler(
            self._settings, self._plan, self._outcomes, note=self._note, keep_going=self._clock.keep_going
        )
        self._secret = secret
        self._group: PrefillGroup | None = None
        self._decode: DecodeHost | None = None
        try:
            self._stock.prepare(self._names)
            self._decode = DecodeHost(
                self._stock, self._settings, secret, self._decode_pages, self._decode_owners, self._plan.seed
            )
            self._decode.start()
            self._group = self._new_group()
            self._prepare_next()
            bursts = iter(self._plan.bursts)
            while self._outcomes.ended < len(self._plan.requests):
                if self._scheduler.unfinished <= LOW_WATER:
                    self._scheduler.arrive(next(bursts, 0))
                self._turn()
            self._settle()
        finally:
            self._clock.close()
            self._close()
        for disturbance in self._disturbances.done:
            self.report.signals[f"{disturbance.fault.kind} ({disturbance.fault.side})"] += 1

    def _turn(self) -> None:
        group = self._live_group()
        try:
            self._watch_decode()
            self._note("any")
            self._scheduler.turn(group)
        except WorkerDiedError as error:
            self._group_lost(error)

    def _live_group(self) -> PrefillGroup:
        assert self._group is not None
        return self._group

    def _again(self, planned: PlannedRequest, number: int) -> None:
        """Under the same id, once the decode worker cannot hold it for an earlier life of the prefill any more."""
        self._clock.after(self._settings.lease_s + TICK_S, lambda: self._scheduler.queue(planned, number))

    # Workers.

    def _prepare_next(self) -> None:
        """While faults are to come, processes wait to take the place of others."""
        if self._disturbances.to_come:
            self._stock.prepare(self._names)

    def _new_group(self) -> PrefillGroup:
        """A group that has started; one that is killed meanwhile is started again."""
        assert self._decode is not None
        while True:
            self._lives += 1
            self._group = PrefillGroup(
                self._stock,
                self._settings,
                self._secret,
                self._decode.port,
                f"life{self._lives}-{self._secret[:6]}",
                self._plan.seed + self._lives,
                on_end=self._scheduler.on_end,
                watch=self._watch,
            )
            try:
                self._group.start()
            except WorkerDiedError:
                if not self._disturbances.open:
                    raise
                self._group.close()
                continue
            return self._group

    def _group_lost(self, error: WorkerDiedError) -> None:
        """Ranks live and die together, and the scheduler's books with them."""
        LOG.info("%s is over: %s", self._live_group().instance, error)
        self._scheduler.fail_all(error)
        if self._disturbances.abandoned is None:
            self._live_group().close()
        else:
            self._cut_off.append(self._live_group().abandon(self._disturbances.abandoned))
            self._disturbances.abandoned = None
        self._group = self._new_group()
        self._disturbances.recovered("prefill")
        self._prepare_next()

    def _watch_decode(self) -> None:
        assert self._decode is not None
        if self._decode.worker.exit_cause() is not None:
            LOG.info("%s", self._decode.worker.exit_cause())
            try:
                self._decode.start()
            except WorkerDiedError:
                # Killed while it started; the next turn sees that.
                return
            self._decode_is_new = True
            self._prepare_next()

    def _watch(self, question: Any, answered: bool) -> None:
        """Before a question to the decode worker, and after its answer."""
        moments: dict[type, Moment] = {DecodeStep: "decode", OpenTransfer: "announce"}
        if answered:
            if self._decode_is_new:
                self._decode_is_new = False
                self._disturbances.recovered("decode")
        else:
            self._note(moments.get(type(question), "finish"))

    def _find(self, fault: PlannedFault) -> ProcessWorker:
        assert self._decode is not None
        return self._decode.worker if fault.side == "decode" else self._live_group().processes[fault.rank]

    def _note(self, moment: Moment) -> None:
        self._disturbances.note(moment, self._outcomes.ended)

    # The end.

    def _settle(self) -> None:
        """Every page is free again on both sides, within what lease and silence may take."""
        assert self._decode is not None
        settings = self._settings
        deadline = time.monotonic() + self.report.bound_s
        while time.monotonic() < deadline:
            group = self._live_group()
            self._turn()
            if not (group.handover.closing_requests or self._scheduler.owes_releases or self._disturbances.open):
                break
        group = self._live_group()
        if group.handover.closing_requests:
            self._outcomes.violation(f"still cleaned up after at the end: {group.handover.closing_requests}")
        group.allocator.check()
        if group.allocator.free_pages != group.allocator.capacity_pages:
            self._outcomes.violation(
                f"prefill pages are not free at the end: {group.allocator}, closing: {group.handover.closing_requests}"
            )
        deadline = time.monotonic() + settings.lease_s + settings.transfer_timeout_s + FINAL_GRACE_S
        while True:
            self._clock.keep_going()
            state = self._decode.state(settings.transfer_timeout_s)
            if state.free == state.capacity:
                break
            if time.monotonic() > deadline:
                self._outcomes.violation(f"decode pages are not free at the end: {state}")
                break
            time.sleep(IDLE_WAIT_S)
        for name, worker in [(DECODE, state), *group.states()]:
            LOG.info("%s: %s", name, worker)
            if worker.threads > MAX_THREADS or worker.descriptors > MAX_DESCRIPTORS:
                self._outcomes.violation(f"{name} holds too much at the end: {worker}")

    def _close(self) -> None:
        ends = [part.close() for part in (self._group, self._decode) if part is not None]
        for worker in self._cut_off:
            worker.kill()
            worker.channel.close()
        self._stock.close()
        self.report.violations += [end for end in ends if end]

    def _stalled(self) -> None:
        """Nothing has moved for longer than anything may take: show where everybody stands, and end them."""
        assert self._group is not None
        self.report.violations.append(f"nothing ended or began for {self.report.bound_s:.0f} s")
        with (self._workspace / "stacks.log").open("w") as stacks:
            faulthandler.dump_traceback(stacks)
        workers = [*self._group.processes, *([self._decode.worker] if self._decode is not None else [])]
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
            worker.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        for worker in workers:
            worker.send_signal(signal.SIGKILL)


def _held() -> frozenset[str]:
    """Children and open files of this process, as far as they must be gone at the end."""
    files = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            files.add(f"descriptor {link.name} of {os.readlink(link)}")
    own = {name for name in files if "/proc/" not in name}
    return frozenset({f"process {pid} {command}" for pid, command in child_processes().items()} | own)
