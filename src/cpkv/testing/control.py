"""Both sides of control connections for tests: a client that writes whatever bytes it likes, and a handler to serve."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from cpkv.errors import HandshakeError, PlanError
from cpkv.protocol.frames import LENGTH, frame_of
from cpkv.protocol.messages import DecodedTokens, DecodeStep, Done, FinishTransfer, FromDecode, TransferComplete
from cpkv.protocol.sealing import GREETING_BYTES, FrameSeal, Greeting
from cpkv.transfer.channel import Channel
from cpkv.transfer.server import Connection

PATIENCE_S = 20.0
HUGE = DecodedTokens((), (bytes(24 << 20),))


class RawClient:
    """A client on loopback that has greeted and proved its secret; afterwards its socket is the test's.

    Attributes:
        socket: connected, with a timeout of 20 s.
        seal: of what the client sends next, and receives.
        channel: of the same socket and seal.
    """

    def __init__(self, port: int, secret: str, *, receive_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", port))
        ours = Greeting.of(secret)
        self.socket.sendall(ours.encode())
        self.seal = FrameSeal(secret, "client", ours, Greeting.decode(self.read(GREETING_BYTES)))
        self.socket.sendall(frame_of(self.seal, b""))
        self.seal.check(b"", self.read(LENGTH.size + self.seal.num_bytes)[LENGTH.size :])
        self.channel = Channel(self.socket, FromDecode, "the server", seal=self.seal)

    def frame(self, message: Any) -> bytes:
        """The bytes of the next message."""
        return frame_of(self.seal, msgspec.msgpack.encode(message))

    def ask(self, message: Any) -> Any:
        """Send a message and wait for its answer."""
        self.channel.send(message)
        return self.channel.receive(PATIENCE_S)

    def read(self, size: int) -> bytes:
        """So many bytes, or fewer when the connection ends before."""
        return read(self.socket, size)

    def is_closed(self) -> bool:
        """Waits until the server closes the connection; False if it does not in 20 s."""
        return is_closed(self.socket)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def read(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer when the connection ends before."""
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def is_closed(connection: socket.socket) -> bool:
    """Reads what still comes until the peer closes the connection; False if it does not in time."""
    try:
        while connection.recv(1 << 20):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


class StubHandler:
    """Answers `ToDecode` messages, and notes everything that it sees.

    FinishTransfer is counted by connection, a DecodeStep gets 24 MiB, and a ReleaseRequest of certain names goes wrong:
    plan, bug, handshake (errors of that kind), unknown (an answer that is no message), too large; wait blocks until
    `go_on` is set. All else is Done.
    """

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.closed_peers: queue.Queue[Connection] = queue.Queue()
        self.ticks: queue.Queue[float] = queue.Queue(maxsize=1000)
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self._named: dict[str, Callable[[], Any]] = {
            "plan": lambda: _raise(PlanError("the plan is wrong")),
            "bug": lambda: _raise(ZeroDivisionError("by zero")),
            "handshake": lambda: _raise(HandshakeError("the pools differ")),
            "unknown": object,
            "too large": lambda: DecodedTokens((), (bytes(65 << 20),)),
            "wait": self._wait,
        }

    def answer(self, connection: Connection, message: Any) -> Any:
        """See the class."""
        self.seen.append(message)
        if isinstance(message, FinishTransfer):
            connection.state = (connection.state or 0) + 1
            return TransferComplete(message.request_id, connection.state)
        if isinstance(message, DecodeStep):
            return HUGE
        return self._named.get(getattr(message, "request_id", ""), Done)()

    def _wait(self) -> Done:
        self.entered.set()
        self.go_on.wait(PATIENCE_S)
        return Done()

    def closed(self, connection: Connection) -> None:
        """Note it."""
        self.closed_peers.put(connection)

    def tick(self, now_s: float) -> None:
        """Note it, the first thousand times."""
        if not self.ticks.full():
            self.ticks.put(now_s)


def _raise(error: Exception) -> Any:
    raise error
