"""The runner's main function: select, run, print. The last line it prints is always the summary."""

from __future__ import annotations

import argparse
import resource
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import FrameType

from runner.discovery import discover
from runner.hardware import this_machine
from runner.options import OptionError, parse
from runner.reach import changed_files, reached
from runner.results import FileResult, summary, time_advice, write_junit
from runner.schedule import Settings, run_all
from runner.selection import Entry, partition, select

LOG_LINES = 400
BAD_CALL = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests that the command line asks for; 0 when all passed, 1 when not, 2 when nothing could be run."""
    machine = this_machine()
    try:
        options = parse(arguments, machine)
        entries = _entries(options)
    except OptionError as error:
        print(f"run_suite.py: {error}", file=sys.stderr)
        return BAD_CALL
    except _BadFiles as bad:
        for message in bad.messages:
            print(f"error: {message}", file=sys.stderr if options.list else sys.stdout)
        if not options.list:
            print(summary(0, len(bad.messages), 0))
        return BAD_CALL
    if options.list:
        print("\n".join(sorted({entry.path for entry in entries if not entry.registration.disabled})))
        return 0
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    Random(seed).shuffle(entries)
    settings = Settings(
        root=options.root.resolve(),
        machine=machine,
        jobs=options.jobs,
        seed=seed,
        timeout_per_file=options.timeout_per_file,
        continue_on_error=options.continue_on_error,
    )
    return _run(entries, settings, options.junit)


class _BadFiles(Exception):
    """Test files that cannot be placed, one message each."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__(*messages)
        self.messages = messages


def _entries(options: argparse.Namespace) -> list[Entry]:
    root = options.root.resolve()
    files, errors = discover(root)
    if errors:
        raise _BadFiles(errors)
    selection = select(files, options.hw, options.suite, options.nightly)
    if not selection.entries:
        asked = " and ".join(["/".join(options.hw), *(["suite " + "/".join(options.suite)] if options.suite else [])])
        raise _BadFiles([f"no test file is registered for {asked} below {root}/test/registered"])
    entries = list(selection.entries)
    if options.changed_since is not None:
        reach = reached(root, changed_files(root, options.changed_since), {entry.path for entry in entries})
        entries = [entry for entry in entries if entry.path in reach.paths]
        why = reach.everything or f"{len(reach.paths)} files can be reached"
        print(f"changed since {options.changed_since}: {why}", file=sys.stderr)
    for what, left in (("nightly only", selection.nightly_only), ("for other hardware", selection.other_hardware)):
        if left:
            print(f"not run, {what}: {', '.join(sorted({entry.label for entry in left}))}", file=sys.stderr)
    return partition(entries, options.partition_size)[options.partition_id]


def _run(entries: Sequence[Entry], settings: Settings, junit: Path | None) -> int:
    print(
        f"{len(entries)} files, {settings.jobs} at a time on {settings.machine.cores} cores; order and seeds from "
        f"--seed {settings.seed}",
        flush=True,
    )
    # A file that crashes needs no core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    before = signal.signal(signal.SIGTERM, _interrupt)
    started, progress = time.monotonic(), _Progress(len(entries))
    try:
        run_all(entries, settings, progress.report)
    except KeyboardInterrupt:
        print("interrupted; what was running has been killed")
    finally:
        signal.signal(signal.SIGTERM, before)
    results = progress.results
    if junit is not None:
        write_junit(junit, results)
    return _close(results, len(entries), time.monotonic() - started)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Progress:
    """Prints each result as it comes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.results: list[FileResult] = []

    def report(self, result: FileResult, log: Path | None) -> None:
        """One line for a file, and all there is to know where it failed."""
        self.results.append(result)
        mark = "FAIL" if result.failures else "skip" if log is None else "ok  "
        count = f"[{len(self.results):{len(str(self.total))}}/{self.total}]"
        print(f"{count} {mark} {result.seconds:6.1f} s  {result.entry.label}  {result.counts}", flush=True)
        if not result.failures:
            return
        if log is not None:
            lines = log.read_text(errors="replace").splitlines()
            if len(lines) > LOG_LINES:
                print(f"    | ... {len(lines) - LOG_LINES} lines before")
            print("\n".join(f"    | {line}" for line in lines[-LOG_LINES:]))
        if result.trouble is not None:
            print(f"    {result.entry.label}: {result.trouble}", flush=True)


def _close(results: Sequence[FileResult], total: int, seconds: float) -> int:
    """Prints what is worth knowing after all files, then the summary; returns the exit status."""
    for result in results:
        for name, reason in result.skipped:
            print(f"skipped: {result.entry.label}::{name}: {reason}")
    for result in results:
        for name, took in result.slow:
            print(f"slow: {result.entry.label}::{name} took {took:.1f} s")
        if (advice := time_advice(result)) is not None:
            print(f"est_time: {advice}")
    for result in results:
        for name in result.failed:
            print(f"failed: {result.entry.label}::{name}")
        if result.trouble is not None:
            print(f"failed: {result.entry.label}: {result.trouble}")
    if len(results) < total:
        print(f"{total - len(results)} of {total} files did not run")
    print(f"{len(results)} files in {seconds:.1f} s")
    failed = sum(result.failures for result in results)
    print(summary(sum(r.passed for r in results), failed, sum(len(r.skipped) for r in results)), flush=True)
    return 1 if failed or len(results) < total else 0
