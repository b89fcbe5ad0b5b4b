"""Shared memory of one host: the sender maps the receiver's memory and copies into it; no byte passes through a socket.

- Only memory from `allocate_target` can be written to by peers; other memory can be registered as a source.
- Both ends run as one user, on one host and in one network namespace; the session id says where, and a peer elsewhere
  is refused with the reason.
- A peer that died is seen by its socket's end. What is mapped stays valid: its size is sealed, so nothing can fault.
- A peer that is stopped still takes writes, since it has no part in them; at first contact it fails them in time.
- `unregister` and `close` are fences for senders that run: each is told, finishes the write that it is in, and answers.
  Nothing can take a mapping away from a process. One that is stopped in the middle of a write finishes it when it goes
  on: `unregister` says so with an error that names the process, `close` in the log, and the memory must stay out of
  use until that process has ended. A process of the same user that breaks the protocol could write at any time.
- A write that was reported as failed has landed in part or not at all, and will not land later.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from cpkv.errors import HandshakeError, ProtocolError, TransferError
from cpkv.transfer.backend import Region
from cpkv.transfer.bounded_socket import BoundedSocket
from cpkv.transfer.peer_thread import Outcomes, PeerThread, ThreadedBackend, Write
from cpkv.transfer.shm_receiver import ShmReceiver
from cpkv.transfer.shm_segment import address_of, allocate_segment, map_segment, why_not_segment, why_not_shared
from cpkv.transfer.shm_wire import (
    SHM_VERSION,
    Ask,
    Call,
    Gone,
    PacketSocket,
    Refused,
    Segment,
    ToSender,
    socket_address,
)

# Giving the interpreter's lock up for a copy that takes microseconds can cost milliseconds until it is had again.
_KEEP_LOCK_BYTES = 1 << 16


class ShmBackend(ThreadedBackend):
    """Copies into memory that processes of this host share. Linux.

    Args:
        max_outstanding_per_peer: writes in flight at one peer; each carries up to 1,024 runs and 1 MiB.
        transfer_timeout_s: a peer that is silent for half of it, when it is asked for memory, fails its transfers;
            `unregister` and `close` wait as long for senders.

    Raises:
        ConfigError: a number is out of range.
        TransferError: this system cannot share memory.
    """

    name: ClassVar[str] = "shm"

    def __init__(self, max_outstanding_per_peer: int = 16, transfer_timeout_s: float = 10.0) -> None:
        super().__init__(max_outstanding_per_peer, transfer_timeout_s)
        self._receiver = ShmReceiver(self._silence_s)
        self.session_id = self._receiver.session_id

    @classmethod
    def why_not(cls) -> str | None:
        """Say why memory cannot be shared here, with the remedy; None when it can. Tries it."""
        return why_not_shared()

    def allocate_target(self, num_bytes: int) -> memoryview:
        """Memory that peers can write to: see `TransferBackend.allocate_target`."""
        return allocate_segment(num_bytes)

    def _register_memory(self, region: Region) -> None:
        self._receiver.publish(region)

    def _unregister_memory(self, region: Region) -> None:
        self._receiver.withdraw(region)

    def _open_peer(self, session_id: str) -> PeerThread:
        try:
            return _ShmPeer(session_id, socket_address(session_id), self._outcomes, self._silence_s)
        except HandshakeError as error:
            raise TransferError(f"peer {session_id} {error}") from error

    def _close_engine(self) -> None:
        super()._close_engine()
        self._receiver.close()


class _Mapped(NamedTuple):
    """A region of the peer, and where its first byte lies in this process."""

    region: Region
    here: int
    memory: mmap.mmap


class _ShmPeer(PeerThread):
    """Maps what one peer hands out, and copies into it."""

    def __init__(self, session_id: str, address: bytes, outcomes: Outcomes, silence_s: float) -> None:
        self._address = address
        self._mapped: list[_Mapped] = []
        # Counts regions that the peer took back.
        self._withdrawn = 0
        self._copy_holding, self._copy_releasing = _load_copies()
        super().__init__(session_id, outcomes, silence_s)

    def _serve(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                self._connect(connection)
                link = BoundedSocket(connection, self._bell)
                packets = PacketSocket(connection, ToSender)
                packets.check_user()
                packets.send(Call(SHM_VERSION))
                while True:
                    if link.look(select.POLLIN) if self._queue else link.wait(select.POLLIN, None):
                        self._take_packet(packets, asked=False)
                    elif self._queue:
                        self._carry_out(link, packets)
        finally:
            self._mapped.clear()

    def _connect(self, connection: socket.socket) -> None:
        # A Unix socket is connected at once, or its listener has a full queue.
        connection.setblocking(False)
        try:
            connection.connect(self._address)
        except BlockingIOError as error:
            raise TimeoutError from error
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                raise
            raise TransferError(
                f"peer {self.session_id} is not there: it is closed or never existed; take its id from the handshake"
            ) from error

    def _carry_out(self, link: BoundedSocket, packets: PacketSocket) -> None:
        write = self._queue[0]
        self._begun.append(write.handle)
        self._queue.popleft()
        cause = ""
        try:
            self._copy(write, link, packets)
        except _RefusedError as error:
            cause = f"peer {self.session_id} refused the write: {error}"
        self._end_write(write.handle, cause)

    def _copy(self, write: Write, link: BoundedSocket, packets: PacketSocket) -> None:
        while True:
            withdrawn = self._withdrawn
            moves = self._place(write, link, packets)
            # A region may have been taken back while another one was asked for.
            if withdrawn == self._withdrawn:
                break
        for target, source, length in moves:
            copy = self._copy_holding if length <= _KEEP_LOCK_BYTES else self._copy_releasing
            copy(target, source, length)

    def _place(self, write: Write, link: BoundedSocket, packets: PacketSocket) -> list[tuple[int, int, int]]:
        """What to copy: (target here, source, length) per run."""
        moves = []
        start = end = shift = 0
        for source, target, length in write.runs:
            if not (start <= target and target + length <= end):
                region, here, _ = self._held(target, length) or self._ask(target, length, link, packets)
                start, end, shift = region.address, region.end, here - region.address
            moves.append((target + shift, source, length))
        return moves

    def _held(self, target: int, length: int) -> _Mapped | None:
        return next((mapped for mapped in self._mapped if mapped.region.holds(target, length)), None)

    def _ask(self, target: int, length: int, link: BoundedSocket, packets: PacketSocket) -> _Mapped:
        """Have the peer hand out the region that holds a target, and map it."""
        packets.send(Ask(target, length))
        deadline = time.monotonic() + self.silence_s
        while True:
            if link.wait(select.POLLIN, deadline) and self._take_packet(packets, asked=True):
                if mapped := self._held(target, length):
                    return mapped
                raise ProtocolError(f"peer {self.session_id} handed out a region that was not asked for")

    def _take_packet(self, packets: PacketSocket, *, asked: bool) -> bool:
        """Do what one packet says; True if it was a region that we asked for."""
        packet, descriptor = packets.receive()
        if descriptor is not None:
            try:
                if not asked:
                    raise ProtocolError(f"peer {self.session_id} handed out a region that was not asked for")
                self._map(packet, descriptor)
            finally:
                os.close(descriptor)
            return True
        if isinstance(packet, Refused):
            if asked:
                raise _RefusedError(packet.cause)
            raise TransferError(f"peer {self.session_id} refused us: {packet.cause}")
        region = Region(packet.address, packet.length)
        self._mapped = [mapped for mapped in self._mapped if mapped.region != region]
        self._withdrawn += 1
        packets.send(Gone(packet.address, packet.length))
        return False

    def _map(self, packet: Segment, descriptor: int) -> None:
        if reason := why_not_segment(descriptor, packet.offset + packet.length):
            raise TransferError(f"the memory that peer {self.session_id} handed out cannot be mapped: {reason}")
        memory = map_segment(descriptor)
        region = Region(packet.address, packet.length)
        self._mapped.append(_Mapped(region, address_of(memory) + packet.offset, memory))

    def _in_words(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return (
                f"peer {self.session_id} has not answered for {self.silence_s:g} s: it is stopped; see to it, or raise "
                f"transfer_timeout_s above {2 * self.silence_s:g}"
            )
        return f"the connection to peer {self.session_id} broke ({error.strerror or error}): it has died or was closed"


class _RefusedError(Exception):
    """The peer hands no memory out for one write; the others go on."""


def _load_copies() -> tuple[Callable[[int, int, int], None], Callable[[int, int, int], None]]:
    """Two forms of memmove(target, source, bytes): one keeps the interpreter's lock, one gives it up."""
    copies = []
    for library in (ctypes.PyDLL(None), ctypes.CDLL(None)):
        library.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        library.memmove.restype = None
        copies.append(library.memmove)
    return copies[0], copies[1]
