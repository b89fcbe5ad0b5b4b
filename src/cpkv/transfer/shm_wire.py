"""What the two ends of the `shm` back end say to each other, over a Unix socket that keeps packets apart.

sender                                  receiver
  Call ------------------------------>    of the same user, host and version?
  Ask for an address ---------------->
  <--------------- Segment + descriptor   or Refused with the cause
  (writes into the mapped memory)
  <-------------------------- Withdraw    the receiver takes a region back
  Gone ------------------------------>    it will not be written to any more
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Any

import msgspec

from cpkv.errors import HandshakeError, ProtocolError
from cpkv.pool.sealed_segment import host_identity

SHM_VERSION = 1
MAX_PACKET_BYTES = 4096
MAX_CAUSE_CHARS = 1000
_CREDENTIALS = struct.Struct("3i")
_PREFIX = "shm:"


class Call(msgspec.Struct, frozen=True, tag=True):
    """First packet of a sender."""

    version: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Which region holds these bytes?"""

    address: int
    length: int


class Segment(msgspec.Struct, frozen=True, tag=True):
    """A region, which starts at `offset` of the memory file whose descriptor comes along."""

    address: int
    length: int
    offset: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """No region, and why."""

    cause: str


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Write no more into this region."""

    address: int
    length: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """The region is not written to any more."""

    address: int
    length: int


ToReceiver = Call | Ask | Gone
ToSender = Segment | Refused | Withdraw


class PacketSocket:
    """One end of a connection; packets are sent from any thread and received by one.

    Args:
        connection: a Unix socket of type SOCK_SEQPACKET, non-blocking.
        receives: the union of packets that this end accepts.
    """

    def __init__(self, connection: socket.socket, receives: Any) -> None:
        self.socket = connection
        self._decoder = msgspec.msgpack.Decoder(receives)

    def peer(self) -> tuple[int, int]:
        """Process and user at the other end."""
        packed = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(packed)
        return pid, uid

    def check_user(self) -> None:
        """Raise HandshakeError unless the other end runs as our user."""
        pid, uid = self.peer()
        if uid != os.geteuid():
            raise HandshakeError(
                f"process {pid} runs as user {uid} and this one as {os.geteuid()}; shm works between processes of one "
                "user, tcp between all"
            )

    def send(self, packet: ToReceiver | ToSender, descriptor: int | None = None) -> None:
        """Send one packet. Raises OSError when the peer is gone, or BlockingIOError when it reads nothing."""
        content = msgspec.msgpack.encode(packet)
        socket.send_fds(self.socket, [content], [] if descriptor is None else [descriptor])

    def receive(self) -> tuple[Any, int | None]:
        """One packet, and the descriptor that came along, which is the caller's to close.

        Raises:
            BlockingIOError: there is none yet.
            ConnectionResetError: the peer has ended.
            ProtocolError: it is malformed.
        """
        # Room for a second descriptor, so that too many show as a count.
        room = socket.CMSG_LEN(2 * array.array("i").itemsize)
        content, ancillary, flags, _ = self.socket.recvmsg(MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        try:
            if not content:
                raise ConnectionResetError("it closed the connection")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError(f"it sent a packet of more than {MAX_PACKET_BYTES} bytes or 2 descriptors")
            packet = self._decoder.decode(content)
            if len(descriptors) != isinstance(packet, Segment):
                raise ProtocolError(f"a {type(packet).__name__} came with {len(descriptors)} descriptors")
            return packet, descriptors.pop() if descriptors else None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"it sent a packet that is none of those expected here: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def host_word() -> str:
    """The same for all processes that reach each other's sockets: the running system and its network namespace."""
    return f"{host_identity()}/{os.stat('/proc/self/ns/net').st_ino}"


def make_session_id(token: str) -> str:
    """Names the engine whose socket has this token."""
    return f"{_PREFIX}{host_word()}:{token}"


def socket_address(session_id: str) -> bytes:
    """Where the engine of a session listens: an abstract Unix socket, which goes with its process.

    Raises:
        HandshakeError: the id is none of this back end, or of an engine that cannot share memory with us.
    """
    host, _, token = session_id.removeprefix(_PREFIX).rpartition(":")
    if not session_id.startswith(_PREFIX) or not host or not token.isalnum():
        raise HandshakeError("has no address of shared memory; start it, or take its id from the handshake")
    ours = host_word()
    if host != ours:
        system, _, network = host.partition("/")
        here, _, network_here = ours.partition("/")
        if system != here:
            raise HandshakeError(
                f"runs on another host (system {system} there, {here} here), and shm works within one; use --transfer "
                "tcp or mooncake"
            )
        raise HandshakeError(
            f"runs in another network namespace of this host ({network} there, {network_here} here), as containers do, "
            "and shm works within one; use --transfer tcp or mooncake"
        )
    return address_of_token(token)


def address_of_token(token: str) -> bytes:
    """The abstract address of a token."""
    return f"\0cpkv-shm-{token}".encode()
