"""How two ends of a control connection recognise each other, and the seal on every frame between them.

client                                        server
  <------------------------------- greeting     at once: versions, whether there is a secret, a nonce
  greeting ------------------------------->
  empty frame, sealed -------------------->     the secret is proved, or the connection ends
  <------------------- empty frame, sealed
  frames, each sealed <------------------->

The seal is an HMAC under a key that follows from the secret and both greetings, over the number of the frame in its
direction, its length and its body. A frame that was changed, repeated, left out, moved, turned back to its sender or
taken from another connection does not verify. Nothing is encrypted. Without a secret, seals are empty.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import struct
from dataclasses import dataclass
from typing import Literal, Self

from cpkv.errors import ConfigError, HandshakeError, ProtocolError
from cpkv.protocol.messages import PROTOCOL_VERSION

# Version 1 announced pages in another way and had no attempts of an instance: it is refused by name.
OLDEST_PROTOCOL_VERSION = 2
MIN_SECRET_CHARS = 16
NONCE_BYTES = 32
SEAL_BYTES = 32
MAGIC = b"cpkv\r\n\x00\xff"

# Every version keeps this layout, so that two that do not understand each other can say so.
_GREETING = struct.Struct(f">{len(MAGIC)}sHHB{NONCE_BYTES}s")
_SEALED = struct.Struct(">QI")
GREETING_BYTES = _GREETING.size

Role = Literal["client", "server"]


@dataclass(frozen=True)
class Greeting:
    """The first bytes that each end sends.

    Attributes:
        version: the newest protocol version that it speaks.
        oldest: the oldest that it accepts.
        sealed: whether it has a secret.
        nonce: drawn for this connection.
    """

    version: int
    oldest: int
    sealed: bool
    nonce: bytes

    @classmethod
    def of(cls, secret: str) -> Self:
        """A new greeting of this build."""
        return cls(PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION, bool(secret), secrets.token_bytes(NONCE_BYTES))

    def encode(self) -> bytes:
        """`GREETING_BYTES` bytes."""
        return _GREETING.pack(MAGIC, self.version, self.oldest, self.sealed, self.nonce)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """A greeting from its bytes.

        Raises:
            HandshakeError: they are none.
        """
        check_magic(data)
        if len(data) != GREETING_BYTES:
            raise HandshakeError(f"its greeting has {len(data)} bytes, not {GREETING_BYTES}")
        _, version, oldest, sealed, nonce = _GREETING.unpack(data)
        if not 1 <= oldest <= version or sealed > 1:
            raise HandshakeError(f"its greeting is malformed: versions {oldest} to {version}, secret {sealed}")
        return cls(version, oldest, bool(sealed), nonce)


def check_magic(data: bytes) -> None:
    """Refuse bytes that no greeting begins with; a part of a greeting passes.

    Raises:
        HandshakeError: whoever sent them is not cpkv.
    """
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise HandshakeError(f"it begins with {bytes(data[: len(MAGIC)])!r}, which is no greeting of cpkv")


def agree(ours: Greeting, theirs: Greeting) -> int:
    """The protocol version that both ends speak.

    Raises:
        HandshakeError: there is none, only one end has a secret, or the peer sends back what it is sent.
    """
    if theirs.nonce == ours.nonce:
        raise HandshakeError("it sends our own greeting back, so it is not cpkv; give the port that the peer printed")
    version = min(ours.version, theirs.version)
    if version < max(ours.oldest, theirs.oldest):
        older = "on this side" if theirs.version > ours.version else "there"
        raise HandshakeError(
            f"the peer speaks {_versions(theirs)}, this build {_versions(ours)}; "
            f"install a cpkv that speaks version {max(ours.oldest, theirs.oldest)} {older}"
        )
    if ours.sealed != theirs.sealed:
        without, other = ("this side", "the peer") if theirs.sealed else ("the peer", "this side")
        raise HandshakeError(
            f"{without} has no secret and {other} has one; start {without} with the same secret as {other}"
        )
    return version


def _versions(greeting: Greeting) -> str:
    if greeting.oldest == greeting.version:
        return f"version {greeting.version}"
    return f"version {greeting.oldest} to {greeting.version}"


class FrameSeal:
    """Seals what one end sends and checks what it receives; each end of each connection has its own.

    Args:
        secret: shared by both ends; empty for seals of no bytes.
        role: which end this is.
        ours: the greeting that was sent.
        theirs: the one that came.
    """

    def __init__(self, secret: str, role: Role, ours: Greeting, theirs: Greeting) -> None:
        greetings = ours.encode() + theirs.encode() if role == "client" else theirs.encode() + ours.encode()
        keys = {sender: _key(secret, sender, greetings) for sender in ("client", "server")} if secret else {}
        self.num_bytes = SEAL_BYTES if secret else 0
        self._sent_key = keys.get(role)
        self._received_key = keys.get("server" if role == "client" else "client")
        self._sent = 0
        self._received = 0

    def seal(self, body: bytes) -> bytes:
        """The seal of the next frame to send: `num_bytes` bytes."""
        seal = _seal(self._sent_key, self._sent, body)
        self._sent += 1
        return seal

    def check(self, body: bytes | bytearray, seal: bytes | bytearray) -> None:
        """Accept the next frame received.

        Raises:
            ProtocolError: it is not what the peer sealed as its next frame.
        """
        if not hmac.compare_digest(_seal(self._received_key, self._received, body), seal):
            raise ProtocolError(
                f"the seal of frame {self._received} is wrong: the frame was changed, repeated or moved on its way, "
                "or sealed with another secret"
            )
        self._received += 1


def _key(secret: str, sender: Role, greetings: bytes) -> bytes:
    return hmac.digest(secret.encode(), f"cpkv frames of the {sender}\0".encode() + greetings, hashlib.sha256)


def _seal(key: bytes | None, number: int, body: bytes | bytearray) -> bytes:
    if key is None:
        return b""
    sealed = hmac.new(key, _SEALED.pack(number, len(body)), hashlib.sha256)
    sealed.update(body)
    return sealed.digest()


def check_secret(host: str, secret: str) -> None:
    """Refuse connections beyond this host that nobody has to prove anything for.

    Args:
        host: what is listened on or connected to.
        secret: shared by both ends; empty for none.

    Raises:
        ConfigError: the secret is too short, or missing where others than this host can connect.
    """
    if 0 < len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"the secret has {len(secret)} characters, {MIN_SECRET_CHARS} are the least; draw one at random"
        )
    if not secret and not _is_loopback(host):
        raise ConfigError(
            f"{host} is not a loopback address, and beyond this host a connection needs a secret; give every worker "
            f"the same secret of {MIN_SECRET_CHARS} or more characters, or use 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
