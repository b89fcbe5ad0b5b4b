"""How the process of a worker begins: what it was given by `cpkv.engine.worker.ProcessWorker`.

Two inherited descriptors: a socket for commands, and the read end of a pipe (`lifeline`) whose write end only the
scheduler holds, so that a worker ends when the scheduler does, however that happens.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
from typing import NamedTuple


class WorkerProcess(NamedTuple):
    """What this process is.

    Attributes:
        name: of the worker.
        connection: to the scheduler.
        lifeline: the thread that ends this process with the scheduler.
    """

    name: str
    connection: socket.socket
    lifeline: threading.Thread


def begin_worker_process(description: str | None) -> WorkerProcess:
    """Parse the command line and watch the lifeline."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--name", required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    lifeline = threading.Thread(target=_end_with_scheduler, args=(options.lifeline,), daemon=True)
    lifeline.start()
    return WorkerProcess(options.name, socket.socket(fileno=options.socket), lifeline)


def _end_with_scheduler(lifeline: int) -> None:
    """Wait for the end of the pipe, then end this process at once."""
    os.read(lifeline, 1)
    os._exit(3)
