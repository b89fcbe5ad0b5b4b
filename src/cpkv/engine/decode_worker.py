"""The decode worker: the full layout, no context parallelism, one listening port.

scheduler --commands--> DecodeWorker      starts and stops it
prefill ranks and scheduler --TCP--> server thread --> DecodeRequests (pool, allocator, model)
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
from pathlib import Path
from typing import Any

from cpkv.cache.allocator import PageAllocator
from cpkv.comm.threads import ThreadGroup
from cpkv.config.settings import check_decode_cp_size
from cpkv.engine.commands import DumpPool, RowDigest, RowDigestIs, StartDecode, TraceDecode, WorkerReady
from cpkv.engine.decode_requests import DecodeRequests
from cpkv.engine.forward import ForwardPass
from cpkv.engine.pool_description import describe_pool
from cpkv.errors import CpkvError, HandshakeError, ProtocolError, TransferError
from cpkv.layout.placement import PagePlacement
from cpkv.model.checkpoint import read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.pool.page_pool import PagePool
from cpkv.protocol.failures import failure_of
from cpkv.protocol.messages import (
    Done,
    Hello,
    MemoryRegion,
    PoolDescription,
    SenderDescription,
    ToDecode,
    Welcome,
    describe_mismatch,
)
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.channel import Channel, listen
from cpkv.transfer.runs import Region
from cpkv.views.counters import ViewCounters
from cpkv.views.scratch import Scratch

LOG = logging.getLogger(__name__)
FRAME_TIMEOUT_S = 10.0
WHERE = "decode worker"


class DecodeWorker:
    """A decode worker after `StartDecode`.

    Args:
        start: who to be.
        backend: the pool's allocations are registered with it; closed with the worker.

    Raises:
        ConfigError: cp_size is not 1.
        TransferError: the port is taken.
    """

    def __init__(self, start: StartDecode, backend: TransferBackend) -> None:
        check_decode_cp_size(start.cp_size)
        settings = start.settings
        self._backend = backend
        model = DsaModel.load(read_config(Path(start.checkpoint)), Path(start.prepared), settings.latent_norm_eps)
        geometry = model.shape.geometry(settings.page_size, settings.stored_latent_dtype, settings.index_dtype)
        placement = PagePlacement(settings.page_size, 1)
        allocator = PageAllocator(start.num_pages, placement, start.shuffle_seed, option="decode_pages")
        self._pool = PagePool(geometry, start.num_pages, poison=settings.debug)
        for span in self._pool.regions():
            backend.register(Region(span.address, span.length))
        forward = ForwardPass(model, self._pool, ThreadGroup(1).communicator(0), ViewCounters(), Scratch())
        self._requests = DecodeRequests(forward, allocator, placement, poison=settings.debug)
        # Commands and connections are served by two threads.
        self._lock = threading.Lock()
        self._server = DecodeServer(
            listen(settings.host, start.port),
            self._requests,
            Welcome(
                pool=describe_pool(start.model, model.shape, geometry, settings),
                session_id=backend.session_id,
                regions=tuple(MemoryRegion(span.address, span.length) for span in self._pool.regions()),
            ),
            secret=start.secret,
            lock=self._lock,
            threads=start.threads,
        )

    def ready(self) -> WorkerReady:
        """Start listening."""
        self._server.start()
        return WorkerReady({}, port=self._server.port)

    def handle(self, command: Any) -> Any:
        """Answer what only whoever started the worker may ask; the rest comes over the listening port."""
        with self._lock:
            if isinstance(command, RowDigest):
                return RowDigestIs(self._requests.row_digest(command.request_id))
            if isinstance(command, DumpPool):
                self._requests.dump(Path(command.path))
                return Done()
            if isinstance(command, TraceDecode):
                self._requests.trace_folder = command.folder
                return Done()
        raise ProtocolError(f"the decode worker takes {type(command).__name__} over its port, not as a command")

    def close(self) -> None:
        """Stop listening, then give the memory back."""
        self._server.close()
        self._backend.close()


class DecodeServer:
    """Serves connections in one thread, one message at a time; a bad message closes its own connection only."""

    def __init__(
        self,
        listener: socket.socket,
        requests: DecodeRequests,
        welcome: Welcome,
        *,
        secret: str,
        lock: threading.Lock,
        threads: int,
    ) -> None:
        self._listener = listener
        self._requests = requests
        self._welcome = welcome
        self._threads = threads
        self._secret = secret
        self._lock = lock
        self._senders: dict[Channel, SenderDescription] = {}
        self._wake, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="decode server", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def _serve(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake:
                        for entry in list(selector.get_map().values()):
                            entry.fileobj.close()  # type: ignore[union-attr]
                        return
                    if key.fileobj is self._listener:
                        connection, address = self._listener.accept()
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        peer = f"prefill worker {address[0]}:{address[1]}"
                        selector.register(Channel(connection, ToDecode, peer), selectors.EVENT_READ)
                    elif not self._answer(key.fileobj):  # type: ignore[arg-type]
                        self._senders.pop(key.fileobj, None)  # type: ignore[call-overload]
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]

    def _answer(self, channel: Channel) -> bool:
        """Take one message and answer it; False when the connection is over."""
        try:
            message = channel.receive(FRAME_TIMEOUT_S)
        except ProtocolError as error:
            LOG.warning("%s: %s; connection closed", channel.peer, error)
            return False
        except TransferError:
            return False
        try:
            try:
                answer = self._act(channel, message)
            except Exception as error:  # the cause must reach the client, and other requests go on
                if not isinstance(error, CpkvError):
                    LOG.exception("%s failed", type(message).__name__)
                answer = failure_of(error, WHERE)
            try:
                channel.send(answer)
            except ProtocolError as error:
                channel.send(failure_of(error, WHERE))
        except TransferError:
            return False
        return channel in self._senders

    def _act(self, channel: Channel, message: Any) -> Any:
        if isinstance(message, Hello):
            if not hmac.compare_digest(message.secret.encode(), self._secret.encode()):
                raise HandshakeError("the secret is not that of this run; workers of one run share it")
            self._check(message.pool)
            self._senders[channel] = message.sender
            return self._welcome
        if channel not in self._senders:
            raise ProtocolError(f"{type(message).__name__} came before the handshake; send Hello first")
        with self._lock:
            return self._requests.handle(message, self._senders[channel])

    def _check(self, pool: PoolDescription) -> None:
        mismatch = describe_mismatch(self._welcome.pool, pool)
        if mismatch:
            raise HandshakeError(f"the pools differ: {mismatch}; start both workers with the same settings")

    def close(self) -> None:
        """End the thread and every connection."""
        if self._thread.is_alive():
            self._stop.send(b"x")
            self._thread.join()
        else:
            self._listener.close()
        self._stop.close()
