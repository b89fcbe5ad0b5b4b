"""Frames over a socket: four bytes of length, then one msgpack message of a known type. Nothing is unpickled.

| length, big endian uint32 | msgpack of one tagged message |
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgspec

from cpkv.errors import ProtocolError, TransferError
from cpkv.protocol.messages import MAX_FRAME_BYTES

_LENGTH = struct.Struct(">I")


class Channel:
    """One end of a connection; owned by one thread at a time.

    Args:
        connection: a connected stream socket; closed with the channel.
        receives: the union of messages that this end accepts.
        peer: what is at the other end, for errors.
        max_frame_bytes: a longer frame is refused before it is read.
    """

    def __init__(
        self, connection: socket.socket, receives: Any, peer: str, *, max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.peer = peer
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._max_frame_bytes = max_frame_bytes
        self._broken = ""
        self._inside_frame = False

    def __repr__(self) -> str:
        """The peer."""
        return f"Channel(to {self.peer})"

    def fileno(self) -> int:
        """The socket's descriptor, for selectors; -1 once closed."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            TransferError: the peer is gone.
            ProtocolError: the message is larger than a frame may be.
        """
        self._refuse_broken()
        body = self._encoder.encode(message)
        if len(body) > self._max_frame_bytes:
            raise ProtocolError(
                f"a {type(message).__name__} of {len(body)} bytes is over the limit of {self._max_frame_bytes}"
            )
        try:
            self._connection.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise TransferError(f"{self.peer} is gone: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for one message.

        Raises:
            TransferError: the peer closed the connection or sent nothing in time.
            ProtocolError: the frame is too large or is none of the messages expected here.
        """
        self._refuse_broken()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            if length > self._max_frame_bytes:
                raise ProtocolError(
                    f"{self.peer} announced a frame of {length} bytes, over the limit of {self._max_frame_bytes}"
                )
            body = self._read(length, deadline)
            self._inside_frame = False
        except TimeoutError as error:
            if self._inside_frame:
                self._broken = "the rest of a frame that came too late would be taken for a new one"
            raise TransferError(f"{self.peer} sent no whole message for {timeout_s} s") from error
        except OSError as error:
            raise TransferError(f"{self.peer} is gone: {error}") from error
        finally:
            if self._connection.fileno() >= 0:
                self._connection.settimeout(None)
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"{self.peer} sent a message that is none of those expected here: {error}") from error

    def _refuse_broken(self) -> None:
        if self._broken:
            raise TransferError(f"the connection to {self.peer} cannot be used any more: {self._broken}")

    def _read(self, length: int, deadline: float | None) -> bytearray:
        body = bytearray(length)
        view = memoryview(body)
        filled = 0
        while filled < length:
            if deadline is not None:
                self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            count = self._connection.recv_into(view[filled:])
            if count == 0:
                raise TransferError(f"{self.peer} closed the connection")
            self._inside_frame = True
            filled += count
        return body

    def close(self) -> None:
        """Close the connection; calling it twice is harmless."""
        self._connection.close()


def connect(host: str, port: int, receives: Any, peer: str, *, timeout_s: float = 10.0) -> Channel:
    """Connect to a listening worker.

    Raises:
        TransferError: nobody listens there.
    """
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise TransferError(
            f"{peer} at {host}:{port} is not there: {error}; start it first, or give the port that it printed"
        ) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection, receives, peer)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        TransferError: the port is taken or the address is not ours.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise TransferError(f"cannot listen on {host}:{port}: {error}; give a free port, or 0 to take any") from error
    return listener
