"""Plain sockets: writes travel over one connection per peer and land where the peer has registered memory.

- A write is checked by the receiver too, against ONE region that is registered there at that moment.
- `unregister` and `close` are fences at the receiver: when they return, nothing is written into that memory any more.
- A write that was reported as failed may still land at the peer, with the bytes that the source held when it was sent:
  what is on its way lands until the peer hears that the connection was reset, or withdraws the memory. The source is
  not read after "failed".
- The port is a free one on `host` alone. Beyond loopback a secret is needed, proved by both ends before anything else;
  the bytes themselves are neither encrypted nor signed.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import ClassVar

from cpkv.errors import ConfigError, HandshakeError, ProtocolError, TransferError
from cpkv.protocol.sealing import check_secret
from cpkv.transfer.backend import Region, Run
from cpkv.transfer.bounded_socket import BoundedSocket
from cpkv.transfer.peer_address import FROM_HANDSHAKE, resolve_peer
from cpkv.transfer.peer_thread import Outcomes, PeerThread, ThreadedBackend
from cpkv.transfer.tcp_receiver import TcpReceiver, set_options, skip_bytes, view_of
from cpkv.transfer.tcp_wire import ANSWER, MAX_CAUSE_BYTES, pack_write, prove, split_session_id

# What the kernel takes in one call (UIO_MAXIOV).
_MAX_VECTORS = 1024


class TcpBackend(ThreadedBackend):
    """A listener of this process and a connection to each peer. Linux.

    Args:
        host: the address of this machine to listen on, under which peers reach it.
        max_outstanding_per_peer: writes in flight at one peer; each carries up to 1,024 runs and 1 MiB.
        transfer_timeout_s: a peer that is silent for half of it, at first contact or later, fails its transfers.
        secret: the same at all ends, 16 characters or more; may be empty on loopback only.

    Raises:
        ConfigError: the secret is missing or too short, or a number is out of range.
        TransferError: this machine cannot listen on `host`.
    """

    name: ClassVar[str] = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        max_outstanding_per_peer: int = 16,
        transfer_timeout_s: float = 10.0,
        secret: str = "",
    ) -> None:
        super().__init__(max_outstanding_per_peer, transfer_timeout_s)
        check_secret(host, secret)
        self._secret = secret
        # Swapped as a whole, since the threads of peers look at it.
        self._views: tuple[tuple[Region, memoryview], ...] = ()
        self._receiver = TcpReceiver(host, secret, self._silence_s)
        self.session_id = f"[{host}]:{self._receiver.port}" if ":" in host else f"{host}:{self._receiver.port}"

    @classmethod
    def why_not(cls) -> str | None:
        """Say why sockets cannot be used here; None on Linux."""
        return None if sys.platform == "linux" else f"tcp needs Linux (eventfd), and this is {sys.platform}; use nixl"

    def _register_memory(self, region: Region) -> None:
        self._views = (*self._views, (region, view_of(region)))
        self._receiver.publish(region)

    def _unregister_memory(self, region: Region) -> None:
        self._receiver.withdraw(region)
        self._views = tuple(item for item in self._views if item[0] != region)

    def _open_peer(self, session_id: str) -> PeerThread:
        try:
            address = split_session_id(session_id)
        except ConfigError as error:
            raise TransferError(f"peer {session_id} has no address: {error}; {FROM_HANDSHAKE}") from error
        return _TcpPeer(session_id, address, self._outcomes, self._silence_s, self._secret, self._sources)

    def _sources(self, runs: list[Run]) -> list[memoryview]:
        """The bytes that runs read; any thread may ask, while the transfer is pending."""
        sources = []
        start = end = 0
        view = memoryview(b"")
        for source, _, length in runs:
            if not (start <= source and source + length <= end):
                region, view = next(item for item in self._views if item[0].holds(source, length))
                start, end = region.address, region.end
            sources.append(view[source - start : source - start + length])
        return sources

    def _close_engine(self) -> None:
        super()._close_engine()
        self._receiver.close()
        self._views = ()


class _TcpPeer(PeerThread):
    """Sends writes to one peer and takes its answers."""

    def __init__(
        self,
        session_id: str,
        address: tuple[str, int],
        outcomes: Outcomes,
        silence_s: float,
        secret: str,
        sources: Callable[[list[Run]], list[memoryview]],
    ) -> None:
        self._address = address
        self._secret = secret
        self._sources = sources
        # Bytes of writes begun that the kernel has not taken yet.
        self._unsent: list[memoryview] = []
        self._answers = bytearray()
        super().__init__(session_id, outcomes, silence_s)

    def _serve(self) -> None:
        family, kind, protocol, address = resolve_peer(self.session_id, *self._address)
        with socket.socket(family, kind, protocol) as connection:
            set_options(connection, self.silence_s)
            # Closing resets the connection: what the peer has not taken by then was reported as failed.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link = BoundedSocket(connection, self._bell)
            self._connect(link, address)
            self._carry(link)

    def _connect(self, link: BoundedSocket, address: tuple) -> None:
        deadline = time.monotonic() + self.silence_s
        code = link.socket.connect_ex(address)
        if code == errno.EINPROGRESS:
            while not link.wait(select.POLLOUT, deadline):
                continue
            code = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise TransferError(f"peer {self.session_id} is not there ({os.strerror(code)}); {FROM_HANDSHAKE}")
        try:
            prove(link, "client", self._secret, deadline)
        except HandshakeError as error:
            raise TransferError(f"peer {self.session_id} is refused: {error}") from error

    def _carry(self, link: BoundedSocket) -> None:
        connection = link.socket
        moved = time.monotonic()
        while True:
            if not self._begun:
                moved = time.monotonic()
            self._begin_writes()
            try:
                while self._unsent:
                    sent = connection.sendmsg(self._unsent[:_MAX_VECTORS])
                    self._unsent = skip_bytes(self._unsent, sent)
                    moved = time.monotonic()
                    self._begin_writes()
            except BlockingIOError:
                pass
            wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            events = link.wait(wanted, moved + self.silence_s if self._begun else None)
            if events & ~select.POLLOUT:
                self._take_answers(connection)
                moved = time.monotonic()

    def _begin_writes(self) -> None:
        """Queued writes become bytes to send, so many as one call takes."""
        while self._queue and len(self._unsent) < _MAX_VECTORS:
            write = self._queue[0]
            self._unsent += [memoryview(pack_write(write.handle, write.runs)), *self._sources(write.runs)]
            self._begun.append(write.handle)
            self._queue.popleft()

    def _take_answers(self, connection: socket.socket) -> None:
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionResetError("it closed the connection")
        self._answers += part
        while len(self._answers) >= ANSWER.size:
            handle, length = ANSWER.unpack_from(self._answers)
            if length > MAX_CAUSE_BYTES or not self._begun or handle != self._begun[0]:
                raise ProtocolError(f"peer {self.session_id} answered what it was not asked; run the same cpkv on both")
            end = ANSWER.size + length
            if len(self._answers) < end:
                return
            cause = self._answers[ANSWER.size : end].decode(errors="replace")
            del self._answers[:end]
            self._end_write(handle, f"peer {self.session_id} refused the write: {cause}" if cause else "")

    def _in_words(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return (
                f"peer {self.session_id} has not answered for {self.silence_s:g} s: it is stopped or cut off; see to "
                f"it, or raise transfer_timeout_s above {2 * self.silence_s:g}; what was sent before can still land"
            )
        return (
            f"the connection to peer {self.session_id} broke ({error.strerror or error}): it has died, was closed, or "
            "is cut off"
        )
