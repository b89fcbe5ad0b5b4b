"""The command and its processes as tests see them: in this process, or beside it and watched through /proc."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpkv.testing.leaks import child_processes, nothing_left_behind
from cpkv.testing.waiting import eventually

WORKER = "cpkv.engine.worker_main"
PATIENCE_S = 50.0
# A test run that a script started in the background ignores SIGINT, and its children inherit that.
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from cpkv.cli.main import run
run()
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str
    seconds: float


def worker_pids(parent: int) -> dict[str, int]:
    """Worker name -> process id of the workers that a process has started and that still run."""
    lines = {pid: line for pid, line in child_processes(parent).items() if WORKER in line}
    return {line.partition("--name ")[2].partition(" --")[0]: pid for pid, line in lines.items()}


def processes_of(folder: Path) -> list[str]:
    """Processes, whoever started them, that inherited `folder` as the place of temporary files."""
    mark = f"TMPDIR={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # That of a zombie is empty.
                if mark in entry.joinpath("environ").read_bytes().split(b"\0"):
                    words = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{entry.name} {words.decode()}")
    return found


def own_entries(folder: Path) -> list[str]:
    """What cpkv made in a temporary folder; torch keeps an empty cache folder of its own there."""
    return [entry.name for entry in folder.iterdir() if entry.name.startswith("cpkv")]


class Demo:
    """`cpkv demo` in a process of its own, with a temporary folder of its own."""

    def __init__(self, folder: Path, *arguments: str, verbose: bool) -> None:
        self.folder = folder
        folder.mkdir()
        words = ["--verbose"] * verbose + ["demo", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder)},
            text=True,
        )
        self.workers: dict[str, int] = {}
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("out", "err")]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        stream = self.process.stdout if name == "out" else self.process.stderr
        assert stream is not None
        with stream:
            for line in stream:
                self._lines[name].append(line)

    @property
    def err(self) -> str:
        """What it has printed on stderr so far."""
        return "".join(self._lines["err"])

    def wait_for(self, progress: str) -> None:
        """Wait for a line on stderr that contains `progress`."""
        eventually(
            lambda: progress in self.err or self.process.poll() is not None, f"{progress!r}; so far:\n{self.err}"
        )
        assert progress in self.err, f"the demo ended before {progress!r}:\n{self.err}"

    def wait_for_worker(self, name: str) -> int:
        """Wait until it has started a worker, note all of them, and return the process id of that one."""

        def started() -> bool:
            self.workers |= worker_pids(self.process.pid)
            return name in self.workers or self.process.poll() is not None

        eventually(started, f"a worker called {name}; so far:\n{self.err}")
        assert name in self.workers, f"the demo ended without a {name}:\n{self.err}"
        return self.workers[name]

    def end(self, timeout_s: float = PATIENCE_S) -> Ended:
        """Wait for the end; `seconds` is how long that took."""
        started = time.monotonic()
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the demo still runs after {timeout_s:.0f} s; so far:\n{self.err}")
        for reader in self._readers:
            reader.join()
        return Ended(status, "".join(self._lines["out"]), self.err, time.monotonic() - started)

    def leftovers(self) -> list[str]:
        """Processes that still run, and what was left in its temporary folder."""
        return processes_of(self.folder) + own_entries(self.folder)

    def kill(self) -> None:
        """End it and its workers, whatever state they are in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.split()[0]), signal.SIGKILL)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Starts the demo in a process: `demo("--json", ...)`."""
    started: list[Demo] = []

    def start(*arguments: str, verbose: bool = False) -> Demo:
        started.append(Demo(tmp_path / f"tmp{len(started)}", *arguments, verbose=verbose))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders go; in the end none is left, and no worker, process or thread, either."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with nothing_left_behind():
        yield folder


@pytest.fixture
def cpkv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workspace: Path
) -> Iterator[Callable[..., Ended]]:
    """The command in this process: `cpkv("demo", "--json")`."""
    from cpkv.cli.main import run

    handler = signal.getsignal(signal.SIGTERM)
    levels = {name: logging.getLogger(name).level for name in (None, "cpkv")}

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["cpkv", *arguments])
        capsys.readouterr()
        started, status = time.monotonic(), 0
        try:
            run()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        seconds = time.monotonic() - started
        printed = capsys.readouterr()
        return Ended(status, printed.out, printed.err, seconds)

    yield call
    signal.signal(signal.SIGTERM, handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition: `until(lambda: ..., "what is awaited", seconds)`."""
    return eventually


@pytest.fixture
def processes() -> Callable[[Path], list[str]]:
    """The processes of a demo, by its temporary folder."""
    return processes_of
