"""The program of a worker process; started by `cpkv.engine.worker`, never by hand."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch

from cpkv.engine.commands import Command, StartDecode, StartRank
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.engine.devices import take_device
from cpkv.engine.rank_group import join_ranks
from cpkv.engine.rank_worker import RankWorker
from cpkv.engine.worker_loop import Worker, serve_commands
from cpkv.engine.worker_process import begin_worker_process
from cpkv.errors import ProtocolError
from cpkv.transfer.backends import open_backend_of
from cpkv.transfer.channel import Channel


def make_worker(command: object) -> Worker:
    """The worker that the first command asks for."""
    if isinstance(command, StartRank):
        torch.set_num_threads(command.threads)
        settings = command.settings
        device = take_device(settings.device, command.rank)
        comm = join_ranks(command.rank, settings.cp_size, device, Path(command.rendezvous), command.secret)
        return RankWorker(command, comm, device, lambda: open_backend_of(settings, command.secret))
    if isinstance(command, StartDecode):
        torch.set_num_threads(command.threads)
        return DecodeWorker(command, lambda: open_backend_of(command.settings, command.secret))
    raise ProtocolError(f"the first command is {type(command).__name__}; it must start a rank or a decode worker")


def make_lasting_worker(command: object) -> Worker:
    """The same; what is there by now stays, and looking it through for garbage would stop all ranks again and again."""
    worker = make_worker(command)
    gc.collect()
    gc.freeze()
    return worker


def main() -> None:
    """Serve until told to stop, or until the scheduler ends."""
    process = begin_worker_process(__doc__)
    channel = Channel(process.connection, Command, "the scheduler")
    serve_commands(channel, process.name, make_lasting_worker, on_failure=lambda command, cause: None)
    # Everything is released; to take down the modules of torch and transformers would cost another second.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
