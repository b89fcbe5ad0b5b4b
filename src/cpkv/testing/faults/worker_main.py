"""The program of a worker process of the harness; started like the engine's own, but without a model.

It ends with status 5 when a thread or a mapping of shared memory has outlived its worker.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import torch

from cpkv.config.settings import EngineSettings
from cpkv.engine.worker_loop import Worker, serve_commands
from cpkv.errors import ProtocolError
from cpkv.testing.faults.commands import SeededCommand, StartSeededDecode, StartSeededRank
from cpkv.testing.faults.decode import SeededDecode, violation
from cpkv.testing.faults.rank import SeededRank
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.backends import open_backend
from cpkv.transfer.channel import Channel

LEFT_BEHIND = 5


def make_worker(command: object) -> Worker:
    """The worker that the first command asks for."""
    torch.set_num_threads(1)
    if isinstance(command, StartSeededRank):
        return SeededRank(command, lambda: _backend(command.settings, command.secret))
    if isinstance(command, StartSeededDecode):
        return SeededDecode(command, lambda: _backend(command.settings, command.secret))
    raise ProtocolError(f"the first command is {type(command).__name__}; it must start a rank or a decode worker")


def _backend(settings: EngineSettings, secret: str) -> TransferBackend:
    return open_backend(settings.transfer, settings.host, secret=secret, transfer_timeout_s=settings.transfer_timeout_s)


def _left_behind(lifeline: threading.Thread) -> list[str]:
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread not in (threading.main_thread(), lifeline)]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return [f"thread {name}" for name in threads] + [line for line in maps if "/memfd:cpkv" in line]


def _end_with_harness(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(3)


def main() -> None:
    """Parse the descriptors, watch the lifeline, serve, look at what is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(message)s")
    faulthandler.register(signal.SIGUSR1)
    lifeline = threading.Thread(target=_end_with_harness, args=(options.lifeline,), daemon=True)
    lifeline.start()
    channel = Channel(socket.socket(fileno=options.socket), SeededCommand, "the scheduler")
    serve_commands(channel, options.name, make_worker, on_failure=lambda command, cause: None)
    left = _left_behind(lifeline)
    if left:
        violation(f"left behind: {'; '.join(left)}")
    sys.stderr.flush()
    os._exit(LEFT_BEHIND if left else 0)


if __name__ == "__main__":
    main()
