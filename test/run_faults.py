"""Plants faults into a copy of the package, one at a time, and checks that a test names each.

    python test/run_faults.py planted            every fault of test/faults/planted.toml must be caught and named
    python test/run_faults.py mutants            at least 90% of those in test/faults/mutants.toml must be caught

A fault is a piece of text that occurs once in a file, what takes its place, the tests to run, and, for planted faults,
words that the name or the message of a failing test must hold. All those tests are first run without a fault, where
they must pass. The working tree is never touched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED_SHARE = {"planted": 1.0, "mutants": 0.9}
TIMEOUT_S = 300


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    named: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether a fault was caught, and by which test."""

    fault: Fault
    caught: bool
    detail: str


def read_faults(path: Path) -> list[Fault]:
    """The faults of a list; each `find` must occur exactly once in its file."""
    faults = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
        fault = Fault(**{**entry, "tests": tuple(entry["tests"])})
        count = (ROOT / fault.file).read_text(encoding="utf-8").count(fault.find)
        if count != 1:
            sys.exit(
                f"{path.name}: fault {fault.name!r}: its text occurs {count} times in {fault.file}; update the list"
            )
        faults.append(fault)
    return faults


def run_tests(tests: Sequence[str], source: Path) -> subprocess.CompletedProcess[str]:
    """Run tests against the package in `source`, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = os.environ | {
        "PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "CI": "1",
    }
    return subprocess.run(
        [*command, *tests],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def red_without_fault(tests: str) -> str | None:
    """The tests, when they fail on the package as it is: then a failure says nothing about a fault."""
    ended = run_tests([tests], ROOT / "src")
    return None if ended.returncode == 0 else f"{tests}: {ended.stdout.strip()[-400:]}"


def try_fault(fault: Fault) -> Verdict:
    """Run the fault's tests against a copy of the package that holds it."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src")
        target = Path(folder) / fault.file
        target.write_text(target.read_text(encoding="utf-8").replace(fault.find, fault.replace), encoding="utf-8")
        try:
            ended = run_tests(fault.tests, Path(folder) / "src")
        except subprocess.TimeoutExpired:
            return Verdict(fault, True, f"no end within {TIMEOUT_S} s")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+)$", ended.stdout, re.MULTILINE)
    if ended.returncode != 1 or not failed:
        return Verdict(fault, False, f"pytest ended with {ended.returncode}: {ended.stdout.strip()[-200:]}")
    said = "\n".join([*failed, *re.findall(r"^E +(.+)$", ended.stdout, re.MULTILINE)])
    if fault.named and not re.search(fault.named, said, re.IGNORECASE):
        return Verdict(fault, False, f"no failing test names it: {failed[0]}")
    return Verdict(fault, True, failed[0].split(" - ")[0])


def main() -> int:
    """Try every fault of a list and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", choices=sorted(NEEDED_SHARE))
    parser.add_argument("--only", help="a regular expression over the names")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args()
    faults = read_faults(ROOT / "test" / "faults" / f"{options.list}.toml")
    chosen = [fault for fault in faults if options.only is None or re.search(options.only, fault.name)]
    with ThreadPoolExecutor(options.jobs) as pool:
        tests = sorted({name for fault in chosen for name in fault.tests})
        red = [said for said in pool.map(red_without_fault, tests) if said]
        if red:
            sys.exit("these fail without any fault; mend them first:\n" + "\n".join(red))
        verdicts = []
        for verdict in pool.map(try_fault, chosen):
            verdicts.append(verdict)
            print(f"{'caught' if verdict.caught else 'MISSED'}  {verdict.fault.name}: {verdict.detail}", flush=True)
    caught = sum(verdict.caught for verdict in verdicts)
    needed = NEEDED_SHARE[options.list]
    print(f"{options.list}: {caught} of {len(verdicts)} caught, {needed:.0%} needed")
    return 0 if verdicts and caught >= needed * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
