"""The decode worker: the full layout, no context parallelism, one listening port.

scheduler --commands--> DecodeWorker      starts and stops it
prefill ranks and scheduler --TCP--> server thread --> DecodeRequests (pool, allocator, model)
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.comm.threads import ThreadGroup
from cpkv.config.settings import check_decode_cp_size
from cpkv.engine.commands import DumpPool, StartDecode, TraceDecode, WorkerReady
from cpkv.engine.decode_requests import DecodeRequests
from cpkv.engine.devices import model_kernels, take_device
from cpkv.engine.forward import ForwardPass
from cpkv.engine.pool_description import describe_pool
from cpkv.errors import HandshakeError, ProtocolError
from cpkv.layout.placement import PagePlacement
from cpkv.model.checkpoint import read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.pool.page_pool import PagePool
from cpkv.protocol.messages import (
    Done,
    Hello,
    PoolDescription,
    ToDecode,
    Welcome,
    describe_mismatch,
)
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.channel import listen
from cpkv.transfer.page_receiver import PageReceiver, open_target_pool
from cpkv.transfer.server import Connection, MessageServer
from cpkv.views.counters import ViewCounters
from cpkv.views.scratch import Scratch

WHERE = "decode worker"


class DecodeWorker:
    """A decode worker after `StartDecode`.

    Args:
        start: who to be.
        make_backend: makes the transfer engine; the pool's allocations are registered with it.

    Raises:
        ConfigError: cp_size is not 1.
        TransferError: the port is taken.
    """

    def __init__(self, start: StartDecode, make_backend: Callable[[], TransferBackend]) -> None:
        check_decode_cp_size(start.cp_size)
        settings = start.settings
        device = take_device(settings.device, settings.cp_size)
        model = DsaModel.load(
            read_config(Path(start.checkpoint)), Path(start.prepared), settings.latent_norm_eps, device
        )
        geometry = model.shape.geometry(settings.page_size, settings.stored_latent_dtype, settings.index_dtype)
        placement = PagePlacement(settings.page_size, 1)
        allocator = PageAllocator(start.num_pages, placement, start.shuffle_seed, option="decode_pages")
        backend = make_backend()
        on_gpu = device.type == "cuda"
        arrives = open_target_pool(geometry, start.num_pages, backend, poison=settings.debug, pinned=on_gpu)
        pool = arrives
        if on_gpu:
            kernels = model_kernels(model.shape, settings, device)
            pool = PagePool(geometry, start.num_pages, poison=settings.debug, device=device, kernels=kernels)
        forward = ForwardPass(model, pool, ThreadGroup(1).communicator(0), ViewCounters(), Scratch(device=device))
        self._receiver = PageReceiver(
            (arrives,),
            allocator,
            make_backend,
            vocab_size=model.shape.vocab_size,
            lease_s=settings.lease_s,
            progress_s=settings.transfer_timeout_s,
            poison=settings.debug,
            backend=backend,
        )
        self._requests = DecodeRequests(forward, self._receiver, arrives)
        # Commands and connections are served by two threads.
        self._lock = threading.Lock()
        self._server = DecodeServer(
            listen(settings.host, start.port),
            self._requests,
            Welcome(describe_pool(start.model, model.shape, geometry, settings), self._receiver.lease_s),
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
            if isinstance(command, DumpPool):
                self._requests.dump(Path(command.path))
                return Done()
            if isinstance(command, TraceDecode):
                self._requests.trace_folder = command.folder
                return Done()
        raise ProtocolError(f"the decode worker takes {type(command).__name__} over its port, not as a command")

    def stop_admitting(self, why: str) -> None:
        """Refuse new transfers; those under way, and decoding, go on."""
        with self._lock:
            self._receiver.stop_admitting(why)

    @property
    def open_requests(self) -> int:
        """Requests that hold pages."""
        with self._lock:
            return len(self._receiver.requests)

    def metrics(self) -> dict[str, float]:
        """Values by name; see `cpkv.config.metric_names`."""
        with self._lock:
            return self._receiver.metrics()

    @property
    def pool_description(self) -> PoolDescription:
        """What the handshake compares."""
        return self._server.welcome.pool

    def close(self) -> None:
        """Stop listening, then give the memory back."""
        self._server.close()
        self._receiver.close()


class DecodeServer:
    """Serves prefill workers and their scheduler, each once its pools have been compared with ours.

    Args:
        listener: closed with the server.
        requests: handles what comes after the handshake.
        welcome: what this side's pages are.
        secret: of the run.
        lock: held while a message is handled.
        threads: compute threads of decoding.
    """

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
        self._requests = requests
        self.welcome = welcome
        self._lock = lock
        self._server = MessageServer(
            listener, ToDecode, self, secret=secret, where=WHERE, on_start=lambda: torch.set_num_threads(threads)
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def start(self) -> None:
        """Begin to serve."""
        self._server.start()

    def answer(self, connection: Connection, message: Any) -> Any:
        """Welcome a sender, or act on a message of one that was welcomed.

        Raises:
            CpkvError: whatever is wrong with it.
        """
        if isinstance(message, Hello):
            mismatch = describe_mismatch(self.welcome.pool, message.pool)
            if mismatch:
                raise HandshakeError(f"the pools differ: {mismatch}; start both workers with the same settings")
            connection.state = message.sender
            return self.welcome
        if connection.state is None:
            raise ProtocolError(f"{type(message).__name__} came before the handshake; send Hello first")
        with self._lock:
            return self._requests.handle(message, connection.state)

    def closed(self, connection: Connection) -> None:
        """Requests outlive the connections that they came over."""

    def tick(self, now_s: float) -> None:
        """Give up what stalled."""
        with self._lock:
            self._requests.tick(now_s)

    def close(self) -> None:
        """End the thread and every connection."""
        self._server.close()
