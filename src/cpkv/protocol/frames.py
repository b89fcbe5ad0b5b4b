"""Frames as bytes, without a socket: the listening end of a connection, fed with whatever arrives.

| length of the body, big endian uint32 | seal, 32 bytes or none | body: msgpack of one tagged message |
"""

from __future__ import annotations

import struct

from cpkv.errors import HandshakeError, ProtocolError
from cpkv.protocol.messages import MAX_FRAME_BYTES
from cpkv.protocol.sealing import GREETING_BYTES, FrameSeal, Greeting, agree, check_magic

LENGTH = struct.Struct(">I")


def frame_of(seal: FrameSeal, body: bytes) -> bytes:
    """One frame, ready to be sent."""
    return b"".join((LENGTH.pack(len(body)), seal.seal(body), body))


class ServerFrames:
    """What one client sends, from its greeting on, cut into bodies of messages.

    Memory is taken for bytes that have come, never for those that were announced.

    Args:
        secret: that the client must prove; empty for none.
        max_frame_bytes: a longer frame is refused as soon as its length is known.
    """

    def __init__(self, secret: str, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._secret = secret
        self._max_frame_bytes = max_frame_bytes
        self._ours = Greeting.of(secret)
        self._seal: FrameSeal | None = None
        self._received = bytearray()
        self.proved = False

    @property
    def greeting(self) -> bytes:
        """What must be sent first."""
        return self._ours.encode()

    @property
    def begun(self) -> bool:
        """Whether a part of something that is not whole yet has come."""
        return bool(self._received) and not self.has_frame

    @property
    def has_frame(self) -> bool:
        """Whether `take` has something to say: a whole frame, or why there will be none."""
        if not self.proved or len(self._received) < LENGTH.size:
            return False
        (length,) = LENGTH.unpack_from(self._received)
        return length > self._max_frame_bytes or len(self._received) >= self._body_start + length

    def feed(self, data: bytes) -> bytes:
        """Take what has come; returns what must be sent back at once.

        Raises:
            HandshakeError: it is no greeting, one that this end does not agree with, or no proof of the secret.
        """
        self._received += data
        if self._seal is None and not self._greet():
            return b""
        if self.proved or not self._prove():
            return b""
        return self.frame(b"")

    def _greet(self) -> bool:
        check_magic(bytes(self._received[:GREETING_BYTES]))
        if len(self._received) < GREETING_BYTES:
            return False
        theirs = Greeting.decode(bytes(self._received[:GREETING_BYTES]))
        agree(self._ours, theirs)
        self._seal = FrameSeal(self._secret, "server", self._ours, theirs)
        del self._received[:GREETING_BYTES]
        return True

    def _prove(self) -> bool:
        # Looked at before it is whole, so that nobody can make this end keep a frame without the secret.
        if any(self._received[: LENGTH.size]):
            raise HandshakeError("it sent a message before the empty frame that proves the secret")
        if len(self._received) < self._body_start:
            return False
        try:
            self._agreed().check(b"", self._received[LENGTH.size : self._body_start])
        except ProtocolError as error:
            raise HandshakeError("its secret is another than that of this side") from error
        del self._received[: self._body_start]
        self.proved = True
        return True

    def take(self) -> bytes:
        """The body of the frame that waits.

        Raises:
            ProtocolError: it is too large, or its seal is wrong; nothing of the connection can be believed any more.
        """
        (length,) = LENGTH.unpack_from(self._received)
        if length > self._max_frame_bytes:
            raise ProtocolError(f"it announced a frame of {length} bytes, over the limit of {self._max_frame_bytes}")
        start = self._body_start
        with memoryview(self._received) as received:
            seal, body = bytes(received[LENGTH.size : start]), bytes(received[start : start + length])
        self._agreed().check(body, seal)
        del self._received[: start + length]
        return body

    def frame(self, body: bytes) -> bytes:
        """A frame for the client, in the order in which they are sent.

        Raises:
            ProtocolError: it is larger than a frame may be.
        """
        if len(body) > self._max_frame_bytes:
            raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {self._max_frame_bytes}")
        return frame_of(self._agreed(), body)

    @property
    def _body_start(self) -> int:
        return LENGTH.size + self._agreed().num_bytes

    def _agreed(self) -> FrameSeal:
        if self._seal is None:
            raise ProtocolError("a frame was asked for before the greeting")
        return self._seal
