"""The program of a worker process; started by `cpkv.engine.worker`, never by hand.

Two inherited descriptors: a socket for commands, and the read end of a pipe (`lifeline`) whose write end only the
scheduler holds, so that a worker ends when the scheduler does, however that happens.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from pathlib import Path

import torch

from cpkv.comm.gloo import GlooCommunicator
from cpkv.comm.threads import ThreadGroup
from cpkv.config.settings import EngineSettings
from cpkv.engine.commands import Command, StartDecode, StartRank
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.engine.rank_worker import RankWorker
from cpkv.engine.worker_loop import Worker, serve_commands
from cpkv.errors import ProtocolError
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.backends import open_backend
from cpkv.transfer.channel import Channel


def end_with_scheduler(lifeline: int) -> None:
    """Wait for the end of the pipe, then end this process at once."""
    os.read(lifeline, 1)
    os._exit(3)


def make_backend(settings: EngineSettings, secret: str) -> TransferBackend:
    """A transfer engine of this process."""
    return open_backend(settings.transfer, settings.host, secret=secret, transfer_timeout_s=settings.transfer_timeout_s)


def make_worker(command: object) -> Worker:
    """The worker that the first command asks for."""
    if isinstance(command, StartRank):
        torch.set_num_threads(command.threads)
        cp_size = command.settings.cp_size
        comm = (
            ThreadGroup(1).communicator(0)
            if cp_size == 1
            else GlooCommunicator.join(command.rank, cp_size, Path(command.rendezvous))
        )
        return RankWorker(command, comm, lambda: make_backend(command.settings, command.secret))
    if isinstance(command, StartDecode):
        torch.set_num_threads(command.threads)
        return DecodeWorker(command, lambda: make_backend(command.settings, command.secret))
    raise ProtocolError(f"the first command is {type(command).__name__}; it must start a rank or a decode worker")


def main() -> None:
    """Parse the descriptors, watch the lifeline, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    threading.Thread(target=end_with_scheduler, args=(options.lifeline,), daemon=True).start()
    channel = Channel(socket.socket(fileno=options.socket), Command, "the scheduler")
    serve_commands(channel, options.name, make_worker, on_failure=lambda command, cause: None)
    # Everything is released; to take down the modules of torch and transformers would cost another second.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
