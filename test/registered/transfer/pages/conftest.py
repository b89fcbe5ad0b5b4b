"""A hand-over without a model: pools of prefill ranks, a decode worker behind a real port, and what they must hold.

Ranks are plain objects, called one after the other. Rows are random bytes that depend on request, position and layer
alone, so that each mode and each number of ranks must bring the same; whatever nobody wrote is 0xFF.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.engine.decode_worker import DecodeServer
from cpkv.engine.pool_description import describe_geometry
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.pool_geometry import PoolGeometry, index_slots, local_pages
from cpkv.layout.row_format import RowFormat
from cpkv.layout.transfer_map import PageMove, page_moves, sender_of_positions
from cpkv.ops.reference.index_keys import unpack_index_keys
from cpkv.pool.page_pool import PagePool
from cpkv.protocol import messages as m
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.waiting import eventually
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.channel import listen
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.inprocess import InProcessBackend, InProcessFabric
from cpkv.transfer.page_receiver import PageReceiver
from cpkv.transfer.page_sender import FailedNews, News, PageSender, SendOrder, TakenNews
from cpkv.transfer.report_link import DecodeReportLink

FORMATS = {
    "float32": RowFormat("float32", 6, 2, "float32", 3),
    "fp8": RowFormat("bfloat16", 5, 2, "fp8", 4),
}


def geometry_of(page_size: int, has_indexer: tuple[bool, ...], index_dtype: str) -> PoolGeometry:
    return PoolGeometry(FORMATS[index_dtype], page_size, index_slots(has_indexer))


GEOMETRY = geometry_of(4, (True, False, True), "fp8")


def describe(geometry: PoolGeometry, transfer: str) -> m.PoolDescription:
    return describe_geometry("none", geometry, transfer, norm_eps=1e-5, latent_norm_eps=1e-6)


class SendReport(NamedTuple):
    """What a rank sent."""

    pages: int
    num_bytes: int


class Decode:
    """A decode worker that stores pages and decodes nothing. `log` holds every message that it has taken."""

    def __init__(self, geometry: PoolGeometry, num_pages: int, backend: TransferBackend, seed: int) -> None:
        self.placement = PagePlacement(geometry.page_size, 1)
        self.allocator = PageAllocator(num_pages, self.placement, shuffle_seed=seed)
        self.pool = PagePool(geometry, num_pages, poison=True)
        self.backend = backend
        self.receiver = PageReceiver(
            (self.pool,),
            self.allocator,
            lambda: backend,
            vocab_size=512,
            lease_s=60.0,
            progress_s=60.0,
            backend=backend,
        )
        self.log: list[Any] = []
        handle = self.receiver.handle
        self.receiver.handle = lambda message, sender: (self.log.append(message), handle(message, sender))[1]  # type: ignore[method-assign]
        self._server = DecodeServer(
            listen("127.0.0.1", 0),
            self.receiver,  # type: ignore[arg-type]
            m.Welcome(describe(geometry, backend.name), self.receiver.lease_s),
            secret="",
            lock=threading.Lock(),
            threads=1,
        )
        self._server.start()
        self.port = self._server.port

    def content(self, pages: Sequence[int]) -> torch.Tensor:
        """Everything that pages hold: uint8 [pages, page bytes]."""
        chosen = list(pages)
        return torch.cat([self.pool.latent[chosen].flatten(1), self.pool.index[chosen].flatten(1)], dim=1)

    def check_rows(self, name: str, tokens: int, pages: Sequence[int]) -> None:
        """Compare a request's rows, layer by layer and token by token, with what was written; tails stay 0xFF."""
        geometry = self.pool.geometry
        for layer, slot in enumerate(geometry.slots):
            latent, index = rows_of(name, tokens, layer, geometry)
            rows = self.pool.latent[list(pages), layer].flatten(0, 1)
            assert_same_bits(rows[:tokens], latent, f"latent rows of {name}, layer {layer}")
            assert bool((rows[tokens:] == 0xFF).all())
            if slot >= 0:
                arrived = unpack_index_keys(
                    self.pool.index[:, slot],
                    torch.tensor(pages),
                    tokens=tokens,
                    page_size=geometry.page_size,
                    key_bytes=geometry.row_format.index_key_bytes,
                )
                assert_same_bits(arrived, index, f"index keys of {name}, layer {layer}")

    def close(self) -> None:
        self._server.close()
        self.receiver.close()


