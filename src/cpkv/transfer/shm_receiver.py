"""The receiving end of the `shm` back end: it hands out its memory files, and takes them back.

One thread answers all senders; no byte of a transfer passes through it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time

from cpkv.errors import HandshakeError, ProtocolError, TransferError
from cpkv.transfer.bounded_socket import Bell
from cpkv.transfer.runs import Region, listed
from cpkv.transfer.shm_segment import Segment, find_segment
from cpkv.transfer.shm_wire import (
    MAX_CAUSE_CHARS,
    SHM_VERSION,
    Ask,
    Call,
    Gone,
    PacketSocket,
    Refused,
    ToReceiver,
    Withdraw,
    address_of_token,
    make_session_id,
)
from cpkv.transfer.shm_wire import Segment as SegmentPacket

LOG = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
# How long the listener leaves callers waiting when no descriptor is left for them.
BACK_OFF_S = 0.1


class _Sender:
    """A connected sender: who it is, and what it may have mapped."""

    def __init__(self, link: PacketSocket) -> None:
        self.link = link
        self.pid, _ = link.peer()
        self.welcome = False
        self.given: set[Region] = set()


class ShmReceiver:
    """Answers senders in a thread of its own.

    Args:
        silence_s: how long `withdraw` and `close` wait for senders to let go.

    Attributes:
        session_id: where senders find it.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        token = secrets.token_hex(8)
        self.session_id = make_session_id(token)
        self._segments: dict[Region, Segment] = {}
        self._senders: dict[int, _Sender] = {}
        # Guards both tables, and is notified when a sender lets go of a region.
        self._let_go = threading.Condition()
        self._bell = Bell()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(address_of_token(token))
        self._listener.listen(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._run, name=f"cpkv shares memory as {token}", daemon=True)
        self._thread.start()

    def publish(self, region: Region) -> None:
        """Let senders write into `region`, if it lies in a sealed memory file; else it is a source only."""
        segment = find_segment(region)
        if segment is not None:
            with self._let_go:
                self._segments[region] = segment

    def withdraw(self, region: Region) -> None:
        """Undo `publish`, and wait until every sender that mapped the region has said that it writes there no more.

        Raises:
            TransferError: some have not in time; it can be called again.
        """
        self._withdraw([region])

    def _withdraw(self, regions: list[Region]) -> None:
        with self._let_go:
            for region in regions:
                if segment := self._segments.pop(region, None):
                    os.close(segment.descriptor)
                for sender in self._holders([region]):
                    # One that reads nothing does not let go; one that has ended is dropped by the thread.
                    with contextlib.suppress(OSError):
                        sender.link.send(Withdraw(region.address, region.length))
            if not self._let_go.wait_for(lambda: not self._holders(regions), self._silence_s):
                pids = ", ".join(str(sender.pid) for sender in self._holders(regions))
                raise TransferError(
                    f"process {pids} has not let go of {listed(regions)} within {self._silence_s:g} s: it is stopped, "
                    "and can write there when it goes on; keep that memory out of use, and try again when the process "
                    "has ended"
                )

    def _holders(self, regions: list[Region]) -> list[_Sender]:
        return [sender for sender in self._senders.values() if not sender.given.isdisjoint(regions)]

    def close(self) -> None:
        """Take all memory back, and end all connections and the thread."""
        try:
            self._withdraw(list(self._segments))
        except TransferError as error:
            LOG.warning("%s", error)
        self._bell.ring_to_stop()
        self._thread.join()
        self._bell.close()

    def _run(self) -> None:
        poller = select.poll()
        for listened in (self._bell, self._listener):
            poller.register(listened, select.POLLIN)
        back_off_until = 0.0
        with self._listener:
            while True:
                left_s = back_off_until - time.monotonic()
                if back_off_until and left_s <= 0:
                    back_off_until = 0.0
                    poller.register(self._listener, select.POLLIN)
                ready = dict(poller.poll(left_s * 1e3 if back_off_until else None))
                if self._bell.fileno() in ready:
                    break
                if self._listener.fileno() in ready and not self._accept(poller):
                    poller.unregister(self._listener)
                    back_off_until = time.monotonic() + BACK_OFF_S
                for number in ready.keys() & self._senders.keys():
                    if not self._serve(self._senders[number]):
                        poller.unregister(number)
                        self._drop(number)
        for number in list(self._senders):
            self._drop(number)

    def _accept(self, poller: select.poll) -> bool:
        """Take one caller; False when the system has no descriptor left."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return True
        except OSError as error:
            LOG.warning("cannot accept a sender: %s", error)
            return False
        connection.setblocking(False)
        sender = _Sender(PacketSocket(connection, ToReceiver))
        if len(self._senders) >= MAX_CONNECTIONS:
            LOG.warning("more than %d senders; closed that of process %d", MAX_CONNECTIONS, sender.pid)
            connection.close()
            return True
        with self._let_go:
            self._senders[connection.fileno()] = sender
        poller.register(connection, select.POLLIN)
        return True

    def _drop(self, number: int) -> None:
        with self._let_go:
            # A sender's socket ends after its last write, or with its process.
            self._senders.pop(number).link.socket.close()
            self._let_go.notify_all()

    def _serve(self, sender: _Sender) -> bool:
        """Answer one packet; False when the connection is to end."""
        try:
            packet, _ = sender.link.receive()
            if isinstance(packet, Gone):
                with self._let_go:
                    sender.given.discard(Region(packet.address, packet.length))
                    self._let_go.notify_all()
            elif isinstance(packet, Call):
                self._welcome(sender, packet)
            else:
                self._answer(sender, packet)
        except BlockingIOError:
            return True
        except OSError:
            # It has ended.
            return False
        except TransferError as error:
            LOG.warning("closed the connection of process %d: %s", sender.pid, error)
            return False
        return True

    def _welcome(self, sender: _Sender, call: Call) -> None:
        sender.link.check_user()
        if call.version != SHM_VERSION:
            cause = f"shm version is {call.version} there and {SHM_VERSION} here; run the same cpkv on both"
            sender.link.send(Refused(cause))
            raise HandshakeError(cause)
        sender.welcome = True

    def _answer(self, sender: _Sender, ask: Ask) -> None:
        if not sender.welcome:
            raise ProtocolError("it asked for memory before it called")
        with self._let_go:
            region = next((one for one in self._segments if one.holds(ask.address, ask.length)), None)
            if region is None:
                asked = str(Region(ask.address, ask.length))
                cause = (
                    f"{asked} is not inside one region that is registered there and lies in memory of allocate_target"
                )
                sender.link.send(Refused(cause[:MAX_CAUSE_CHARS]))
                return
            segment = self._segments[region]
            sender.given.add(region)
            packet = SegmentPacket(region.address, region.length, segment.offset)
            sender.link.send(packet, segment.descriptor)
