"""What a test file's run came to: counts, skips with their reasons, slow tests, and one merged JUnit file."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from runner.process import Ended, describe_status
from runner.selection import Entry
from runner.suites import SUITES


@dataclass
class FileResult:
    """The outcome of one entry; `trouble` says why the file as a whole counts as one failure."""

    entry: Entry
    seconds: float = 0.0
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    slow: list[tuple[str, float]] = field(default_factory=list)
    trouble: str | None = None
    suite_xml: ET.Element | None = None

    @property
    def failures(self) -> int:
        """Failed tests, and one more where the file itself failed."""
        return len(self.failed) + (self.trouble is not None)

    @property
    def counts(self) -> str:
        """The counts in words."""
        return f"{self.passed} passed, {self.failures} failed, {len(self.skipped)} skipped"


def left_out(entry: Entry, reason: str) -> FileResult:
    """The result of an entry that does not run at all; it counts as one skipped test."""
    suite = ET.Element("testsuite", name=entry.label, tests="1", skipped="1", failures="0", errors="0", time="0")
    case = ET.SubElement(suite, "testcase", classname=entry.label, name="(whole file)", time="0")
    ET.SubElement(case, "skipped", message=reason)
    return FileResult(entry, skipped=[("(whole file)", reason)], suite_xml=suite)


def read_result(entry: Entry, ended: Ended, junit: Path) -> FileResult:
    """The result of an entry that ran, from how its process ended and the JUnit file that pytest wrote."""
    result = FileResult(entry, seconds=ended.seconds)
    suite = None if ended.cause is not None else _suite_of(junit)
    if suite is not None:
        _count(result, suite)
    result.trouble = _trouble(result, ended, suite)
    result.suite_xml = suite if suite is not None else ET.Element("testsuite", tests="0", failures="0", errors="0")
    result.suite_xml.set("name", entry.label)
    result.suite_xml.set("time", f"{ended.seconds:.3f}")
    if result.trouble is not None:
        case = ET.SubElement(result.suite_xml, "testcase", classname=entry.label, name="(whole file)")
        ET.SubElement(case, "error", message=result.trouble)
        for counter in ("tests", "errors"):
            result.suite_xml.set(counter, str(int(result.suite_xml.get(counter, "0")) + 1))
    return result


def _suite_of(junit: Path) -> ET.Element | None:
    try:
        root = ET.parse(junit).getroot()
    except (OSError, ET.ParseError):
        return None
    return root if root.tag == "testsuite" else root.find("testsuite")


def _count(result: FileResult, suite: ET.Element) -> None:
    # A test that fails, and whose teardown fails too, has two elements.
    worst: dict[str, tuple[int, str]] = {}
    for case in suite.iter("testcase"):
        name = "::".join(part for part in (_class_of(case), case.get("name", "?")) if part)
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = (2, "")
        elif skip is not None:
            outcome = (1, _reason(skip))
        else:
            outcome = (0, "")
        worst[name] = max(worst.get(name, outcome), outcome)
        seconds = float(case.get("time") or 0.0)
        if seconds > SUITES[result.entry.registration.suite].seconds_per_test:
            result.slow.append((name, seconds))
    result.passed = sum(1 for rank, _ in worst.values() if rank == 0)
    result.skipped = sorted((name, reason) for name, (rank, reason) in worst.items() if rank == 1)
    result.failed = sorted(name for name, (rank, _) in worst.items() if rank == 2)


def _class_of(case: ET.Element) -> str:
    """The test's class, where it has one: the last part of the dotted name, which else is the module."""
    last = (case.get("classname") or "").rpartition(".")[2]
    return last if last.startswith("Test") else ""


def _reason(skip: ET.Element) -> str:
    message = (skip.get("message") or (skip.text or "")).strip() or "no reason given"
    return f"expected to fail: {message}" if skip.get("type") == "pytest.xfail" else message


def _trouble(result: FileResult, ended: Ended, suite: ET.Element | None) -> str | None:
    if ended.cause is not None:
        return ended.cause
    assert ended.status is not None
    if ended.leftovers and ended.status in (0, 1):
        return "left processes behind, now killed: " + "; ".join(ended.leftovers)
    if ended.status == 0 and suite is not None and (result.passed or result.skipped):
        return None
    if ended.status == 0:
        return "ended without a result"
    # A failed test, or a module that cannot be imported, is counted already.
    if ended.status in (1, 2) and result.failed:
        return None
    return describe_status(ended.status)


def time_advice(result: FileResult) -> str | None:
    """The est_time to write where the file took at least twice or at most half of it and is over 2 s off."""
    registration, ran = result.entry.registration, result.passed + len(result.failed)
    est, seconds = registration.est_time, result.seconds
    if result.trouble is not None or not ran or abs(seconds - est) <= 2.0 or est / 2 < seconds < est * 2:
        return None
    write = _round_up(seconds)
    return f"{result.entry.label}: est_time={est:g} is stated, {seconds:.1f} s were taken: write est_time={write}"


def _round_up(seconds: float) -> int:
    """Up to two digits, so that the value does not change with every run."""
    step = 10 ** max(0, math.floor(math.log10(max(seconds, 1.0))) - 1)
    return max(1, math.ceil(seconds / step) * step)


def write_junit(path: Path, results: Iterable[FileResult]) -> None:
    """Writes one JUnit file with a test suite per file."""
    suites = [result.suite_xml for result in results if result.suite_xml is not None]
    root = ET.Element("testsuites", name="cpkv")
    for counter in ("tests", "failures", "errors", "skipped"):
        root.set(counter, str(sum(int(suite.get(counter, "0")) for suite in suites)))
    root.extend(suites)
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def summary(passed: int, failed: int, skipped: int) -> str:
    """The last line of every run."""
    return f"{passed} passed, {failed} failed, {skipped} skipped"
