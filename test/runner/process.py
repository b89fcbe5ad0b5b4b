"""One test file in one pytest process, which is killed with everything it started when it takes too long."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

# Every process that a test file starts inherits this variable, and so can be found in whatever session it hides.
TAG = "CPKV_TEST_FILE"
POLL_SECONDS = 0.05
# After SIGABRT, pytest's fault handler writes where each thread stands.
STACKS_SECONDS = 2.0
# Helpers of multiprocessing notice only now that their parent has gone.
LEFTOVER_SECONDS = 3.0


@dataclass(frozen=True)
class Order:
    """How to run one file: the command's working folder, limits in seconds, environment on top of ours.

    It runs on `cores`, with whatever it starts; where there are none, on all of ours.
    """

    path: str
    root: Path
    junit: Path
    log: Path
    timeout: float
    environment: dict[str, str]
    seed: int | None = None
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How the process ended: its exit status (None: it was killed by us), seconds, and what it left running."""

    status: int | None
    seconds: float
    cause: str | None = None
    leftovers: tuple[str, ...] = ()


def run_file(order: Order, stop: Event) -> Ended:
    """Runs pytest on one file; `stop`, set by another thread, ends it early."""
    tag = uuid.uuid4().hex
    environment = {**os.environ, **order.environment, TAG: tag}
    started = time.monotonic()
    with order.log.open("wb") as log:
        # A file instead of a pipe: a child that keeps it open cannot make us wait.
        process = subprocess.Popen(
            command(order),
            cwd=order.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if order.cores:
            # Before it has more than one thread, each of which has cores of its own.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, order.cores)
        try:
            cause = _wait(process, started + order.timeout, stop, order.timeout)
        finally:
            seconds = time.monotonic() - started
            leftovers = _end_group(process, tag)
    if cause is not None:
        return Ended(None, seconds, cause, ())
    return Ended(process.returncode, seconds, None, leftovers)


def command(order: Order) -> list[str]:
    """The pytest call for one file."""
    words = [sys.executable, "-m", "pytest", order.path, f"--rootdir={order.root}", "-q", "-rf", "--color=no"]
    words += ["-p", "no:cacheprovider", f"--junitxml={order.junit}", "-o", "junit_family=xunit2"]
    if importlib.util.find_spec("pytest_randomly") is not None:
        words += ["-p", "no:randomly"] if order.seed is None else [f"--randomly-seed={order.seed}"]
    return words


def describe_status(status: int) -> str:
    """An exit status of pytest in words."""
    if status < 0:
        return f"the interpreter was ended by {signal.Signals(-status).name}"
    words = {2: "collection failed", 3: "pytest had an internal error", 4: "pytest refused the call", 5: "no test ran"}
    return words.get(status, f"exit status {status}")


def _wait(process: subprocess.Popen[bytes], deadline: float, stop: Event, timeout: float) -> str | None:
    while process.poll() is None:
        if stop.is_set():
            return "stopped"
        if time.monotonic() >= deadline:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_SECONDS)
            return f"ran longer than {timeout:g} s and was killed with its children"
        time.sleep(POLL_SECONDS)
    return None


def _end_group(process: subprocess.Popen[bytes], tag: str) -> tuple[str, ...]:
    """Kills what is left of the process and its children; the command lines of those that outlived it."""
    alone = process.poll() is not None
    deadline = time.monotonic() + (LEFTOVER_SECONDS if alone and process.returncode in (0, 1) else 0.0)
    left = tagged_processes(tag)
    while left and alone and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = tagged_processes(tag)
    if left or not alone:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for number in left:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()
    return tuple(f"{number} {name}" for number, name in left.items() if number != process.pid)


def tagged_processes(tag: str) -> dict[int, str]:
    """The living processes that carry `tag`, with their command lines."""
    wanted = f"{TAG}={tag}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while we look, and those of other users cannot be read.
        with suppress(OSError):
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            if (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = words.decode(errors="replace").strip()[:160]
    return found
