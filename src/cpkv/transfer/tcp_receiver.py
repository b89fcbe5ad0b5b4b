"""The receiving end of the `tcp` back end: a listener, and a thread for each sender that is connected.

What is written where is decided here, by our own table of regions, whatever a sender says. The table is an immutable
tuple that is swapped as a whole. A connection looks at it, and lets the kernel fill memory, only while it holds its own
lock, and never waits while it does. So `withdraw` swaps the table and then takes each lock once: when it returns,
nothing is written into that region any more. Bytes that come for it later are read, dropped, and answered with the
cause.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import select
import socket
import threading
import time

from cpkv.errors import TransferError
from cpkv.transfer.bounded_socket import Bell, BoundedSocket, StopWorkError
from cpkv.transfer.runs import Region
from cpkv.transfer.tcp_wire import HEAD, PLACE_BYTES, check_run_count, pack_answer, prove, unpack_places

LOG = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
# How long the listener leaves callers waiting when no descriptor or thread is left for them.
BACK_OFF_S = 0.1
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_NODELAY: 1}
_SCRATCH_BYTES = 1 << 16


def view_of(region: Region) -> memoryview:
    """The bytes of a region; it does not keep the memory alive."""
    return memoryview((ctypes.c_ubyte * region.length).from_address(region.address)).cast("B")


def set_options(connection: socket.socket, silence_s: float) -> None:
    """No delay, and an end for connections whose other end is cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(silence_s * 1e3)))


class _Target:
    """One registration of a region; a later one of the same region is another."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.start, self.end = region.address, region.end
        self.view = view_of(region)


class TcpReceiver:
    """Takes writes into published regions.

    Args:
        host: an address or name of this machine to listen on; the port is a free one.
        secret: what senders prove; empty for none.
        silence_s: for a sender to prove it, and to take an answer.

    Raises:
        TransferError: the host is not an address of this machine.
    """

    def __init__(self, host: str, secret: str, silence_s: float) -> None:
        self.secret = secret
        self.silence_s = silence_s
        self.targets: tuple[_Target, ...] = ()
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._listener = _listen(host)
        self._bell = Bell()
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(
            target=self._accept_all, name=f"cpkv listens on {host}:{self.port}", daemon=True
        )
        self._thread.start()

    def publish(self, region: Region) -> None:
        """Let senders write into `region`."""
        self.targets = (*self.targets, _Target(region))

    def withdraw(self, region: Region) -> None:
        """Undo `publish`; when this returns, nothing is written into `region` any more."""
        self.targets = tuple(target for target in self.targets if target.region != region)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with connection.lock:
                pass

    def close(self) -> None:
        """End all connections; when this returns, nothing is written into any region any more."""
        self._bell.ring_to_stop()
        self._thread.join()
        self._bell.close()
        self.targets = ()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.stop()

    def leave(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._connections.discard(connection)

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        said = ""
        with self._listener:
            while self._bell.fileno() not in dict(poller.poll()):
                trouble = self._accept()
                if trouble and trouble != said:
                    LOG.warning("cannot take a data connection: %s", trouble)
                said = trouble
                if trouble and self._rang_within(BACK_OFF_S):
                    return

    def _rang_within(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        return bool(poller.poll(seconds * 1e3))

    def _accept(self) -> str:
        """Take one caller; why that failed, if it did."""
        try:
            accepted, address = self._listener.accept()
        except BlockingIOError:
            return ""
        except OSError as error:
            return str(error)
        if len(self._connections) >= MAX_CONNECTIONS:
            accepted.close()
            return f"{MAX_CONNECTIONS} are open, which is the limit"
        connection = _Connection(accepted, f"{address[0]}:{address[1]}", self)
        with self._lock:
            self._connections.add(connection)
        try:
            set_options(accepted, self.silence_s)
            connection.thread.start()
        # The caller has left, or the system gives no thread.
        except (OSError, RuntimeError) as error:
            self.leave(connection)
            accepted.close()
            return str(error)
        return ""


class _Connection:
    """One sender, and the thread that takes its writes."""

    def __init__(self, accepted: socket.socket, peer: str, receiver: TcpReceiver) -> None:
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"cpkv receives from {peer}", daemon=True)
        self._socket = accepted
        self._link = BoundedSocket(accepted)
        self._peer = peer
        self._receiver = receiver
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def stop(self) -> None:
        """End the connection and its thread."""
        # It may have ended already.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()

    def _run(self) -> None:
        receiver = self._receiver
        try:
            prove(self._link, "server", receiver.secret, time.monotonic() + receiver.silence_s)
            while True:
                self._take_write()
        except TransferError as error:
            LOG.warning("closed the data connection of %s: %s", self._peer, error)
        except (OSError, StopWorkError):
            # It has left, or says nothing that we could answer.
            pass
        except Exception:
            LOG.exception("closed the data connection of %s", self._peer)
        finally:
            receiver.leave(self)
            self._link.close()

    def _take_write(self) -> None:
        handle, count = HEAD.unpack(self._link.read(HEAD.size, None))
        check_run_count(count)
        places = unpack_places(self._link.read(count * PLACE_BYTES, None))
        cause = self._fill(places)
        self._link.write(pack_answer(handle, cause), time.monotonic() + self._receiver.silence_s)

    def _fill(self, places: list[tuple[int, int]]) -> str:
        """Let the bytes of a write land in its places, or nowhere; why nowhere, or nothing if they have landed."""
        table = self._receiver.targets
        used, views, cause = _place(table, places)
        left = sum(length for _, length in places)
        while left:
            with self.lock:
                if table is not self._receiver.targets:
                    table = self._receiver.targets
                    if not cause and not used <= set(table):
                        cause = "the memory was withdrawn in the middle of the write; a part of it has landed"
                if self._link.look(0):
                    raise ConnectionResetError("it gave up what it has sent")
                if cause:
                    views = [self._scratch[: min(left, _SCRATCH_BYTES)]]
                try:
                    count = self._socket.recvmsg_into(views)[0]
                except BlockingIOError:
                    count = -1
            if count == 0:
                raise ConnectionResetError("it ended in the middle of a write")
            if count < 0:
                self._link.wait(select.POLLIN, None)
                continue
            left -= count
            if left and not cause:
                views = skip_bytes(views, count)
        return cause


def _place(table: tuple[_Target, ...], places: list[tuple[int, int]]) -> tuple[set[_Target], list[memoryview], str]:
    """The registrations that hold each place, views of the places, and why there are none."""
    used: set[_Target] = set()
    views: list[memoryview] = []
    target: _Target | None = None
    for address, length in places:
        if target is None or not (target.start <= address and address + length <= target.end):
            target = next((one for one in table if one.start <= address and address + length <= one.end), None)
            if target is None:
                return set(), [], f"{Region(address, length)} is not inside one region that is registered there"
            used.add(target)
        views.append(target.view[address - target.start : address - target.start + length])
    return used, views, ""


def skip_bytes(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` behind the first `count` bytes."""
    for place, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[place + 1 :]]
        count -= len(view)
    return []


def _listen(host: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise TransferError(
            f"host {host!r} does not resolve ({error}), so no peer could reach this engine; give an address of this "
            "machine"
        ) from error
    try:
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise TransferError(f"cannot listen on {host}: {error}; give an address of this machine") from error
    return listener