class Prefill:
    """Ranks with their pools, the scheduler's allocator, and their links to a decode worker."""

    def __init__(
        self,
        geometry: PoolGeometry,
        cp_size: int,
        decode: Decode,
        make_backend: Callable[[], TransferBackend],
        *,
        shared: bool = True,
        num_pages: int = 32,
        seed: int = 5,
    ) -> None:
        self.geometry, self.cp_size = geometry, cp_size
        self.placement = PagePlacement(geometry.page_size, cp_size if shared else 1)
        self.allocator = PageAllocator(num_pages * cp_size, self.placement, shuffle_seed=seed)
        self.pools = [
            PagePool(geometry, local_pages(num_pages * cp_size, self.placement), poison=True) for _ in range(cp_size)
        ]
        self.backends = [make_backend() for _ in range(cp_size)]
        self.decode = decode
        self.links = [self._connect(decode, rank) for rank in (-1, *range(cp_size))]
        self.scheduler = self.links[0]
        self.senders: list[PageSender] = []
        self.reopen()
        self.lengths: dict[str, int] = {}
        self.targets: tuple[m.TransferTarget, ...] = ()

    def reopen(self) -> None:
        """Take the pools back from the engines and register them anew."""
        for sender in self.senders:
            assert sender.close(10.0)
        self.senders = [
            PageSender(rank, self.backends[rank], self.pools[rank], partial(self._report_link, rank))
            for rank in range(self.cp_size)
        ]

    def _hello(self, rank: int) -> m.Hello:
        sender = m.SenderDescription(rank=rank, cp_size=self.cp_size, strategy="zigzag", instance="test")
        return m.Hello(describe(self.geometry, self.decode.backend.name), sender)

    def _report_link(self, rank: int) -> DecodeReportLink:
        return DecodeReportLink(self._connect(self.decode, rank))

    def _connect(self, decode: Decode, rank: int) -> DecodeLink:
        return DecodeLink("127.0.0.1", decode.port, self._hello(rank))

    def write(self, name: str, tokens: int) -> None:
        """Allocate a request's pages and let each owner store the rows of its own."""
        self.lengths[name] = tokens
        pages = self.allocator.allocate(name, self.placement.pages_for(tokens))
        view = "replicated" if self.placement.cp_size == 1 else "full"
        spec = BatchSpec(0, (Segment(name, 0, (0,) * tokens, pages, True),), "zigzag", view)
        plan = BatchPlan.build(spec, self.placement, self.cp_size)
        for layer, slot in enumerate(self.geometry.slots):
            latent, index = rows_of(name, tokens, layer, self.geometry)
            for rank, pool in enumerate(self.pools):
                places = pool.place(plan.page_writes(rank % self.placement.cp_size))
                pool.write(layer, places, latent, index if slot >= 0 else None)

    def open(self, name: str, attempt: int = 1, new_tokens: int = 1) -> tuple[int, ...]:
        """Announce a request; the decode worker's pages."""
        senders = sender_of_positions(self.allocator.pages_of(name), self.placement, self.cp_size)
        message = m.OpenTransfer(name, attempt, self.lengths[name], new_tokens, senders, m.Sampling())
        opened = self.scheduler.ask(message, m.TransferOpened)
        self.targets = opened.targets
        return opened.pages

    def moves(self, name: str, targets: tuple[int, ...], rank: int) -> tuple[PageMove, ...]:
        """What a rank sends of a request."""
        pages = self.allocator.pages_of(name)
        senders = sender_of_positions(pages, self.placement, self.cp_size)
        own = [position for position in range(len(pages)) if senders[position] == rank]
        return page_moves(
            own,
            [pages[position] for position in own],
            [targets[position] for position in own],
            self.placement,
            PagePlacement(self.geometry.page_size, 1),
            rank,
        )

    def send(self, name: str, targets: tuple[int, ...], attempt: int = 1) -> list[SendReport]:
        """Let every rank send what it owns, one after the other."""
        return [self.send_moves(rank, name, self.moves(name, targets, rank), attempt) for rank in range(self.cp_size)]

    def send_moves(self, rank: int, name: str, moves: Sequence[PageMove], attempt: int = 1) -> SendReport:
        """Let a rank send some pages and wait until they have arrived, or raise why they did not."""
        sender = self.senders[rank]
        sender.order(SendOrder(name, attempt, tuple(moves), self.targets))
        pages = num_bytes = 0
        for news in self.run_sender(rank):
            if isinstance(news, FailedNews):
                raise news.error
            assert isinstance(news, TakenNews)
            pages += len(news.positions)
            num_bytes += news.num_bytes
        assert pages == len(moves)
        return SendReport(pages, num_bytes)

    def run_sender(self, rank: int) -> list[News]:
        """Step a rank's sender until nothing of it is under way; what it told."""
        sender, told = self.senders[rank], list[News]()

        def idle() -> bool:
            sender.step()
            told.extend(sender.take_news())
            return not sender.busy

        eventually(idle, f"rank {rank} has nothing under way")
        return told

    def finish(self, name: str, attempt: int = 1) -> None:
        self.scheduler.ask(m.FinishTransfer(name, attempt, first_token=1), m.TransferComplete)

    def close(self) -> None:
        for sender in self.senders:
            sender.close(1.0)
        for link in self.links:
            link.close()
        for backend in self.backends:
            backend.close()


