"""A worker as the scheduler sees it: a name, a channel, and a way to know how it ended.

scheduler  --socketpair-->  process (spawned, own session, stderr to a file)     or     thread of this process
           --lifeline----->  ends the process when the scheduler ends
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpkv.engine.commands import Reply, StopWorker
from cpkv.errors import CpkvError
from cpkv.transfer.channel import Channel

STOP_TIMEOUT_S = 5.0
LOG_TAIL_CHARS = 2000


class WorkerHandle(abc.ABC):
    """One worker, process or thread."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.channel = channel

    @abc.abstractmethod
    def exit_cause(self) -> str | None:
        """How the worker ended, in words; None while it runs."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it at once and wait until it is gone."""

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Give it that long to end by itself."""

    def ask_to_stop(self) -> None:
        """Tell it to release everything and end; `stop` waits for that."""
        if self.exit_cause() is None:
            with contextlib.suppress(CpkvError):
                self.channel.send(StopWorker())

    def stop(self) -> None:
        """Wait until a worker that was asked to stop is gone; kill it when it does not end."""
        if self.exit_cause() is None:
            with contextlib.suppress(CpkvError):
                self.channel.receive(STOP_TIMEOUT_S)
                self.channel.close()
                self.wait(STOP_TIMEOUT_S)
        self.kill()
        self.channel.close()


class ProcessWorker(WorkerHandle):
    """A worker in a process of its own, started by exec and never by fork.

    Args:
        name: for errors and its log file.
        workspace: folder for the log file.
        module: the program.
        receives: what it replies.
    """

    def __init__(
        self, name: str, workspace: Path, *, module: str = "cpkv.engine.worker_main", receives: Any = Reply
    ) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        self._log = workspace / f"{name.replace(' ', '-')}.log"
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", module, "--name", name),
                        *("--socket", str(theirs.fileno()), "--lifeline", str(lifeline_read)),
                    ],
                    pass_fds=(theirs.fileno(), lifeline_read),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        finally:
            theirs.close()
            os.close(lifeline_read)
        super().__init__(name, Channel(ours, receives, name))

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def exit_cause(self) -> str | None:
        """Signal or exit status, and the end of what it printed."""
        status = self._process.poll()
        if status is None:
            return None
        how = f"exited with status {status}"
        if status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        tail = self._log.read_text(encoding="utf-8", errors="replace").strip()[-LOG_TAIL_CHARS:]
        return f"{self.name} {how}" + (f"; it printed last: {tail}" if tail and status > 0 else "")

    @property
    def log(self) -> Path:
        """The file with what it prints."""
        return self._log

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL: the worker holds nothing that outlives it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class ThreadWorker(WorkerHandle):
    """A worker in a thread of this process.

    Args:
        name: for errors.
        serve: runs the worker over the channel's other end until it is told to stop.
        receives: messages that the worker accepts.
    """

    def __init__(self, name: str, serve: Callable[[Channel], None], receives: object) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(name, Channel(ours, Reply, name))
        channel = Channel(theirs, receives, "the scheduler")
        self._thread = threading.Thread(target=serve, args=(channel,), name=name, daemon=True)
        self._thread.start()

    def exit_cause(self) -> str | None:
        """Whether the thread is over."""
        return None if self._thread.is_alive() else f"{self.name} ended"

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def kill(self) -> None:
        """Close the connection, which ends the loop, and wait for the thread."""
        self.channel.close()
        self._thread.join(STOP_TIMEOUT_S)
