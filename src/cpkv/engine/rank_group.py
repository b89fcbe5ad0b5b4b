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
from cpkv.engine.devices import own_devices
from cpkv.pool.sealed_segment import RangeShape
from cpkv.pool.unified_memory import open_unified_pools, segment_memory
from cpkv.pool.vmm_memory import why_not_vmm

LOG = logging.getLogger(__name__)
MAILBOX_BYTES = 64 << 20


def join_ranks(rank: int, cp_size: int, device: torch.device, rendezvous: Path, secret: str) -> Communicator:
    """Join the group of a run.

    Args:
        rank: ours.
        cp_size: ranks of the group, all on one host.
        device: where this rank's pages are; its current device (`take_device`).
        rendezvous: a file that does not exist yet, the same for all ranks, in a folder closed to other users.
        secret: of this run.

    Raises:
        CpkvError: the other ranks did not arrive, or memory that can be shared is not there.
    """
    if cp_size == 1:
        return ThreadGroup(1).communicator(0)
    nccl = own_devices(device, cp_size)
    control = GlooCommunicator.join(rank, cp_size, rendezvous, nccl=nccl)
    if device.type == "cpu" or nccl:
        return control
    if reason := why_not_vmm(device):
        LOG.warning("rank %d: %s; rows of other ranks come by way of the host, slowly", rank, reason)
        return control
    return _open_mailboxes(control, device, rendezvous.parent, secret)


def _open_mailboxes(control: Communicator, device: torch.device, folder: Path, secret: str) -> MailboxCommunicator:
    """Two mailboxes a rank: for the layers' collectives, and for gathers ahead of time."""
    memory = segment_memory(device)
    ranges = open_unified_pools(
        control.rank,
        control.size,
        (
            RangeShape.of("mailbox", MAILBOX_BYTES, MAILBOX_BYTES, page_bytes=memory.page_bytes),
            RangeShape.of("prefetch mailbox", MAILBOX_BYTES, MAILBOX_BYTES, page_bytes=memory.page_bytes),
        ),
        {},
        secret,
        folder,
        control.barrier,
        False,
        memory=memory,
    )
    main, ahead = ([found.segment(rank) for rank in range(control.size)] for found in ranges)
    return MailboxCommunicator(control, main, prefetch=MailboxCommunicator(control.prefetch, ahead))
