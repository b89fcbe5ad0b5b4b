"""Which files run: by hardware, suite and partition. The same answer on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.discovery import Registration, TestFile
from runner.suites import SUITES


@dataclass(frozen=True)
class Entry:
    """One run of one file: the file as registered for one kind of hardware."""

    path: str
    registration: Registration

    @property
    def label(self) -> str:
        """The path, with the hardware where that is no CPU."""
        hw = self.registration.hw
        return self.path if hw == "cpu" else f"{self.path} [{hw}]"

    @property
    def alone(self) -> bool:
        """Whether it runs with no other file beside it."""
        return self.registration.alone or SUITES[self.registration.suite].exclusive

    @property
    def one_process(self) -> bool:
        """Whether it is for the CPU, beside other files, and starts no workers there."""
        return self.registration.hw == "cpu" and not self.alone and not SUITES[self.registration.suite].workers


@dataclass(frozen=True)
class Selection:
    """The entries asked for, and those left out because they are registered as nightly or for other hardware."""

    entries: tuple[Entry, ...]
    nightly_only: tuple[Entry, ...]
    other_hardware: tuple[Entry, ...]


def select(files: Iterable[TestFile], hw: Sequence[str], suites: Sequence[str], nightly: bool) -> Selection:
    """Sorts the registrations of `files` into those to run and those left out; no suite named means all of them."""
    asked, nights, others = [], [], []
    for file in files:
        for registration in file.registrations:
            if suites and registration.suite not in suites:
                continue
            entry = Entry(file.path, registration)
            if registration.hw not in hw:
                others.append(entry)
            elif registration.nightly and not nightly:
                nights.append(entry)
            else:
                asked.append(entry)
    return Selection(tuple(asked), tuple(nights), tuple(others))


def partition(entries: Iterable[Entry], size: int) -> list[list[Entry]]:
    """Deals `entries` into `size` parts of about equal time: the longest file first, each to the least loaded part.

    A file stays whole when it is registered for several kinds of hardware. Parts differ by at most the longest file.
    """
    by_path: dict[str, list[Entry]] = {}
    for entry in entries:
        by_path.setdefault(entry.path, []).append(entry)
    cost = {path: sum(_cost(entry) for entry in group) for path, group in by_path.items()}
    parts: list[list[Entry]] = [[] for _ in range(size)]
    load = [0.0] * size
    for path in sorted(by_path, key=lambda path: (-cost[path], path)):
        least = min(range(size), key=lambda number: (load[number], number))
        parts[least] += by_path[path]
        load[least] += cost[path]
    return [sorted(part, key=lambda entry: (entry.path, entry.registration.hw)) for part in parts]


def _cost(entry: Entry) -> float:
    return 0.0 if entry.registration.disabled else entry.registration.est_time
