"""Ranks of one host that exchange memory of GPUs through memory that all of them have mapped: no copy by the host.

mailboxes of 4 ranks, each of two halves; all-gather number n uses half n % 2:

    | rank 0: h0 h1 | rank 1: h0 h1 | rank 2: h0 h1 | rank 3: h0 h1 |        each rank writes its own, and reads all

    own part -> own half    wait for the device    meet the others (control)    all halves -> out

A rank writes a half again two gathers later: it has met the others in between, who had waited for their devices then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cpkv.comm.communicator import Communicator, settle

HALVES = 2


class MailboxCommunicator(Communicator):
    """One rank's end: all-gathers of memory of the mailboxes' device through these, everything else by `control`.

    Args:
        control: the same ranks, for what lies in memory of the host, and to wait for each other.
        mailboxes: of each rank, uint8 [bytes] of equal length, contiguous, on this rank's device; a multiple of 32.
            Only the own one is written.
        prefetch: the same ranks as a second group, with mailboxes of its own.
    """

    def __init__(
        self,
        control: Communicator,
        mailboxes: Sequence[torch.Tensor],
        *,
        prefetch: MailboxCommunicator | None = None,
    ) -> None:
        super().__init__(control.rank, control.size, prefetch=prefetch, record=control.sequence is not None)
        self._control = control
        self._half_bytes = mailboxes[0].numel() // HALVES
        self._halves = [mailbox[: HALVES * self._half_bytes].view(HALVES, -1) for mailbox in mailboxes]
        self._turn = 0

    def _all_gather(self, tensor: torch.Tensor, label: str, out: torch.Tensor) -> None:
        if tensor.device != self._halves[self.rank].device:
            self._control.all_gather(tensor, label, out=out)
            return
        sent = tensor.view(-1).view(torch.uint8)
        arrives = out.view(self.size, -1).view(torch.uint8)
        # An empty tensor still meets the others, who expect it.
        for first in range(0, max(1, sent.numel()), self._half_bytes):
            piece = sent[first : first + self._half_bytes]
            self._exchange(piece, label, arrives[:, first : first + len(piece)])

    def _exchange(self, piece: torch.Tensor, label: str, arrives: torch.Tensor) -> None:
        half = self._turn % HALVES
        self._turn += 1
        self._halves[self.rank][half][: len(piece)].copy_(piece)
        # What is read of other ranks' pools behind this must be complete too, so all that was given is waited for.
        settle(piece)
        self._control.barrier(label)
        for rank, halves in enumerate(self._halves):
            arrives[rank].copy_(halves[half][: len(piece)])

    def _broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        self._control.broadcast(tensor, source, label)

    def _all_to_all(
        self,
        sent: torch.Tensor,
        sent_sizes: Sequence[int],
        received: torch.Tensor,
        received_sizes: Sequence[int],
        label: str,
    ) -> None:
        self._control.all_to_all(sent, sent_sizes, received, received_sizes, label)

    def close(self) -> None:
        """Leave the group, and let go of the mailboxes."""
        self._halves = []
        if self._prefetch is not None:
            self._prefetch.close()
            self._prefetch = None
        self._control.close()
