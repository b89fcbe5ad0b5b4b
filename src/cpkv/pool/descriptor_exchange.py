"""Each rank hands the descriptors of its segments to every other rank of the host, over Unix sockets.

What each rank does, all at the same time and without a thread:

    bind, listen                                  folder/pool-<rank>.sock
    fence                                         now every rank listens
    connect to every peer and send                hello + descriptors; a listening socket takes both before it accepts
    accept cp_size - 1 times and receive          all of them, whatever they say
    compare each hello with ours                  refuse by rank, field and both values
    look at each descriptor                       before anybody maps it

Nothing is judged before all have been received, so each rank reports the cause and not that another rank has left.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cpkv.errors import ConfigError, HandshakeError, ProtocolError, TransferError, WorkerDiedError
from cpkv.pool.sealed_segment import RangeShape, close_all, why_not_segment
from cpkv.pool.segment_hello import SegmentDescription, decode_hello, why_not_hello

MAX_HELLO_BYTES = 64 * 1024
LENGTH = struct.Struct("!I")
CREDENTIALS = struct.Struct("3i")
# After the deadline what lies ready is still taken, so that only who really is silent is named.
GRACE_S = 0.01

WhyNotSegment = Callable[[int, RangeShape], str | None]


@dataclass
class _Arrival:
    """One connection: who called, what it sent, and why that was cut short, if it was."""

    pid: int
    uid: int
    frame: bytes = b""
    fault: Exception | None = None
    descriptors: list[int] = field(default_factory=list)


def exchange_descriptors(
    rank: int,
    cp_size: int,
    folder: Path,
    description: SegmentDescription,
    descriptors: list[int],
    fence: Callable[[str], None],
    timeout_s: float,
    why_not: WhyNotSegment = why_not_segment,
) -> list[list[int]]:
    """Give our descriptors to all ranks and take theirs. Every rank calls it; none maps anything before it returns.

    Args:
        rank: ours.
        cp_size: ranks of the group.
        folder: of this run, the same for all ranks, closed to other users.
        description: ours; see `SegmentDescription`.
        descriptors: ours, one per shape of the description; they stay ours to close.
        fence: waits until every rank has called it with this label.
        timeout_s: for everything behind the fence.
        why_not: looks at each descriptor that comes, by the rules of the memory that it stands for.

    Returns:
        Descriptors of each rank, in the order of the shapes; those of other ranks are the caller's to close.

    Raises:
        HandshakeError: another rank describes other memory, or what it sent must not be mapped.
        ProtocolError: a hello is malformed or too large.
        TransferError: a rank is silent.
        WorkerDiedError: a rank has closed its socket, or cannot be reached.
        ConfigError: the sockets cannot be made.
    """
    hello = msgspec.msgpack.encode(description)
    if len(hello) > MAX_HELLO_BYTES:
        raise ConfigError(f"rank {rank} describes its memory in {len(hello)} bytes and {MAX_HELLO_BYTES} are allowed")
    peers = [peer for peer in range(cp_size) if peer != rank]
    arrivals: list[_Arrival] = []
    try:
        with contextlib.ExitStack() as sockets, _listen(folder, rank, cp_size) as listener:
            fence("pool sockets listen")
            deadline = time.monotonic() + timeout_s
            faults = [_send(sockets, folder, peer, hello, descriptors, deadline) for peer in peers]
            # Those who are well must hear from us before we leave, or they would name us and not the one who is gone.
            calling = sum(not isinstance(fault, WorkerDiedError) for fault in faults)
            _collect(listener, arrivals, calling, len(descriptors), deadline)
        for fault in faults:
            if fault is not None:
                raise fault
        found = _judge(arrivals, peers, description, timeout_s, why_not)
    except BaseException:
        close_all([descriptor for arrival in arrivals for descriptor in arrival.descriptors])
        raise
    found[rank] = descriptors
    return [found[owner] for owner in range(cp_size)]


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[str]:
    """A short name of the folder, since a socket's path is limited to 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _listen(folder: Path, rank: int, cp_size: int) -> Iterator[socket.socket]:
    name = f"pool-{rank}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with _open_folder(folder) as short:
                listener.bind(f"{short}/{name}")
        except OSError as error:
            raise ConfigError(
                f"rank {rank} cannot listen at {folder / name} ({error}); every run needs a folder of its own"
            ) from error
        try:
            os.chmod(folder / name, 0o600)
            listener.listen(cp_size)
            yield listener
        finally:
            (folder / name).unlink(missing_ok=True)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    pid, uid, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid


def _limit(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(GRACE_S, deadline - time.monotonic()))


