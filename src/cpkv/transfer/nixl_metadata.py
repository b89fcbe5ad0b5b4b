"""How NIXL engines find each other: a small server per engine that tells its metadata, and the link that asks for it.

    link connects            -> answer
    link sends one byte "?"  -> answer, with the number of questions counted up
    registration changes     -> answer to every link, sent before `publish` returns where the socket takes it

An answer is four bytes of length and one msgpack message: the agent's metadata and the regions that it covers. A link
that is closed means that the engine is gone. A process that is stopped accepts connections, since its kernel does,
but never answers. Nobody proves who he is here, and UCX does not ask either.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

import msgspec

from cpkv.errors import TransferError
from cpkv.transfer.peer_address import FROM_HANDSHAKE, resolve_peer
from cpkv.transfer.runs import Region

MAX_ANSWER_BYTES = 1 << 20
_MAX_LINKS = 1024
_MAX_UNREAD_BYTES = 4 * MAX_ANSWER_BYTES
_LENGTH = struct.Struct(">I")
_QUESTION = b"?"


class Metadata(msgspec.Struct, frozen=True):
    """What an engine tells: its name for good, its present agent, that agent's metadata and registered regions."""

    identity: str
    agent: str
    blob: bytes
    regions: tuple[Region, ...]


class _Answer(msgspec.Struct, frozen=True):
    metadata: Metadata
    questions: int


@dataclass(eq=False)
class _Reader:
    """A link as the server sees it."""

    connection: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    questions: int = 0


