"""The command line of the runner."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from runner.hardware import Machine
from runner.suites import HARDWARE, SUITES


class OptionError(Exception):
    """Options that contradict each other or lie out of range."""


def parse(arguments: Sequence[str] | None, machine: Machine) -> argparse.Namespace:
    """The options, with defaults from `machine` filled in; OptionError where they make no sense."""
    options = _parser(machine).parse_args(arguments)
    options.hw = options.hw or list(machine.hw)
    if options.jobs < 1 or options.partition_size < 1:
        raise OptionError("--jobs and --partition-size count from 1")
    if not 0 <= options.partition_id < options.partition_size:
        last = options.partition_size - 1
        raise OptionError(f"--partition-id {options.partition_id} is none of 0 to {last}, the partitions asked for")
    if options.timeout_per_file is not None and options.timeout_per_file <= 0:
        raise OptionError("--timeout-per-file is a number of seconds above 0")
    return options


def _parser(machine: Machine) -> argparse.ArgumentParser:
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(prog="run_suite.py", description="Find and run the tests of test/registered/.")
    which = parser.add_argument_group("which tests")
    which.add_argument(
        "--hw",
        action="append",
        choices=HARDWARE,
        help=f"run what is registered for it; may be repeated (default, by what is there: {', '.join(machine.hw)})",
    )
    which.add_argument("--suite", action="append", choices=SUITES, default=[], help="may be repeated (default: all)")
    which.add_argument("--nightly", action="store_true", help="also what is registered as nightly")
    which.add_argument("--changed-since", metavar="REV", help="only what the change since REV can reach by imports")
    which.add_argument("--partition-id", type=int, default=0, metavar="I", help="run part I, from 0")
    which.add_argument("--partition-size", type=int, default=1, metavar="N", help="of N parts of equal time")
    which.add_argument("--list", action="store_true", help="print the files, one path a line, and run nothing")
    how = parser.add_argument_group("how they run")
    how.add_argument(
        "--jobs",
        type=int,
        default=min(machine.cores, 8),
        help="files side by side, each with cores/jobs threads (default: %(default)s)",
    )
    how.add_argument(
        "--timeout-per-file", type=float, metavar="S", help="seconds (default: 6 times est_time, 180 at least)"
    )
    how.add_argument("--continue-on-error", action="store_true", help="do not stop after the first file that fails")
    how.add_argument("--seed", type=int, help="the order of files and tests, and random seeds (default: a new one)")
    how.add_argument("--junit", type=Path, metavar="FILE", help="write one JUnit file with all results")
    how.add_argument("--root", type=Path, default=root, help="the checkout (default: this one)")
    return parser