def rows_of(name: str, tokens: int, layer: int, geometry: PoolGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored rows of one layer of a request, never 0xFF: the same for every cp_size and in both modes."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {layer}".encode()))
    widths = (geometry.row_format.latent_row_bytes, geometry.row_format.index_row_bytes)
    latent, index = (torch.randint(0, 255, (tokens, width), generator=draw, dtype=torch.uint8) for width in widths)
    return latent, index


def hand_over_requests(
    geometry: PoolGeometry,
    cp_size: int,
    lengths: list[int],
    *,
    shared: bool,
    seed: int,
    make_backend: Callable[[], TransferBackend] | None = None,
) -> list[torch.Tensor]:
    """Send requests of these lengths, check all that can be; return their pages as they lie at the decode worker."""
    fabric = InProcessFabric()
    make_backend = make_backend or (lambda: InProcessBackend(fabric))
    pages_needed = 1 + sum(-(-(length + 1) // geometry.page_size) for length in lengths)
    with (
        closing(Decode(geometry, max(2, pages_needed), make_backend(), seed)) as decode,
        closing(
            Prefill(
                geometry, cp_size, decode, make_backend, shared=shared, num_pages=1 + max(1, pages_needed), seed=seed
            )
        ) as prefill,
    ):
        held: dict[str, tuple[int, ...]] = {}
        for number, length in enumerate(lengths):
            prefill.write(f"request {number}", length)
        # All are open before the first is sent, so that their pages lie among each other's.
        for number, name in enumerate(prefill.lengths, 1):
            held[name] = prefill.open(name, attempt=number)
        for number, (name, targets) in enumerate(held.items(), 1):
            reports = prefill.send(name, targets, attempt=number)
            prefill.finish(name, attempt=number)
            check_senders(decode, prefill, name, reports)
        for name, targets in held.items():
            decode.check_rows(name, prefill.lengths[name], targets)
        touched = [page for targets in held.values() for page in targets]
        untouched = [page for page in range(decode.pool.local_pages) if page not in touched]
        assert len(set(touched)) == len(touched)
        assert bool((decode.content(untouched) == 0xFF).all()), "bytes landed where no request lies"
        prefill.allocator.check()
        decode.allocator.check()
        return [decode.content(targets) for targets in held.values()]


def check_senders(decode: Decode, prefill: Prefill, name: str, reports: list[SendReport]) -> None:
    """Each position once, from its owner; and the bytes of one copy, not of cp_size."""
    pages = prefill.allocator.pages_of(name)
    sent = [message for message in decode.log if isinstance(message, m.PagesSent) and message.request_id == name]
    positions = [position for message in sent for position in message.positions]
    assert sorted(positions) == list(range(len(pages)))
    if prefill.placement.cp_size > 1:
        for message in sent:
            assert {prefill.placement.owner(pages[position]) for position in message.positions} == {message.rank}
    assert sum(report.pages for report in reports) == len(pages)
    for report in reports:
        assert report.num_bytes == report.pages * prefill.geometry.page_bytes


@pytest.fixture
def fabric() -> InProcessFabric:
    return InProcessFabric()


@pytest.fixture
def decode(fabric: InProcessFabric) -> Iterator[Decode]:
    with closing(Decode(GEOMETRY, 64, InProcessBackend(fabric), seed=11)) as worker:
        yield worker


@pytest.fixture
def prefill(fabric: InProcessFabric, decode: Decode) -> Iterator[Prefill]:
    with closing(Prefill(GEOMETRY, 3, decode, lambda: InProcessBackend(fabric))) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def hand_over() -> Callable[..., list[torch.Tensor]]:
    """See `hand_over_requests`."""
    return hand_over_requests


@pytest.fixture(scope="session")
def make_geometry() -> Callable[..., PoolGeometry]:
    """See `geometry_of`."""
    return geometry_of
