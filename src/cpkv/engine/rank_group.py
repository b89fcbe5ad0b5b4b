"""How the rank processes of one host join each other, by what they have to exchange.

device    GPUs                        memory of the device moves by
cpu                                   gloo
cuda      one or more for each rank   NCCL
cuda      fewer than ranks            mailboxes in memory that all ranks have mapped; gloo where it cannot be shared
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from cpkv.comm.communicator import Communicator
from cpkv.comm.gloo import GlooCommunicator
from cpkv.comm.mailbox import MailboxCommunicator
from cpkv.comm.threads import ThreadGroup
from cpkv.engine.commands import StartRank
from cpkv.engine.devices import own_devices
from cpkv.pool.sealed_segment import RangeShape
from cpkv.pool.unified_memory import open_unified_pools, segment_memory
from cpkv.pool.vmm_memory import why_not_vmm

LOG = logging.getLogger(__name__)
MAILBOX_BYTES = 64 << 20


def join_ranks(start: StartRank, device: torch.device) -> Communicator:
    """Join the group of a run.

    Args:
        start: of this rank.
        device: where its pages are; its current device.

    Raises:
        CpkvError: the other ranks did not arrive, or memory that can be shared is not there.
    """
    cp_size = start.settings.cp_size
    if cp_size == 1:
        return ThreadGroup(1).communicator(0)
    nccl = own_devices(start.settings.device, cp_size)
    control = GlooCommunicator.join(start.rank, cp_size, Path(start.rendezvous), nccl=nccl)
    if device.type == "cpu" or nccl:
        return control
    if reason := why_not_vmm(device):
        LOG.warning("rank %d: %s; rows of other ranks come by way of the host, slowly", start.rank, reason)
        return control
    return _open_mailboxes(start, control, device)


def _open_mailboxes(start: StartRank, control: Communicator, device: torch.device) -> MailboxCommunicator:
    """Two mailboxes a rank: for the layers' collectives, and for gathers ahead of time."""
    memory = segment_memory(device)
    cp_size = start.settings.cp_size
    ranges = open_unified_pools(
        start.rank,
        cp_size,
        (
            RangeShape.of("mailbox", MAILBOX_BYTES, MAILBOX_BYTES, page_bytes=memory.page_bytes),
            RangeShape.of("prefetch mailbox", MAILBOX_BYTES, MAILBOX_BYTES, page_bytes=memory.page_bytes),
        ),
        {},
        start.secret,
        Path(start.rendezvous).parent,
        control.barrier,
        False,
        memory=memory,
    )
    main, ahead = ([found.segment(rank) for rank in range(cp_size)] for found in ranges)
    return MailboxCommunicator(control, main, prefetch=MailboxCommunicator(control.prefetch, ahead))