def _send(
    sockets: contextlib.ExitStack, folder: Path, peer: int, hello: bytes, descriptors: Sequence[int], deadline: float
) -> TransferError | WorkerDiedError | None:
    """Send a peer our hello; why that failed, or None. `sockets` closes the connection."""
    connection = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    name = f"pool-{peer}.sock"
    frame = LENGTH.pack(len(hello)) + hello
    try:
        _limit(connection, deadline)
        with _open_folder(folder) as short:
            connection.connect(f"{short}/{name}")
        # Whoever listens there gets the secret and the memory, so it is looked at first.
        if (uid := _credentials(connection)[1]) != os.geteuid():
            connection.close()
            return HandshakeError(f"{name}, which rank {peer} should hold, is of user {uid} and not {os.geteuid()}")
        sent = socket.send_fds(connection, [frame], list(descriptors))
        # Sending nothing fails, too, once the peer has read all and closed its end.
        if sent < len(frame):
            connection.sendall(frame[sent:])
    except OSError as error:
        return WorkerDiedError(
            f"rank {peer} takes no memory at {folder / name} ({error}): it has ended, or runs on another host"
        )
    return None


def _collect(
    listener: socket.socket, arrivals: list[_Arrival], connections: int, num_descriptors: int, deadline: float
) -> None:
    """Add what each connection sends to `arrivals`; ends early when nobody calls any more."""
    for _ in range(connections):
        _limit(listener, deadline)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        with connection:
            arrival = _Arrival(*_credentials(connection))
            arrivals.append(arrival)
            try:
                _limit(connection, deadline)
                (length,) = LENGTH.unpack(_receive(connection, LENGTH.size, arrival.descriptors, num_descriptors))
                if length > MAX_HELLO_BYTES:
                    raise ProtocolError(f"a hello of {length} bytes is longer than {MAX_HELLO_BYTES}")
                arrival.frame = _receive(connection, length, arrival.descriptors, num_descriptors)
            except (OSError, ProtocolError) as error:
                arrival.fault = error


def _receive(connection: socket.socket, size: int, descriptors: list[int], num_descriptors: int) -> bytes:
    """Read `size` bytes; whatever descriptors come along are added to `descriptors` at once, so that none is lost."""
    content = b""
    # One more than wanted, so that too many show as a count.
    room = socket.CMSG_LEN((num_descriptors + 1) * array.array("i").itemsize)
    while len(content) < size:
        part, ancillary, _, _ = connection.recvmsg(size - len(content), room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                descriptors.extend(numbers)
        if not part:
            raise ConnectionResetError("it closed its socket before its hello was complete")
        content += part
    return content


def _judge(
    arrivals: Sequence[_Arrival],
    peers: Sequence[int],
    ours: SegmentDescription,
    timeout_s: float,
    why_not: WhyNotSegment,
) -> dict[int, list[int]]:
    """Descriptors by rank, or the error that names a rank and what is wrong with it."""
    found: dict[int, list[int]] = {}
    faults: list[_Arrival] = []
    for arrival in arrivals:
        if arrival.uid != os.geteuid():
            raise HandshakeError(f"process {arrival.pid} of user {arrival.uid} called, and we run as {os.geteuid()}")
        hello = _decode(arrival, ours.version)
        if hello is None:
            faults.append(arrival)
            continue
        who = f"rank {hello.rank} (process {arrival.pid}) is refused by rank {ours.rank}"
        reason = why_not_hello(hello, ours, peers, found) or _why_not_mapped(arrival.descriptors, ours.shapes, why_not)
        if reason:
            raise HandshakeError(f"{who}: {reason}")
        found[hello.rank] = arrival.descriptors
    if missing := [peer for peer in peers if peer not in found]:
        # A connection without a hello has no rank of its own: it is one of those that nobody else was.
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        for arrival in faults:
            if isinstance(arrival.fault, TransferError):
                raise type(arrival.fault)(f"{who} (process {arrival.pid}): {arrival.fault}") from arrival.fault
            if not isinstance(arrival.fault, TimeoutError):
                raise WorkerDiedError(f"{who} (process {arrival.pid}) ended: {arrival.fault}") from arrival.fault
        raise TransferError(f"{who} sent no memory within {timeout_s} s: it has ended, hangs, or runs on another host")
    return found


def _decode(arrival: _Arrival, version: int) -> SegmentDescription | None:
    """The hello, or None with the arrival's fault set."""
    if arrival.fault is None:
        try:
            return decode_hello(arrival.frame, version)
        except TransferError as error:
            arrival.fault = error
    return None


def _why_not_mapped(descriptors: Sequence[int], shapes: Sequence[RangeShape], why_not: WhyNotSegment) -> str | None:
    """Why descriptors are refused, in words; None when they can be mapped."""
    if len(descriptors) != len(shapes):
        return f"{len(descriptors)} descriptors came, not {len(shapes)}"
    for shape, descriptor in zip(shapes, descriptors, strict=True):
        if reason := why_not(descriptor, shape):
            return f"its {shape.name} segment cannot be mapped: {reason}"
    return None
