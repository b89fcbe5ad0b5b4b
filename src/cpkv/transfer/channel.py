"""Frames over a socket, one message each. Nothing is unpickled.

A socket pair between a scheduler and its own worker needs no seal; over TCP both ends greet first and seal every frame
(`cpkv.protocol.sealing`).
"""

from __future__ import annotations

import select
import socket
import time
from typing import Any

import msgspec

from cpkv.errors import HandshakeError, ProtocolError, TransferError
from cpkv.protocol.frames import LENGTH, frame_of
from cpkv.protocol.messages import MAX_FRAME_BYTES
from cpkv.protocol.sealing import GREETING_BYTES, FrameSeal, Greeting, agree, check_magic, check_secret

SEND_TIMEOUT_S = 10.0
# A peer whose host vanished is noticed after 10 + 3 * 5 s when idle, after 20 s when something was sent to it.
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
UNACKNOWLEDGED_MS = 20_000


class Channel:
    """One end of a connection; owned by one thread at a time.

    Args:
        connection: a connected stream socket; closed with the channel.
        receives: the union of messages that this end accepts.
        peer: what is at the other end, for errors.
        max_frame_bytes: a longer frame is refused before it is read.
        seal: of this connection; None between processes that trust each other.
        send_timeout_s: how long one message may take to be sent; None for as long as it takes.
    """

    def __init__(
        self,
        connection: socket.socket,
        receives: Any,
        peer: str,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        seal: FrameSeal | None = None,
        send_timeout_s: float | None = None,
    ) -> None:
        self.peer = peer
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._max_frame_bytes = max_frame_bytes
        self._seal = seal
        self._send_timeout_s = send_timeout_s
        self._broken = ""
        self._inside_frame = False

    def __repr__(self) -> str:
        """The peer."""
        return f"Channel(to {self.peer})"

    def fileno(self) -> int:
        """The socket's descriptor, for selectors; -1 once closed."""
        return self._connection.fileno()

    def readable(self, timeout_s: float = 0.0) -> bool:
        """Whether something can be read, or the other end has closed; waits up to `timeout_s` seconds for it."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            TransferError: the peer is gone, or reads nothing.
            ProtocolError: the message is larger than a frame may be.
        """
        self._refuse_broken()
        body = self._encoder.encode(message)
        if len(body) > self._max_frame_bytes:
            raise ProtocolError(
                f"a {type(message).__name__} of {len(body)} bytes is over the limit of {self._max_frame_bytes}"
            )
        frame = LENGTH.pack(len(body)) + body if self._seal is None else frame_of(self._seal, body)
        try:
            self._connection.settimeout(self._send_timeout_s)
            self._connection.sendall(frame)
        except TimeoutError as error:
            self._broken = "a part of a message may have been sent"
            raise TransferError(f"{self.peer} did not read a message in {self._send_timeout_s} s") from error
        except OSError as error:
            raise TransferError(f"{self.peer} is gone: {error}") from error
        finally:
            self._wait_without_limit()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for one message.

        Raises:
            TransferError: the peer closed the connection or sent nothing in time.
            ProtocolError: the frame is too large, wrongly sealed, or none of the messages expected here.
        """
        self._refuse_broken()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            body = self._read_frame(deadline)
        except TimeoutError as error:
            if self._inside_frame:
                self._broken = "the rest of a frame that came too late would be taken for a new one"
            raise TransferError(f"{self.peer} sent no whole message for {timeout_s} s") from error
        except OSError as error:
            raise TransferError(f"{self.peer} is gone: {error}") from error
        finally:
            self._wait_without_limit()
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"{self.peer} sent a message that is none of those expected here: {error}") from error

    def _refuse_broken(self) -> None:
        if self._broken:
            raise TransferError(f"the connection to {self.peer} cannot be used any more: {self._broken}")

    def _wait_without_limit(self) -> None:
        if self._connection.fileno() >= 0:
            self._connection.settimeout(None)

    def _read_frame(self, deadline: float | None) -> bytearray:
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if length > self._max_frame_bytes:
            raise ProtocolError(
                f"{self.peer} announced a frame of {length} bytes, over the limit of {self._max_frame_bytes}"
            )
        mac = self._read(0 if self._seal is None else self._seal.num_bytes, deadline)
        body = self._read(length, deadline)
        self._inside_frame = False
        if self._seal is not None:
            try:
                self._seal.check(body, mac)
            except ProtocolError as error:
                self._broken = "somebody else may have sent a part of it"
                raise ProtocolError(f"{self.peer}: {error}") from error
        return body

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


def connect(host: str, port: int, receives: Any, peer: str, *, secret: str = "", timeout_s: float = 10.0) -> Channel:
    """Connect to a `MessageServer`, and greet it.

    Args:
        host: where it listens.
        port: its port.
        receives: the union of messages that it may send.
        peer: what it is, for errors.
        secret: shared with it; empty only on this host.
        timeout_s: until it has greeted.

    Raises:
        ConfigError: the secret is too short, or missing for another host.
        TransferError: nobody listens there.
        HandshakeError: it does not greet in time, is not cpkv, or has another version or secret.
    """
    check_secret(host, secret)
    deadline = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise TransferError(
            f"{peer} at {host}:{port} is not there: {error}; start it first, or give the port that it printed"
        ) from error
    try:
        keep_alive(connection)
        seal = _shake_hands(connection, secret, deadline)
        connection.settimeout(None)
    except BaseException as error:
        connection.close()
        if isinstance(error, HandshakeError):
            raise HandshakeError(f"the handshake with {peer} at {host}:{port} failed: {error}") from error
        raise
    return Channel(connection, receives, peer, seal=seal, send_timeout_s=SEND_TIMEOUT_S)


def _shake_hands(connection: socket.socket, secret: str, deadline: float) -> FrameSeal:
    """Exchange greetings, then prove the secret.

    The client proves first: a stranger who calls gets nothing to try secrets on.
    """
    ours = Greeting.of(secret)
    meaning = "it gave up before it greeted: it has too many connections, or another program has that port"
    try:
        connection.sendall(ours.encode())
        received = b""
        while len(received) < GREETING_BYTES:
            received += _read_some(connection, GREETING_BYTES - len(received), deadline)
            check_magic(received)
        theirs = Greeting.decode(received)
        agree(ours, theirs)
        meaning = "the secret is not that of this run; start both ends with the same" if secret else "its log says why"
        seal = FrameSeal(secret, "client", ours, theirs)
        proof, proof_bytes = b"", LENGTH.size + seal.num_bytes
        connection.sendall(frame_of(seal, b""))
        while len(proof) < proof_bytes:
            proof += _read_some(connection, proof_bytes - len(proof), deadline)
        if any(proof[: LENGTH.size]):
            raise ProtocolError("a message came before the empty frame that proves the secret")
        seal.check(b"", proof[LENGTH.size :])
    except TimeoutError as error:
        raise HandshakeError(
            "nothing came in time: it is stopped or busy, or another program has that port; wait, or give its port"
        ) from error
    except (OSError, EOFError, ProtocolError) as error:
        raise HandshakeError(f"{meaning} ({error})") from error
    return seal


def _read_some(connection: socket.socket, size: int, deadline: float) -> bytes:
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
    if not (data := connection.recv(size)):
        raise EOFError("it closed the connection")
    return data


def keep_alive(connection: socket.socket) -> None:
    """Send small frames at once, and let a connection end whose other end has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


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
