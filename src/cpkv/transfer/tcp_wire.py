"""What goes over a data connection of the `tcp` back end.

sender                                          receiver
  <------------------------------- greeting     see `cpkv.protocol.sealing`; both prove the secret before anything else
  greeting, proof ------------------------>
  <---------------------------------- proof
  write: head, places, bytes of all runs -->    one after the other, several under way
  <--------------------------- answer: head, cause if it was refused

    head    | write id: 8 bytes | number of runs: 4 |
    places  | target address: 8 | length: 8 |  per run
    answer  | write id: 8 bytes | length of cause: 2 |

All numbers are big endian. The bytes are neither encrypted nor signed: the secret keeps strangers out, not somebody who
can change what the network carries.
"""

from __future__ import annotations

import struct
from typing import Literal

from cpkv.errors import ConfigError, HandshakeError, ProtocolError
from cpkv.protocol.sealing import GREETING_BYTES, FrameSeal, Greeting, agree, check_magic
from cpkv.transfer.bounded_socket import BoundedSocket
from cpkv.transfer.peer_thread import MAX_BYTES_PER_WRITE, MAX_RUNS_PER_WRITE
from cpkv.transfer.runs import Run

HEAD = struct.Struct(">QI")
ANSWER = struct.Struct(">QH")
PLACE_BYTES = 16
MAX_CAUSE_BYTES = 1000

# Another text than that of a control connection, so that no proof can be carried from one kind to the other.
_PROVED = b"cpkv data"
_WRONG_SECRET = "it has another secret; give every worker the same one"


def pack_write(handle: int, runs: list[Run]) -> bytes:
    """Head and places of a write."""
    places = [number for _, target, length in runs for number in (target, length)]
    return HEAD.pack(handle, len(runs)) + struct.pack(f">{len(places)}Q", *places)


def unpack_places(packed: bytearray) -> list[tuple[int, int]]:
    """(target address, length) of each run.

    Raises:
        ProtocolError: no run, an empty one, or more bytes than a write may have.
    """
    numbers = struct.unpack(f">{len(packed) // 8}Q", packed)
    lengths = numbers[1::2]
    if not lengths or min(lengths) < 1 or sum(lengths) > MAX_BYTES_PER_WRITE:
        raise ProtocolError(
            f"it announced a write of {len(lengths)} runs and {sum(lengths)} bytes; from 1 to {MAX_BYTES_PER_WRITE} "
            "bytes are allowed, and no empty run"
        )
    return list(zip(numbers[::2], lengths, strict=True))


def check_run_count(count: int) -> None:
    """Refuse a head before its places are read. Raises ProtocolError."""
    if not 1 <= count <= MAX_RUNS_PER_WRITE:
        raise ProtocolError(f"it announced a write of {count} runs; 1 to {MAX_RUNS_PER_WRITE} are allowed")


def pack_answer(handle: int, cause: str) -> bytes:
    """The end of a write; without a cause, it has landed."""
    text = cause.encode()[:MAX_CAUSE_BYTES]
    return ANSWER.pack(handle, len(text)) + text


def prove(connection: BoundedSocket, role: Literal["client", "server"], secret: str, deadline: float) -> None:
    """Make sure that the other end has the same secret, and show it that we have.

    Raises:
        HandshakeError: it is not cpkv, has another version, no secret or another one.
        OSError: it is silent or gone.
    """
    ours = Greeting.of(secret)
    if role == "server":
        connection.write(ours.encode(), deadline)
    theirs = _read_greeting(connection, deadline)
    if role == "client":
        # Before anything is judged, so that the other end can say in its own log what is wrong.
        connection.write(ours.encode(), deadline)
    agree(ours, theirs)
    seal = FrameSeal(secret, role, ours, theirs)
    if role == "client":
        connection.write(seal.seal(_PROVED), deadline)
    try:
        proof = connection.read(seal.num_bytes, deadline)
    except ConnectionError as error:
        # A receiver closes the connection of whoever cannot prove the secret.
        raise HandshakeError(_WRONG_SECRET) from error
    try:
        seal.check(_PROVED, proof)
    except ProtocolError as error:
        raise HandshakeError(_WRONG_SECRET) from error
    if role == "server":
        connection.write(seal.seal(_PROVED), deadline)


def _read_greeting(connection: BoundedSocket, deadline: float) -> Greeting:
    # A stranger that sends less than a greeting is known by its first bytes.
    start = bytes(connection.read(1, deadline))
    check_magic(start)
    return Greeting.decode(start + connection.read(GREETING_BYTES - 1, deadline))


def split_session_id(session_id: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError when it is none of this back end."""
    host, _, port = session_id.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError("it is not of the form host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
