"""Which files run side by side: CPU files in `jobs` slots, GPU files on the devices that are free, some files alone."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from runner.hardware import VISIBLE, Machine
from runner.process import Order, run_file
from runner.results import FileResult, left_out, read_result
from runner.selection import Entry
from runner.suites import SUITES

# What a hypothesis run or a slow, shared machine may add to the stated time before we call it hanging.
LEAST_TIMEOUT_SECONDS = 180.0
LONG_SECONDS = 20.0
TIMEOUT_FACTOR = 6.0


@dataclass(frozen=True)
class Settings:
    """How a run goes: where, on what, how many at a time, limits in seconds (None: from est_time), what ends it."""

    root: Path
    machine: Machine
    jobs: int
    seed: int | None = None
    timeout_per_file: float | None = None
    continue_on_error: bool = False

    def threads(self, entry: Entry) -> int:
        """Threads per process, so that the processes running side by side have one core per thread."""
        suite = SUITES[entry.registration.suite]
        if suite.workers:
            return 1
        return max(1, self.machine.cores // (1 if suite.exclusive else self.jobs))

    def core_groups(self) -> list[tuple[int, ...]]:
        """The cores in equal groups for files of one process side by side; empty groups where there are too few.

        Threads of one file that take turns at the interpreter's lock run twice as fast on one core as on two.
        """
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // self.jobs
        return [tuple(cores[slot * each : (slot + 1) * each]) for slot in range(self.jobs)]

    def timeout(self, entry: Entry) -> float:
        """Seconds after which a file is killed."""
        return self.timeout_per_file or max(LEAST_TIMEOUT_SECONDS, TIMEOUT_FACTOR * entry.registration.est_time)


class Slots:
    """What is free: CPU slots and devices of each kind; a file that runs alone takes everything."""

    def __init__(self, settings: Settings) -> None:
        self.free_jobs = settings.jobs
        self.free_devices = {kind: list(ids) for kind, ids in settings.machine.devices.items()}
        self.running = 0
        self.alone = False

    def take(self, entry: Entry) -> tuple[str, ...] | None:
        """The device ids for `entry` (none for a CPU file), or None where it has to wait."""
        registration = entry.registration
        if self.alone or (entry.alone and self.running):
            return None
        devices = self.free_devices.get(registration.hw, [])
        if len(devices) < registration.num_gpus or (registration.hw == "cpu" and not self.free_jobs):
            return None
        taken = tuple(devices[: registration.num_gpus])
        del devices[: registration.num_gpus]
        self.free_jobs -= registration.hw == "cpu"
        self.running += 1
        self.alone = entry.alone
        return taken

    def give_back(self, entry: Entry, devices: Sequence[str]) -> None:
        """Frees what `take` gave for `entry`."""
        if devices:
            self.free_devices[entry.registration.hw] += devices
        self.free_jobs += entry.registration.hw == "cpu"
        self.running -= 1
        self.alone = False


def run_all(
    entries: Sequence[Entry], settings: Settings, report: Callable[[FileResult, Path | None], None]
) -> list[FileResult]:
    """Runs `entries` in their order as far as devices allow; `report` gets each result and its log as it ends."""
    results: list[FileResult] = []
    waiting: list[Entry] = []
    for entry in entries:
        if (reason := _why_not(entry, settings.machine)) is not None:
            results.append(left_out(entry, reason))
            report(results[-1], None)
        else:
            waiting.append(entry)
    # Files that need many devices first, then long ones; files that run alone last: least idle time.
    waiting.sort(
        key=lambda entry: (entry.alone, -entry.registration.num_gpus, entry.registration.est_time < LONG_SECONDS)
    )
    stop, workers = Event(), settings.jobs + sum(map(len, settings.machine.devices.values())) + 1
    with tempfile.TemporaryDirectory(prefix="cpkv-test-") as folder, ThreadPoolExecutor(workers) as pool:
        try:
            for result, log in _run_waiting(waiting, settings, pool, Path(folder), stop):
                results.append(result)
                report(result, log)
                if result.failures and not settings.continue_on_error:
                    waiting.clear()
        finally:
            stop.set()
    return results


def _why_not(entry: Entry, machine: Machine) -> str | None:
    registration = entry.registration
    if registration.disabled:
        return f"disabled: {registration.disabled}"
    there = len(machine.devices.get(registration.hw, ()))
    if registration.num_gpus > there:
        return f"needs {registration.num_gpus} devices ({registration.hw}), this machine has {there}"
    return None


def _run_waiting(
    waiting: list[Entry], settings: Settings, pool: ThreadPoolExecutor, folder: Path, stop: Event
) -> Iterator[tuple[FileResult, Path]]:
    slots, numbers, core_groups = Slots(settings), itertools.count(), settings.core_groups()
    running: dict[Future[FileResult], tuple[Entry, tuple[str, ...], Order]] = {}
    while waiting or running:
        for entry in list(waiting):
            devices = slots.take(entry)
            if devices is None:
                continue
            waiting.remove(entry)
            place = folder / str(next(numbers))
            order = _order(entry, settings, devices, place, core_groups.pop() if entry.one_process else ())
            running[pool.submit(_run, entry, order, stop)] = (entry, devices, order)
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            entry, devices, order = running.pop(future)
            slots.give_back(entry, devices)
            if entry.one_process:
                core_groups.append(order.cores)
            yield future.result(), order.log


def _run(entry: Entry, order: Order, stop: Event) -> FileResult:
    return read_result(entry, run_file(order, stop), order.junit)


def _order(entry: Entry, settings: Settings, devices: Sequence[str], place: Path, cores: tuple[int, ...]) -> Order:
    place.mkdir()
    hw, threads = entry.registration.hw, str(settings.threads(entry))
    environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    # A CPU file must not land on a device by chance.
    environment |= {name: ",".join(devices) if kind == hw else "" for kind, name in VISIBLE.items()}
    paths = [str(settings.root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"CPKV_TEST_HW": hw, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
    return Order(
        path=entry.path,
        root=settings.root,
        junit=place / "junit.xml",
        log=place / "log.txt",
        timeout=settings.timeout(entry),
        environment=environment,
        seed=settings.seed,
        cores=cores,
    )
