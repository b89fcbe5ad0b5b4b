"""Serves control connections in one thread, so that no peer can make another wait.

accept --> greeting, proof of the secret --> a frame is whole --> handler.answer --> the answer is read
           within greeting_s                 within frame_s       one a turn         some of it within frame_s

Reads and writes never block. Whoever is too slow, malformed or wrongly sealed loses its own connection. Only the
handler takes the thread, and while it does, no peer's time runs.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from cpkv.errors import CpkvError, HandshakeError, ProtocolError, TransferError
from cpkv.protocol.failures import failure_of
from cpkv.protocol.sealing import check_secret
from cpkv.transfer.channel import keep_alive
from cpkv.transfer.peer_stream import PeerStream, ServerLimits

__all__ = ["Connection", "MessageHandler", "MessageServer", "ServerLimits"]

LOG = logging.getLogger(__name__)
TICK_S = 1.0
# Without a free descriptor, accepting is tried again after this time.
ACCEPT_PAUSE_S = 0.5
NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOG_INTERVAL_S = 1.0
DEFAULT_LIMITS = ServerLimits()


@dataclass(eq=False)
class Connection:
    """A peer that has proved the secret, as the handler sees it.

    Attributes:
        peer: its address and port.
        state: the handler's own.
    """

    peer: str
    state: Any = None


class MessageHandler(Protocol):
    """What a server serves; called in its thread only."""

    def answer(self, connection: Connection, message: Any) -> Any:
        """The answer to a message; a CpkvError that it raises is answered as Failed, a HandshakeError is the last."""

    def closed(self, connection: Connection) -> None:
        """A connection is over."""

    def tick(self, now_s: float) -> None:
        """Called about once a second and after every wake; `now_s` is time.monotonic().

        After a time in which nothing was read, say since the process was stopped, what has come is answered first, for
        a second at most.
        """


class MessageServer:
    """Serves one listening socket.

    Args:
        listener: bound and listening; closed with the server.
        receives: the union of messages that peers may send.
        handler: answers them.
        secret: that every peer must prove; empty for none, on loopback only.
        where: the server's name, for peers and logs.
        limits: what one peer may take.
        on_start: called first in the server's thread.

    Attributes:
        port: where it listens.

    Raises:
        ConfigError: the secret is too short, or missing beyond loopback.
    """

    def __init__(
        self,
        listener: socket.socket,
        receives: Any,
        handler: MessageHandler,
        *,
        secret: str,
        where: str,
        limits: ServerLimits = DEFAULT_LIMITS,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        host, self.port = listener.getsockname()[:2]
        try:
            check_secret(host, secret)
        except CpkvError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        self._handler = handler
        self._secret = secret
        self._where = where
        self._limits = limits
        self._on_start = on_start
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._selector = selectors.DefaultSelector()
        self._peers: dict[PeerStream, Connection] = {}
        self._ready: dict[PeerStream, None] = {}
        self._busy_s = 0.0
        self._turned_s = 0.0
        self._catches_up_until_s = 0.0
        self._accepts_again_s: float | None = None
        self._is_full = False
        self._told: dict[str, float] = {}
        self._wake, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"{where} server", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and every connection; calling it twice is harmless."""
        if self._thread.is_alive():
            with suppress(OSError):
                self._stop.send(b"x")
            self._thread.join()
        else:
            self._listener.close()
            self._selector.close()
        self._wake.close()
        self._stop.close()

    def _serve(self) -> None:
        try:
            self._on_start()
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._turned_s = time.monotonic()
            while self._turn():
                pass
        finally:
            for peer in list(self._peers):
                self._end(peer)
            self._listener.close()
            self._selector.close()

    def _turn(self) -> bool:
        """Wait, read, write, answer one message of each peer that has sent one; False when the server is closed."""
        events = self._select(self._patience(self._now()))
        now_s = self._now()
        touched = set(self._ready)
        for key, mask in events:
            if key.fileobj is self._wake:
                return False
            if key.fileobj is self._listener:
                self._accept(now_s)
                continue
            peer: PeerStream = key.data
            touched.add(peer)
            with self._only_this(peer):
                if mask & selectors.EVENT_WRITE:
                    peer.write(now_s)
                if mask & selectors.EVENT_READ:
                    peer.read(now_s)
        for peer in list(self._ready):
            with self._only_this(peer):
                self._answer(peer)
        for peer in touched & self._peers.keys():
            with self._only_this(peer):
                self._watch(peer)
        for peer in [peer for peer in self._peers if peer.deadline_s <= now_s]:
            self._end(peer, peer.lateness)
        if self._accepts_again_s is not None and now_s >= self._accepts_again_s:
            self._accepts_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        if self._is_caught_up(anything_left=bool(events or self._ready)):
            with self._handling("tick"):
                self._handler.tick(time.monotonic())
        return True

    def _select(self, patience_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        started_s = time.monotonic()
        events = self._selector.select(patience_s)
        # A process that was stopped wakes late; that time is no peer's either.
        self._busy_s += max(0.0, time.monotonic() - started_s - patience_s - TICK_S)
        return events

    def _is_caught_up(self, *, anything_left: bool) -> bool:
        """Whether what came while nothing was read has been answered, so that whoever is silent can be given up."""
        now_s = time.monotonic()
        caught_up = self._turned_s >= self._catches_up_until_s
        if caught_up and now_s - self._turned_s > 2 * TICK_S:
            self._catches_up_until_s = now_s + TICK_S
        elif not anything_left:
            self._catches_up_until_s = now_s
        self._turned_s = now_s
        return now_s >= self._catches_up_until_s

    def _now(self) -> float:
        """The time without that which the handler took, when nobody was read or written."""
        return time.monotonic() - self._busy_s

    def _patience(self, now_s: float) -> float:
        if self._ready or time.monotonic() < self._catches_up_until_s:
            return 0.0
        until = min((peer.deadline_s for peer in self._peers), default=now_s + TICK_S)
        if self._accepts_again_s is not None:
            until = min(until, self._accepts_again_s)
        return max(0.0, min(until - now_s, TICK_S))

    @contextmanager
    def _only_this(self, peer: PeerStream) -> Iterator[None]:
        """Whatever goes wrong in the body ends this peer and no other."""
        try:
            yield
        except (OSError, EOFError):
            self._end(peer)
        except TransferError as error:
            self._end(peer, str(error))
        except Exception as error:  # a fault of ours must not take the other peers with it
            LOG.exception("%s: %s", self._where, self._peers[peer].peer)
            self._end(peer, repr(error))
        else:
            if peer.is_over:
                self._end(peer)
            elif peer.has_frame:
                self._ready[peer] = None
            else:
                self._ready.pop(peer, None)

    def _watch(self, peer: PeerStream) -> None:
        if peer.events == peer.watched:
            return
        if peer.watched:
            self._selector.unregister(peer)
            peer.watched = 0
        if peer.events:
            self._selector.register(peer, peer.events, peer)
            peer.watched = peer.events

    def _accept(self, now_s: float) -> None:
        try:
            stream, address = self._listener.accept()
        except OSError as error:
            if error.errno in NOTHING_LEFT:
                LOG.warning("%s: cannot accept: %s; trying again in %g s", self._where, error, ACCEPT_PAUSE_S)
                self._selector.unregister(self._listener)
                self._accepts_again_s = now_s + ACCEPT_PAUSE_S
            return
        name = f"{address[0]}:{address[1]}"
        if len(self._peers) >= self._limits.max_connections:
            stream.close()
            if not self._is_full:
                self._tell(name, f"refused, since {len(self._peers)} connections are open")
            self._is_full = True
            return
        try:
            keep_alive(stream)
            peer = PeerStream(stream, self._secret, self._limits, now_s)
        except OSError:
            stream.close()
            return
        self._peers[peer] = Connection(name)
        with self._only_this(peer):
            self._watch(peer)

    def _answer(self, peer: PeerStream) -> None:
        body = peer.take(self._now())
        try:
            message = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"it sent a message that is none of those expected here: {error}") from error
        started_s = time.monotonic()
        answer = self._ask_handler(peer, message)
        self._busy_s += time.monotonic() - started_s
        peer.send(answer, self._now())

    def _ask_handler(self, peer: PeerStream, message: Any) -> bytes:
        try:
            answer = self._handler.answer(self._peers[peer], message)
            body = self._encoder.encode(answer)
            if len(body) > (limit := self._limits.max_frame_bytes):
                raise ProtocolError(f"a {type(answer).__name__} of {len(body)} bytes is over the limit of {limit}")
            return body
        except Exception as error:  # the cause must reach the peer, and the others are served on
            if not isinstance(error, CpkvError):
                LOG.exception("%s: %s failed", self._where, type(message).__name__)
            peer.ending = isinstance(error, HandshakeError)
            return self._encoder.encode(failure_of(error, self._where))

    @contextmanager
    def _handling(self, what: str) -> Iterator[None]:
        """A call of the handler that nobody waits for: a failure is logged, and its time is no peer's."""
        started_s = time.monotonic()
        try:
            yield
        except Exception:
            LOG.exception("%s: %s failed", self._where, what)
        self._busy_s += time.monotonic() - started_s

    def _end(self, peer: PeerStream, reason: str = "") -> None:
        connection = self._peers.pop(peer)
        self._ready.pop(peer, None)
        if peer.watched:
            self._selector.unregister(peer)
        peer.close()
        self._is_full = False
        if reason:
            self._tell(connection.peer, f"{reason}; connection closed")
        if peer.proved:
            with self._handling("closed"):
                self._handler.closed(connection)

    def _tell(self, peer: str, text: str) -> None:
        """Log about a peer, unless its address has had its line of this second."""
        now_s, host = time.monotonic(), peer.rpartition(":")[0]
        self._told = {other: told_s for other, told_s in self._told.items() if told_s > now_s - LOG_INTERVAL_S}
        if host not in self._told:
            self._told[host] = now_s
            LOG.warning("%s: %s: %s", self._where, peer, text)
