"""A socket whose every wait ends: by data, by a deadline, or because another thread rings.

Between threads there is one bell per loop. Ringing says "look again": there is work, or the loop is to end.
"""

from __future__ import annotations

import os
import select
import socket
import time


class StopWorkError(Exception):
    """The loop that was waiting is to end; it never leaves the thread."""


class Bell:
    """Wakes one thread out of a wait. Any thread rings; the thread that waits is the one that closes it."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = False

    def fileno(self) -> int:
        """For poll."""
        return self._descriptor

    def ring(self) -> None:
        """Let the thread look again."""
        os.eventfd_write(self._descriptor, 1)

    def ring_to_stop(self) -> None:
        """Let the thread end."""
        self._stop = True
        self.ring()

    def heard(self) -> None:
        """Take note that it rang. Raises StopWorkError when the thread is to end."""
        os.eventfd_read(self._descriptor)
        if self._stop:
            raise StopWorkError

    def close(self) -> None:
        """Release the descriptor, when nobody rings any more."""
        os.close(self._descriptor)


class BoundedSocket:
    """A stream socket of one thread.

    Args:
        connection: made non-blocking; closed with this.
        bell: ends waits; without one, shutting the socket down from another thread does.
    """

    def __init__(self, connection: socket.socket, bell: Bell | None = None) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._bell = bell
        self._poller = select.poll()
        self._poller.register(connection, 0)
        if bell is not None:
            self._poller.register(bell, select.POLLIN)

    def look(self, events: int) -> int:
        """What of `events` has come already. Raises StopWorkError when the thread is to end."""
        return self._poll(events, 0)

    def wait(self, events: int, deadline: float | None) -> int:
        """Wait for `events` (select.POLLIN, POLLOUT) until `deadline` (time.monotonic), or for the bell.

        Returns:
            What has come, errors and ends included; 0 when only the bell rang.

        Raises:
            TimeoutError: the deadline has passed.
            StopWorkError: the thread is to end.
        """
        if deadline is None:
            return self._poll(events, None)
        found = self._poll(events, max(0.0, (deadline - time.monotonic()) * 1e3))
        # After it: what came while this process was stopped itself has come in time.
        if not found and time.monotonic() >= deadline:
            raise TimeoutError
        return found

    def _poll(self, events: int, timeout_ms: float | None) -> int:
        self._poller.modify(self.socket, events)
        ready = dict(self._poller.poll(timeout_ms))
        if self._bell is not None and self._bell.fileno() in ready:
            self._bell.heard()
        return ready.get(self.socket.fileno(), 0)

    def read(self, num_bytes: int, deadline: float | None) -> bytearray:
        """Exactly `num_bytes`. Raises OSError (TimeoutError, or ConnectionResetError at the end), StopWorkError."""
        found = bytearray(num_bytes)
        rest = memoryview(found)
        while rest:
            try:
                count = self.socket.recv_into(rest)
            except BlockingIOError:
                self.wait(select.POLLIN, deadline)
                continue
            if count == 0:
                raise ConnectionResetError("it closed the connection")
            rest = rest[count:]
        return found

    def write(self, content: bytes, deadline: float) -> None:
        """All of `content`. Raises OSError (TimeoutError when the peer does not read), StopWorkError."""
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
            except BlockingIOError:
                self.wait(select.POLLOUT, deadline)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
