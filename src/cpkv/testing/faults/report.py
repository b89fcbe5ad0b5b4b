"""What a run of the harness came to, as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cpkv.testing.faults.decode import VIOLATION

TAIL_LINES = 30
LOGS_SHOWN = 8
SERIES_SHOWN = 24
QUARANTINE = re.compile(r"^(\d+\.\d+) pages: \d+ free, (\d+) in quarantine")


@dataclass
class FaultReport:
    """What happened.

    Attributes:
        name: of the run.
        replay: the command that runs it again.
        right: requests whose every byte and digest was right.
        aborted: requests whose client went.
        failed: requests that ended with an error, their last try.
        causes: of every failed try, by kind.
        signals: sent, by kind.
        slowest_s: the longest time from the admission of a try to its end.
        bound_s: what it may be.
        rebuilds: transfer engines of decode workers that were made again.
        quarantine: seconds since the start, pages in quarantine at the decode worker.
        violations: what must never happen.
        seconds: that it took.
        logs: of every process and of the scheduler.
    """

    name: str
    replay: str
    right: int = 0
    aborted: int = 0
    failed: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    bound_s: float = 0.0
    rebuilds: int = 0
    quarantine: list[tuple[float, int]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    logs: list[Path] = field(default_factory=list)

    def read_logs(self, started: float) -> None:
        """Take from the logs what is only there."""
        for path in self.logs:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if VIOLATION in line or line.startswith("Traceback"):
                    self.violations.append(f"{path.parent.name}/{path.name}: {line}")
                self.rebuilds += "transfer engine rebuilt" in line
                if found := QUARANTINE.match(line):
                    self.quarantine.append((float(found[1]) - started, int(found[2])))
        self.quarantine.sort()

    def text(self) -> str:
        """The table, and on a failure what is needed to look into it."""
        peak = max((pages for _, pages in self.quarantine), default=0)
        rows = [
            ("requests", f"{self.right} right, {self.failed} failed with a cause, {self.aborted} aborted"),
            ("faults", ", ".join(f"{count} {name}" for name, count in sorted(self.signals.items())) or "none"),
            ("slowest end", f"{self.slowest_s:.2f} s, at most {self.bound_s:.0f} s allowed"),
            ("quarantine", f"{peak} pages at most; over time: {_series(self.quarantine)}"),
            ("engine rebuilds", str(self.rebuilds)),
            ("duration", f"{self.seconds:.1f} s"),
        ]
        lines = [self.name, *(f"  {name:<16} {value}" for name, value in rows)]
        lines += [f"  {count:>5} x {cause}" for cause, count in self.causes.most_common()]
        lines += [f"  VIOLATION: {violation}" for violation in self.violations]
        if self.violations:
            lines += [f"  replay: {self.replay}", self.tails()]
        return "\n".join(lines)

    def tails(self) -> str:
        """The last events of the scheduler, and of the workers that said something last."""
        latest = sorted(self.logs, key=lambda path: path.stat().st_mtime)[-LOGS_SHOWN:]
        parts = []
        for path in latest:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
            if lines:
                parts.append(f"--- {path.parent.name}/{path.name}\n" + "\n".join(lines))
        return "\n".join(parts)


def kind_of(error: Exception) -> str:
    """An error's text without what differs from one to the next."""
    text = f"{type(error).__name__}: {error}"
    text = re.sub(r"request r\d+", "request", text)
    text = re.sub(r"\(attempt \d+ of [^)]*\)", "", text)
    text = re.sub(r"0x[0-9a-f]+|\d[\d.,:]*", "#", text)
    return re.sub(r"instance \S+", "instance", text)[:220]


def _series(quarantine: Sequence[tuple[float, int]]) -> str:
    """Every change, thinned."""
    changes = [f"{pages} at {at:.1f} s" for at, pages in _changes(quarantine)]
    step = -(-len(changes) // SERIES_SHOWN) or 1
    return ", ".join(changes[::step]) or "none"


def _changes(quarantine: Iterable[tuple[float, int]]) -> Iterable[tuple[float, int]]:
    last = 0
    for at, pages in quarantine:
        if pages != last:
            yield at, pages
        last = pages
