"""One peer of a `MessageServer`: its socket, what has come and was not taken, what it has not read, and until when."""

from __future__ import annotations

import selectors
import socket
from dataclasses import dataclass

from cpkv.errors import ProtocolError
from cpkv.protocol.frames import ServerFrames
from cpkv.protocol.messages import MAX_FRAME_BYTES

READ_BYTES = 64 << 10


@dataclass(frozen=True)
class ServerLimits:
    """What a peer may take of a server.

    Attributes:
        max_connections: more are closed at once.
        greeting_s: until a connection has greeted and proved the secret.
        frame_s: until a frame that has begun is whole; also how long a peer may read nothing of its answers.
        max_frame_bytes: of one message, in either direction.
        unread_bytes: of answers that a peer has not read.
    """

    max_connections: int = 256
    greeting_s: float = 5.0
    frame_s: float = 10.0
    max_frame_bytes: int = MAX_FRAME_BYTES
    unread_bytes: int = 128 << 20


class PeerStream:
    """Reads and writes without blocking. Times are those of the server's clock, in seconds.

    Args:
        connection: just accepted; closed with the stream.
        secret: that the peer must prove; empty for none.
        limits: what the peer may take.
        now_s: the time.

    Attributes:
        ending: to be closed once its last answer has left; it is not read any more.
        watched: the events that a selector waits for.
    """

    def __init__(self, connection: socket.socket, secret: str, limits: ServerLimits, now_s: float) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._limits = limits
        self._frames = ServerFrames(secret, max_frame_bytes=limits.max_frame_bytes)
        self._unread = bytearray()
        self._accepted_s = now_s
        self._moved_s = now_s
        self._begun_s: float | None = None
        self.ending = False
        self.watched = 0
        self._queue(self._frames.greeting, now_s)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._connection.fileno()

    @property
    def proved(self) -> bool:
        """Whether it has greeted and proved the secret."""
        return self._frames.proved

    @property
    def has_frame(self) -> bool:
        """Whether `take` has something to say."""
        return not self.ending and self._frames.has_frame

    @property
    def is_over(self) -> bool:
        """Whether the last answer has left."""
        return self.ending and not self._unread

    @property
    def events(self) -> int:
        """What a selector should wait for; 0 for nothing. A peer is not read on while a frame of it waits."""
        reads = 0 if self.ending or self._frames.has_frame else selectors.EVENT_READ
        return reads | (selectors.EVENT_WRITE if self._unread else 0)

    def read(self, now_s: float) -> None:
        """Take what has come.

        Raises:
            EOFError: the peer closed the connection.
            OSError: it is gone.
            HandshakeError: it does not greet as it must.
        """
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError("the connection was closed")
        answer = self._frames.feed(data)
        self._note_begun(now_s)
        if answer:
            self._queue(answer, now_s)

    def take(self, now_s: float) -> bytes:
        """The body of the frame that waits.

        Raises:
            ProtocolError: it is too large, or its seal is wrong.
        """
        body = self._frames.take()
        self._begun_s = None
        self._note_begun(now_s)
        return body

    def _note_begun(self, now_s: float) -> None:
        if not self._frames.begun:
            self._begun_s = None
        elif self._begun_s is None:
            self._begun_s = now_s

    def send(self, body: bytes, now_s: float) -> None:
        """Send a message, as far as the peer reads; the rest waits for `write`.

        Raises:
            OSError: the peer is gone.
            ProtocolError: the message is larger than a frame may be, or the peer has left too much unread.
        """
        self._queue(self._frames.frame(body), now_s)

    def _queue(self, frame: bytes, now_s: float) -> None:
        if not self._unread:
            self._moved_s = now_s
        self._unread += frame
        self.write(now_s)
        if len(self._unread) > self._limits.unread_bytes:
            raise ProtocolError(
                f"it left {len(self._unread)} bytes of answers unread, over the limit of {self._limits.unread_bytes}"
            )

    def write(self, now_s: float) -> None:
        """Send what waits, as far as the peer reads.

        Raises:
            OSError: the peer is gone.
        """
        try:
            with memoryview(self._unread) as waiting:
                sent = self._connection.send(waiting)
        except BlockingIOError:
            return
        del self._unread[:sent]
        self._moved_s = now_s

    @property
    def deadline_s(self) -> float:
        """When this peer is late, unless it does something until then; infinite for one of which nothing is awaited."""
        if not self.proved:
            return self._accepted_s + self._limits.greeting_s
        since = [self._begun_s] if self._begun_s is not None else []
        since += [self._moved_s] if self._unread else []
        return min(since, default=float("inf")) + self._limits.frame_s

    @property
    def lateness(self) -> str:
        """What a peer did not do until its deadline."""
        if not self.proved:
            return f"it had not greeted after {self._limits.greeting_s} s"
        if self._begun_s is None:
            return f"it read nothing of its answers for {self._limits.frame_s} s"
        return f"a frame that it began was not whole after {self._limits.frame_s} s"

    def close(self) -> None:
        """Close the connection; what waits is lost."""
        self._connection.close()