class MetadataServer:
    """Tells whoever connects what was published last; one thread, on a free port of `host`.

    Raises TransferError if `host` is no address of this machine.
    """

    def __init__(self, host: str) -> None:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise TransferError(_no_address(host, error)) from error
        try:
            self._listener.bind(address)
            self._listener.listen(128)
        except OSError as error:
            self._listener.close()
            raise TransferError(_no_address(host, error)) from error
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._metadata: Metadata | None = None
        self._readers: dict[int, _Reader] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"nixl-metadata-{self.port}", daemon=True)
        self._thread.start()

    def publish(self, metadata: Metadata) -> None:
        """Tell this from now on, and to every link at once.

        Raises:
            TransferError: it is larger than a link accepts; what was told before stays.
        """
        size = len(self._encoder.encode(_Answer(metadata, 1 << 62)))
        if size > MAX_ANSWER_BYTES:
            raise TransferError(
                f"the metadata of {len(metadata.regions)} registered regions has {size:,} bytes and a peer accepts "
                f"{MAX_ANSWER_BYTES:,}; register fewer and larger regions"
            )
        with self._lock:
            self._metadata = metadata
            for reader in list(self._readers.values()):
                self._answer(reader)

    def close(self) -> None:
        """End the thread and every link."""
        with self._lock:
            self._closed = True
        self._waker.send(b"x")
        self._thread.join()
        for reader in self._readers.values():
            reader.connection.close()
        self._readers.clear()
        self._selector.close()
        for end in (self._listener, self._woken, self._waker):
            end.close()

    def _serve(self) -> None:
        while True:
            ready = self._selector.select()
            with self._lock:
                if self._closed:
                    return
                for key, events in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None and key.data.connection.fileno() >= 0:
                        self._serve_reader(key.data, events)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # Out of descriptors, most likely: a link that ends frees one, and until then this must not spin.
            time.sleep(0.01)
            return
        if len(self._readers) >= _MAX_LINKS:
            connection.close()
            return
        connection.setblocking(False)
        reader = _Reader(connection)
        self._readers[connection.fileno()] = reader
        self._selector.register(connection, selectors.EVENT_READ, reader)
        self._answer(reader)

    def _serve_reader(self, reader: _Reader, events: int) -> None:
        if events & selectors.EVENT_READ:
            try:
                asked = reader.connection.recv(64)
            except BlockingIOError:
                asked = None
            except OSError:
                asked = b""
            if asked is not None:
                if not asked or asked.strip(_QUESTION):
                    self._drop(reader)
                    return
                reader.questions += len(asked)
                self._answer(reader)
        self._flush(reader)

    def _answer(self, reader: _Reader) -> None:
        if self._metadata is None:
            return
        body = self._encoder.encode(_Answer(self._metadata, reader.questions))
        reader.unsent += _LENGTH.pack(len(body)) + body
        self._flush(reader)

    def _flush(self, reader: _Reader) -> None:
        if reader.connection.fileno() < 0:
            return
        try:
            while reader.unsent:
                del reader.unsent[: reader.connection.send(reader.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(reader)
            return
        if len(reader.unsent) > _MAX_UNREAD_BYTES:
            self._drop(reader)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if reader.unsent else 0)
        self._selector.modify(reader.connection, wanted, reader)

    def _drop(self, reader: _Reader) -> None:
        self._selector.unregister(reader.connection)
        del self._readers[reader.connection.fileno()]
        reader.connection.close()


class MetadataLink:
    """Asks the engine `session_id` ("host:port/identity") for its metadata; nothing here blocks.

    Raises TransferError if the id has no address that resolves.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        place, _, self._identity = session_id.rpartition("/")
        host, _, port = place.rpartition(":")
        if not self._identity:
            raise TransferError(
                f"peer {session_id} has no address that resolves (it is no HOST:PORT/NAME); {FROM_HANDSHAKE}"
            )
        family, kind, protocol, address = resolve_peer(session_id, host, port)
        self._decoder = msgspec.msgpack.Decoder(_Answer)
        self._received = bytearray()
        self._connected = False
        self._questions = 0
        self._answer: _Answer | None = None
        self.waiting_since = time.monotonic()
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self._socket.connect_ex(address)

    def ask(self) -> None:
        """Ask once more; `metadata` is None until the answer is there."""
        self._questions += 1
        self.waiting_since = time.monotonic()
        # A socket that cannot take one byte belongs to a peer that is gone or stopped: `metadata` tells.
        with contextlib.suppress(OSError):
            self._socket.send(_QUESTION)

    def metadata(self) -> Metadata | None:
        """What the engine told last; None while an answer is missing.

        Raises:
            TransferError: nobody is there, another engine is there, or what it said is malformed.
        """
        try:
            if not self._connected and not self._finish_connecting():
                return None
            self._read()
        except OSError as error:
            raise TransferError(
                f"peer {self._session_id} is not there ({error.strerror or error}); {FROM_HANDSHAKE}"
            ) from None
        if self._answer is None or self._answer.questions < self._questions:
            return None
        return self._answer.metadata

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _finish_connecting(self) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        if not poller.poll(0):
            return False
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            raise OSError(code, os.strerror(code))
        self._connected = True
        return True

    def _read(self) -> None:
        while True:
            try:
                chunk = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                raise OSError("it closed its engine or died")
            self._received += chunk
            while (body := self._take_frame()) is not None:
                self._answer = self._decoded(body)

    def _take_frame(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_ANSWER_BYTES:
            raise self._malformed(f"an answer of {length:,} bytes, over the limit of {MAX_ANSWER_BYTES:,}")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return body

    def _decoded(self, body: bytes) -> _Answer:
        try:
            answer = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._malformed(str(error)) from None
        if answer.metadata.identity != self._identity:
            raise TransferError(
                f"peer {self._session_id} is not there: engine {answer.metadata.identity!r} has its port now; "
                f"{FROM_HANDSHAKE}"
            )
        return answer

    def _malformed(self, what: str) -> TransferError:
        return TransferError(
            f"peer {self._session_id} does not answer like a NIXL engine of cpkv ({what}); {FROM_HANDSHAKE}"
        )


def _no_address(host: str, error: OSError) -> str:
    return (
        f"host {host!r} does not resolve or is no address of this machine ({error}), so no peer could reach this "
        "engine; give an address of this machine"
    )
