"""The processes of the transfer benchmark: four senders and one receiver, driven over pipes by the benchmark itself.

benchmark --OpenTransfer, FinishTransfer-> receiver: MessageServer, PageReceiver, target pool
benchmark --pipe: page_transfer, raw, ..-> sender r: SenderThread, PageSender, source pool --bytes, reports-> receiver
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

import numpy as np
import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.config.names import TransferName
from cpkv.errors import ProtocolError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.row_format import RowFormat
from cpkv.pool.page_pool import PagePool
from cpkv.protocol.messages import Hello, SenderDescription, ToDecode, Welcome
from cpkv.testing.sample_pool import SAMPLE_POOL
from cpkv.transfer.backend import Peer, Region, Run, Runs, TransferBackend
from cpkv.transfer.backends import open_backend
from cpkv.transfer.channel import listen
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.page_receiver import PageReceiver, open_target_pool
from cpkv.transfer.page_sender import FailedNews, PageSender, SendOrder, TakenNews
from cpkv.transfer.report_link import DecodeReportLink
from cpkv.transfer.sender_thread import SenderThread
from cpkv.transfer.server import Connection, MessageServer

HOST = "127.0.0.1"
SENDERS = 4
LEASE_S = 600.0
PATIENCE_S = 60.0
TRANSFER_TIMEOUT_S = 20.0
# Those of DeepSeek-V3.2 and GLM-5 but for the width of a latent row (576 there): so many layers of it fill 1 KiB * 64
# as nearly as whole values can.
LAYERS = 61
ROWS = RowFormat("bfloat16", kv_lora_rank=473, rope_dim=64, index_dtype="bfloat16", index_dim=128)


class Bench(NamedTuple):
    """What all processes of one group know.

    Attributes:
        backend: its name.
        page_size: tokens of a page, LAYERS layers each.
        sender_pages: that each sender sends in a round.
        secret: of the control connections, and of the engine where it has one.
    """

    backend: TransferName
    page_size: int
    sender_pages: int
    secret: str

    @property
    def geometry(self) -> PoolGeometry:
        """A page of every layer, and of the index keys of every layer."""
        return PoolGeometry(ROWS, self.page_size, tuple(range(LAYERS)))

    def open_engine(self) -> TransferBackend:
        """A transfer engine of this process."""
        return open_backend(self.backend, HOST, secret=self.secret, transfer_timeout_s=TRANSFER_TIMEOUT_S)


class Interval(NamedTuple):
    """When something began and ended, by a clock that all processes of a host share, and the CPU seconds it took."""

    begun: float
    ended: float
    cpu: float

    @classmethod
    def of(cls, work: Callable[[], None]) -> Interval:
        """Time something, all threads of this process included."""
        cpu, begun = time.process_time(), time.monotonic()
        work()
        return cls(begun, time.monotonic(), time.process_time() - cpu)


class Counted(NamedTuple):
    """What one sender handed to its engine for one request.

    Attributes:
        descriptors: runs before any is merged, by pool.
        pages: sent.
        targets: by region of the receiver, offset and length [runs, 2] of each run.
    """

    descriptors: tuple[int, ...]
    pages: int
    targets: tuple[np.ndarray, ...]


def hello(rank: int) -> Hello:
    """What a sender, or the scheduler as rank -1, says to the receiver."""
    return Hello(SAMPLE_POOL, SenderDescription(rank=rank, cp_size=SENDERS, strategy="zigzag", instance="benchmark"))


class Receiver:
    """The receiving process: a pool with shuffled pages behind a port."""

    def __init__(self, bench: Bench) -> None:
        engine = bench.open_engine()
        pages = SENDERS * bench.sender_pages + 2
        self._pool = open_target_pool(bench.geometry, pages, engine)
        self._receiver = PageReceiver(
            (self._pool,),
            PageAllocator(pages, PagePlacement(bench.page_size, 1), shuffle_seed=1),
            bench.open_engine,
            vocab_size=1,
            lease_s=LEASE_S,
            progress_s=LEASE_S,
            backend=engine,
        )
        self._server = MessageServer(listen(HOST, 0), ToDecode, self, secret=bench.secret, where="receiver")
        self._server.start()

    def answer(self, connection: Connection, message: Any) -> Any:
        """Welcome a sender, or act on its message."""
        if isinstance(message, Hello):
            connection.state = message.sender
            return Welcome(message.pool, LEASE_S)
        if connection.state is None:
            raise ProtocolError("a message came before Hello")
        return self._receiver.handle(message, connection.state)

    def closed(self, connection: Connection) -> None:
        """Nothing hangs on a connection."""

    def tick(self, now_s: float) -> None:
        """As a decode worker does."""
        self._receiver.tick(now_s)

    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def cpu_seconds(self) -> float:
        """That this process has taken."""
        return time.process_time()

    def digests(self, pages: Sequence[int]) -> list[str]:
        """Of pages as they lie here; they are wiped then, so that no later round can lean on this one."""
        found = [self._pool.page_digest(page) for page in pages]
        self._pool.poison(list(pages))
        return found

    def close(self) -> None:
        """End server and engine."""
        self._server.close()
        self._receiver.close()


class Sender:
    """One sending process. What the page sender hands to the engine is noted, so that it can be handed over bare."""

    def __init__(self, bench: Bench, rank: int, port: int, barrier: threading.Barrier) -> None:
        self._barrier = barrier
        self._engine = bench.open_engine()
        self._pool = PagePool(bench.geometry, bench.sender_pages + 1)
        fill_random(self._pool, rank)
        self._noted: list[tuple[Peer, Runs]] = []
        self._order: SendOrder | None = None
        self._submit = self._engine.submit
        self._engine.submit = self._submit_noted  # type: ignore[method-assign]
        page_sender = PageSender(
            rank,
            self._engine,
            self._pool,
            lambda: DecodeReportLink(DecodeLink(HOST, port, hello(rank), secret=bench.secret, timeout_s=PATIENCE_S)),
        )
        self._thread = SenderThread(page_sender, LEASE_S)

    def page_transfer(self, order: SendOrder) -> Interval:
        """Send pages as a rank does, until the receiver has taken all of them."""
        self._order = order
        self._noted = []

        def send() -> None:
            self._thread.order(order)
            left = len(order.moves)
            while left:
                came = self._thread.news(PATIENCE_S)
                if not came:
                    raise TimeoutError(f"{left} pages were not taken in {PATIENCE_S:g} s")
                for news in came:
                    if isinstance(news, FailedNews):
                        raise news.error
                    if isinstance(news, TakenNews):
                        left -= len(news.positions)

        self._barrier.wait(PATIENCE_S)
        return Interval.of(send)

    def raw(self) -> Interval:
        """Hand the runs of the last page transfer to the engine as one transfer. Its thread has nothing to do now."""
        return self._timed(self._noted[0][0], Runs.joined([runs for _, runs in self._noted]))

    def page_major(self, pages: int) -> Interval:
        """The first `pages` of the last order, a run per page and pool."""
        peer, moves = self._noted[0][0], self._ordered().moves[:pages]
        here, there = [move.source for move in moves], [move.target for move in moves]
        pairs = zip(self._pool.page_spans(0), peer.regions, strict=True)
        spans = [(span.address, region.address, span.length) for span, region in pairs]
        return self._timed(peer, Runs.of_pages(here, there, spans))

    def layer_major(self, pages: int) -> Interval:
        """As many bytes of as many pages, where both ends keep layer after layer: a run per page, layer and pool."""
        peer, moves = self._noted[0][0], self._ordered().moves[:pages]
        runs = []
        for ours, theirs in zip(self._pool.regions(), peer.regions, strict=True):
            piece = ours.length // (self._pool.local_pages * LAYERS)
            for layer in range(LAYERS):
                source = ours.address + layer * (ours.length // LAYERS)
                target = theirs.address + layer * (theirs.length // LAYERS)
                runs += [Run(source + move.source * piece, target + move.target * piece, piece) for move in moves]
        return self._timed(peer, Runs.of(runs))

    def counted(self) -> Counted:
        """What the last page transfer handed to the engine."""
        runs = Runs.joined([submitted for _, submitted in self._noted]).as_list()
        regions = [Region(span.address, span.length) for span in self._pool.regions()]
        descriptors = tuple(sum(region.holds(run.source, run.length) for run in runs) for region in regions)
        targets = tuple(
            np.array(
                [(run.target - region.address, run.length) for run in runs if region.holds(run.target, run.length)]
            ).reshape(-1, 2)
            for region in self._noted[0][0].regions
        )
        return Counted(descriptors, len(self._ordered().moves), targets)

    def digests(self) -> dict[int, str]:
        """Of the pages of the last order, by position."""
        return {move.position: self._pool.page_digest(move.source) for move in self._ordered().moves}

    def close(self) -> None:
        """End thread and engine."""
        self._thread.close(TRANSFER_TIMEOUT_S)
        self._engine.close()

    def _ordered(self) -> SendOrder:
        if self._order is None:
            raise ProtocolError("nothing was sent yet")
        return self._order

    def _submit_noted(self, peer: Peer, runs: Runs | Sequence[Run]) -> int:
        self._noted.append((peer, Runs.of(runs)))
        return self._submit(peer, runs)

    def _timed(self, peer: Peer, runs: Runs) -> Interval:
        def send() -> None:
            status = self._engine.wait(self._submit(peer, runs), PATIENCE_S)
            if status.state != "done":
                raise TimeoutError(f"a bare transfer is {status.state} after at most {PATIENCE_S:g} s: {status.cause}")

        self._barrier.wait(PATIENCE_S)
        return Interval.of(send)


def fill_random(pool: PagePool, seed: int) -> None:
    """Bytes that differ from page to page and rank to rank."""
    for number, memory in enumerate((pool.latent, pool.index)):
        flat = memory.view(-1).numpy()
        flat[:] = np.frombuffer(np.random.default_rng((seed, number)).bytes(flat.size), dtype=np.uint8)


def serve_receiver(pipe: Pipe, bench: Bench) -> None:
    """The receiver's process."""
    torch.set_num_threads(1)
    _serve(pipe, lambda: Receiver(bench))


def serve_sender(pipe: Pipe, bench: Bench, rank: int, port: int, barrier: threading.Barrier) -> None:
    """A sender's process."""
    torch.set_num_threads(1)
    _serve(pipe, lambda: Sender(bench, rank, port, barrier))


def _serve(pipe: Pipe, start: Callable[[], Receiver | Sender]) -> None:
    """Answer (method, arguments) until `close`: (result, "") each, or (None, what went wrong)."""
    try:
        served = start()
        # As a worker of the engine does: all that was imported is not looked through in the middle of some round.
        gc.collect()
        gc.freeze()
        pipe.send((None, ""))
        while True:
            method, arguments = pipe.recv()
            pipe.send((getattr(served, method)(*arguments), ""))
            if method == "close":
                return
    except EOFError:
        # The benchmark has ended: nothing here outlives it, since all threads are daemons.
        return
    except Exception:
        pipe.send((None, traceback.format_exc()))
