"""The program of a worker process of the harness; started like the engine's own, but without a model.

It ends with status 5 when a thread or a mapping of shared memory has outlived its worker.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from cpkv.engine.worker_loop import Worker, serve_commands
from cpkv.engine.worker_process import begin_worker_process
from cpkv.errors import ProtocolError
from cpkv.testing.faults.commands import SeededCommand, StartSeededDecode, StartSeededRank
from cpkv.testing.faults.decode import SeededDecode, violation
from cpkv.testing.faults.rank import SeededRank
from cpkv.transfer.backends import open_backend_of
from cpkv.transfer.channel import Channel

LEFT_BEHIND = 5


def make_worker(command: object) -> Worker:
    """The worker that the first command asks for."""
    torch.set_num_threads(1)
    if isinstance(command, StartSeededRank):
        return SeededRank(command, lambda: open_backend_of(command.settings, command.secret))
    if isinstance(command, StartSeededDecode):
        return SeededDecode(command, lambda: open_backend_of(command.settings, command.secret))
    raise ProtocolError(f"the first command is {type(command).__name__}; it must start a rank or a decode worker")


def _left_behind(lifeline: threading.Thread) -> list[str]:
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread not in (threading.main_thread(), lifeline)]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return [f"thread {name}" for name in threads] + [line for line in maps if "/memfd:cpkv" in line]


def main() -> None:
    """Serve until told to stop, then look at what is left."""
    process = begin_worker_process(__doc__)
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(message)s")
    faulthandler.register(signal.SIGUSR1)
    channel = Channel(process.connection, SeededCommand, "the scheduler")
    serve_commands(channel, process.name, make_worker, on_failure=lambda command, cause: None)
    left = _left_behind(process.lifeline)
    if left:
        violation(f"left behind: {'; '.join(left)}")
    sys.stderr.flush()
    os._exit(LEFT_BEHIND if left else 0)


if __name__ == "__main__":
    main()
