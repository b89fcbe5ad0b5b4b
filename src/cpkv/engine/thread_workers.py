"""Ranks and a decode worker that are threads of this process: for trying things out, and for tests."""

from __future__ import annotations

import os
from functools import partial
from typing import NamedTuple

import torch

from cpkv.comm.threads import ThreadGroup
from cpkv.engine.commands import Command, OpenPool, RunBatch
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.engine.devices import take_device
from cpkv.engine.rank_worker import RankWorker
from cpkv.engine.worker import ThreadWorker
from cpkv.engine.worker_loop import serve_commands
from cpkv.transfer.channel import Channel
from cpkv.transfer.inprocess import InProcessBackend, InProcessFabric

# Commands during which ranks wait for each other.
JOINT = (RunBatch, OpenPool)


class ThreadWorkers(NamedTuple):
    """Workers that wait for their first command."""

    ranks: tuple[ThreadWorker, ...]
    decode: ThreadWorker


def start_thread_workers(cp_size: int) -> ThreadWorkers:
    """Start `cp_size` ranks and a decode worker; a rank that fails in a joint command frees those that wait for it."""
    group, fabric = ThreadGroup(cp_size), InProcessFabric()

    def serve_rank(rank: int, channel: Channel) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // cp_size))
        serve_commands(
            channel,
            f"prefill rank {rank}",
            lambda start: RankWorker(
                start,
                group.communicator(rank),
                take_device(start.settings.device, rank),
                lambda: InProcessBackend(fabric),
            ),
            on_failure=lambda command, cause: group.abort(rank, cause) if isinstance(command, JOINT) else None,
        )

    def serve_decode(channel: Channel) -> None:
        serve_commands(
            channel,
            "decode worker",
            lambda start: DecodeWorker(start, lambda: InProcessBackend(fabric)),
            on_failure=lambda command, cause: None,
        )

    ranks = tuple(ThreadWorker(f"prefill rank {rank}", partial(serve_rank, rank), Command) for rank in range(cp_size))
    return ThreadWorkers(ranks, ThreadWorker("decode worker", serve_decode, Command))
