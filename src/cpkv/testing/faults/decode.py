"""A decode worker without a model: the engine's receiver and server, and a reader that knows what must have arrived.

finish  -> every byte of every prompt page is compared at once       a wrong byte is logged as VIOLATION, and answered
step    -> and again                                                 as a NumericsError; so is a write into a page that
digest  -> and again                                                 was free
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from cpkv.cache.allocator import PageAllocator
from cpkv.engine.commands import WorkerReady
from cpkv.engine.decode_worker import DecodeServer
from cpkv.errors import CpkvError, NumericsError, ProtocolError
from cpkv.layout.placement import Page, PagePlacement
from cpkv.pool.page_pool import PagePool
from cpkv.protocol import messages as m
from cpkv.protocol.receiver import Incoming
from cpkv.testing.faults.commands import ReadState, StartSeededDecode, StateIs
from cpkv.testing.faults.contents import (
    VOCAB_SIZE,
    is_poison,
    seeded_description,
    seeded_geometry,
    stored_digest,
    wrong_bytes,
)
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.channel import listen
from cpkv.transfer.page_receiver import PageReceiver, open_target_pool

LOG = logging.getLogger(__name__)
VIOLATION = "VIOLATION"


def violation(text: str) -> NumericsError:
    """Log what must never happen, and make an error of it."""
    LOG.error("%s: %s", VIOLATION, text)
    return NumericsError(f"{VIOLATION}: {text}")


class WatchedAllocator(PageAllocator):
    """Free pages hold poison: one that holds something else was written to after it was freed."""

    pools: tuple[PagePool, ...] = ()

    def allocate(self, request_id: str, count: int) -> tuple[Page, ...]:
        """Hand pages out, looking at them first.

        Raises:
            CapacityError: fewer pages are free.
            NumericsError: one was written to while it was free.
        """
        pages = super().allocate(request_id, count)
        self.check_poison(pages)
        return pages

    def check_poison(self, pages: tuple[Page, ...]) -> None:
        """Look at free pages.

        Raises:
            NumericsError: one was written to.
        """
        for page in pages:
            if not is_poison(self.pools[self.placement.owner(page)], self.placement.local_page(page)):
                raise violation(f"page {page} was written to while it was free")

    def check_all(self) -> None:
        """The books, and every free page.

        Raises:
            AllocatorError: the books are wrong.
            NumericsError: a free page was written to.
        """
        self.check()
        self.check_poison(tuple(page for pages in self._free for page in pages))


class SeededRequests:
    """Answers messages: those of transfers by the receiver, those of decoding by reading pages."""

    def __init__(self, receiver: PageReceiver) -> None:
        self._receiver = receiver
        self._told = ""

    def handle(self, message: Any, sender: m.SenderDescription) -> Any:
        """Act on a message of a sender that was welcomed, and return the answer.

        Raises:
            CpkvError: whatever is wrong with it.
        """
        if isinstance(message, m.Heartbeat):
            return self._receiver.handle(message, sender)
        names = ", ".join(getattr(message, "request_ids", None) or (message.request_id,))
        what = f"request {names} attempt {getattr(message, 'attempt', '-')}: {type(message).__name__}"
        try:
            answer = self._answer(message, sender)
        except CpkvError as error:
            LOG.info("%s of rank %d refused: %s", what, sender.rank, error)
            raise
        LOG.info("%s of rank %d %s", what, sender.rank, getattr(message, "positions", ""))
        return answer

    def _answer(self, message: Any, sender: m.SenderDescription) -> Any:
        if isinstance(message, m.DecodeStep):
            self._receiver.heard(sender)
            return m.DecodedTokens(tuple(self._read(name) % VOCAB_SIZE for name in message.request_ids), ())
        if isinstance(message, m.RowDigest):
            self._receiver.heard(sender)
            self._read(message.request_id)
            return m.RowDigestIs(stored_digest(self._pages(self._receiver.complete(message.request_id))))
        answer = self._receiver.handle(message, sender)
        if isinstance(message, m.FinishTransfer):
            self._read(message.request_id)
        return answer

    def tick(self, now: float) -> None:
        """Give up what stalled, and log the pages when they have changed."""
        self._receiver.tick(now)
        allocator = self._receiver.allocator
        pages = f"pages: {allocator.free_pages} free, {allocator.quarantined_pages} in quarantine"
        if pages != self._told:
            self._told = pages
            LOG.info("%s", pages)

    def _read(self, request_id: str) -> int:
        """Compare every byte of a prompt; the number that its bytes follow from."""
        incoming = self._receiver.complete(request_id)
        seed = incoming.opened.sampling.seed
        for position, (pool, local_page) in enumerate(self._pages(incoming)):
            wrong = wrong_bytes(pool, local_page, seed, position)
            if wrong:
                raise violation(f"request {request_id} of {incoming.instance}: {wrong}")
        return seed

    def _pages(self, incoming: Incoming) -> list[tuple[PagePool, int]]:
        return self._receiver.local_pages(incoming.pages[: len(incoming.opened.senders)])


class SeededDecode:
    """A decode worker after `StartSeededDecode`.

    Args:
        start: who to be.
        make_backend: makes the transfer engine.
    """

    def __init__(self, start: StartSeededDecode, make_backend: Callable[[], TransferBackend]) -> None:
        settings = start.settings
        placement = PagePlacement(settings.page_size, start.owners)
        self._allocator = WatchedAllocator(start.num_pages, placement, start.shuffle_seed, option="decode_pages")
        self._engines: list[str] = []

        def next_backend() -> TransferBackend:
            backend = make_backend()
            self._engines.append(backend.session_id)
            return backend

        first = next_backend()
        local_pages = start.num_pages // start.owners
        geometry = seeded_geometry(settings.page_size)
        pools = tuple(open_target_pool(geometry, local_pages, first, poison=True) for _ in range(start.owners))
        self._allocator.pools = pools
        self._receiver = PageReceiver(
            pools,
            self._allocator,
            next_backend,
            vocab_size=VOCAB_SIZE,
            lease_s=settings.lease_s,
            progress_s=settings.transfer_timeout_s,
            poison=True,
            backend=first,
        )
        self._lock = threading.Lock()
        self._server = DecodeServer(
            listen(settings.host, start.port),
            SeededRequests(self._receiver),  # type: ignore[arg-type]
            m.Welcome(seeded_description(settings.page_size, settings.transfer), settings.lease_s),
            secret=start.secret,
            lock=self._lock,
            threads=1,
        )

    def ready(self) -> WorkerReady:
        """Start listening."""
        self._server.start()
        return WorkerReady({}, port=self._server.port)

    def handle(self, command: Any) -> Any:
        """Check the books and say how it stands.

        Raises:
            CpkvError: the books are wrong, a free page was written to, or something else was asked.
        """
        if not isinstance(command, ReadState):
            raise ProtocolError(f"the decode worker cannot act on {type(command).__name__}")
        with self._lock:
            allocator = self._allocator
            allocator.check_all()
            return StateIs(
                threads=threading.active_count(),
                descriptors=len(os.listdir("/proc/self/fd")),
                free=allocator.free_pages,
                capacity=allocator.capacity_pages,
                quarantined=allocator.quarantined_pages,
                arriving=self._receiver.arriving,
                engines=len(self._engines),
            )

    def close(self) -> None:
        """Stop listening, then end the engine."""
        self._server.close()
        self._receiver.close()
