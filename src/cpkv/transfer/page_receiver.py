"""The decode side of transfers: the state machine with a pool, an allocator and a transfer engine.

control messages -> TransferReceiver -> pages set aside, free, in quarantine
writes of the engine -> pool            (one allocation pair per decode owner, all registered with one engine)
quarantine that nobody ends, or that the next request needs -> no transfer under way -> engine closed, another made
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.config import metric_names
from cpkv.errors import BusyError, ProtocolError, TransferError
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.pool.page_pool import POISON_BYTE, PagePool
from cpkv.protocol import messages as m
from cpkv.protocol.receiver import Incoming, TransferReceiver
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.runs import Region

LOG = logging.getLogger(__name__)
STALL_FACTOR = 10


def open_target_pool(
    geometry: PoolGeometry,
    local_pages: int,
    backend: TransferBackend,
    *,
    poison: bool = False,
    pinned: bool = False,
) -> PagePool:
    """A pool that peers of an engine can write into: in memory of the engine where it insists on that.

    With `pinned`, and where the engine insists on nothing, in memory that a GPU copies from at full speed.

    Raises:
        ConfigError: the memory is not there.
    """
    page_bytes = (geometry.latent_page_bytes, geometry.index_page_bytes)
    memory = [backend.allocate_target(local_pages * size) for size in page_bytes]
    if memory[0] is None or memory[1] is None:
        return PagePool(geometry, local_pages, poison=poison, pinned=pinned)
    latent, index = torch.frombuffer(memory[0], dtype=torch.uint8), torch.frombuffer(memory[1], dtype=torch.uint8)
    if poison:
        latent.fill_(POISON_BYTE)
        index.fill_(POISON_BYTE)
    return PagePool(geometry, local_pages, memory=(latent, index))


class PageReceiver:
    """Takes pages for one decode worker. One thread owns it.

    Args:
        pools: by decode owner; local page p of owner o is the allocator's page p * owners + o.
        allocator: of the decode side.
        make_backend: makes a transfer engine; called again after one had to be closed.
        vocab_size: tokens that the model knows.
        lease_s: a prefill that says nothing for so long is taken for dead.
        progress_s: a quarantine that nobody ends is ended after so long; a transfer that does not move on is given up
            after ten times that.
        poison: fill pages before they are written, and after they are freed.
        backend: the engine to begin with, where the pools lie in its memory; made here otherwise.

    Raises:
        TransferError: the engine does not start, or the memory cannot be registered.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        allocator: PageAllocator,
        make_backend: Callable[[], TransferBackend],
        *,
        vocab_size: int,
        lease_s: float,
        progress_s: float,
        poison: bool = False,
        backend: TransferBackend | None = None,
    ) -> None:
        self._pools = tuple(pools)
        self.allocator = allocator
        self._make_backend = make_backend
        self._poison = poison
        self._progress_s = progress_s
        self._backend = self._registered(make_backend() if backend is None else backend)
        self._targets = self._name_targets()
        self._draining = ""
        self._wants_rebuild = False
        self._quarantined_since: float | None = None
        self._completed = self._given_up = self._rebuilds = 0
        self._receiver = TransferReceiver(
            self,
            page_size=pools[0].geometry.page_size,
            targets=lambda: self._targets,
            vocab_size=vocab_size,
            lease_s=lease_s,
            # A prompt that waits for its turn, or a long chunk, moves no page and is sound: heartbeats vouch for it.
            progress_s=STALL_FACTOR * progress_s,
        )

    @property
    def lease_s(self) -> float:
        """How long a silent prefill is believed in."""
        return self._receiver.lease_s

    @property
    def arriving(self) -> int:
        """Transfers under way."""
        return self._receiver.arriving

    @property
    def requests(self) -> Mapping[str, Incoming]:
        """Requests that hold pages, by id."""
        return self._receiver.requests

    def complete(self, request_id: str) -> Incoming:
        """A request that can be decoded; ProtocolError where there is none."""
        return self._receiver.complete(request_id)

    def local_pages(self, pages: Sequence[int]) -> list[tuple[PagePool, int]]:
        """The pool and local page of each page."""
        placement = self.allocator.placement
        return [(self._pools[placement.owner(page)], placement.local_page(page)) for page in pages]

    def stop_admitting(self, why: str) -> None:
        """Refuse new transfers; those under way go on."""
        self._draining = why

    def handle(self, message: Any, sender: m.SenderDescription) -> Any:
        """Act on a message of the transfer protocol and return the answer.

        Raises:
            CpkvError: whatever is wrong with it.
        """
        now = time.monotonic()
        receiver = self._receiver
        if isinstance(message, m.OpenTransfer):
            return self._open(message, sender, now)
        if isinstance(message, m.PagesSent):
            return receiver.pages_sent(message, sender, self._arrived_digests(message), now)
        if isinstance(message, m.FinishTransfer):
            return self._finish(message, sender, now)
        if isinstance(message, m.AbortTransfer):
            LOG.info("request %s: attempt %d is aborted: %s", message.request_id, message.attempt, message.cause)
            before = len(receiver.requests)
            answer = receiver.abort(message, sender, now)
            self._given_up += before - len(receiver.requests)
            return answer
        if isinstance(message, m.WritesDrained):
            return receiver.drained(message, sender, now)
        if isinstance(message, m.ReleaseRequest):
            return receiver.release(message, sender, now)
        receiver.heard(sender, now)
        if isinstance(message, m.Heartbeat):
            return m.Done()
        raise ProtocolError(f"{type(message).__name__} is no message of the transfer protocol")

    def heard(self, sender: m.SenderDescription) -> None:
        """A prefill said something else: its lease begins anew."""
        self._receiver.heard(sender, time.monotonic())

    def tick(self, now: float) -> None:
        """Give up what stalled, and end a quarantine that nobody else ends."""
        for ended in self._receiver.tick(now):
            LOG.warning("request %s: attempt %d was given up: %s", *ended)
            self._given_up += 1
        if not self._receiver.quarantined:
            self._quarantined_since, self._wants_rebuild = None, False
            return
        if self._quarantined_since is None:
            self._quarantined_since = now
        overdue = self._wants_rebuild or now - self._quarantined_since > self._progress_s
        if overdue and not self._receiver.arriving:
            self._rebuild_engine()

    def metrics(self) -> dict[str, float]:
        """Values by name; see `cpkv.config.metric_names`."""
        allocator = self.allocator
        held = allocator.capacity_pages - allocator.free_pages - allocator.quarantined_pages
        return {
            metric_names.TRANSFERS_OPEN: self._receiver.arriving,
            metric_names.REQUESTS_HELD: len(self._receiver.requests),
            metric_names.PAGES_FREE: allocator.free_pages,
            metric_names.PAGES_HELD: held,
            metric_names.PAGES_QUARANTINED: allocator.quarantined_pages,
            metric_names.TRANSFERS_COMPLETED: self._completed,
            metric_names.TRANSFERS_GIVEN_UP: self._given_up,
            metric_names.ENGINE_REBUILDS: self._rebuilds,
        }

    def close(self) -> None:
        """End every transfer, then the engine: nothing is written into the pools any more."""
        self._receiver.end_arriving("the decode worker ends")
        self._backend.close()
        self._receiver.engine_closed()

    def _open(self, message: m.OpenTransfer, sender: m.SenderDescription, now: float) -> m.TransferOpened:
        if self._draining:
            raise TransferError(f"request {message.request_id} is not taken: {self._draining}")
        if self._wants_rebuild and self._receiver.arriving:
            raise BusyError(
                f"request {message.request_id} has to wait: {self.allocator.quarantined_pages} pages are in quarantine "
                f"until {self._receiver.arriving} transfers have ended"
            )
        self.tick(now)
        try:
            opened = self._receiver.open(message, sender, now)
            LOG.info("request %s: attempt %d: %d pages wanted", message.request_id, message.attempt, len(opened.pages))
            return opened
        except BusyError:
            needed = self.allocator.placement.pages_for(message.prompt_tokens + message.max_new_tokens)
            if needed <= self.allocator.free_pages + self.allocator.quarantined_pages:
                self._wants_rebuild = True
            raise

    def _finish(self, message: m.FinishTransfer, sender: m.SenderDescription, now: float) -> m.TransferComplete:
        before = self._receiver.arriving
        answer = self._receiver.finish(message, sender, now)
        if self._receiver.arriving < before:
            self._completed += 1
            LOG.info("request %s: attempt %d: every page has arrived", message.request_id, message.attempt)
        return answer

    def _arrived_digests(self, message: m.PagesSent) -> list[str]:
        """Of the pages as they lie here; none for what is refused anyway."""
        request = self._receiver.requests.get(message.request_id)
        if not message.digests or request is None:
            return []
        if any(not 0 <= position < len(request.pages) for position in message.positions):
            return [""] * len(message.digests)
        pages = [request.pages[position] for position in message.positions]
        return [pool.page_digest(local_page) for pool, local_page in self.local_pages(pages)]

    def _registered(self, backend: TransferBackend) -> TransferBackend:
        try:
            for pool in self._pools:
                for span in pool.regions():
                    backend.register(Region(span.address, span.length))
        except TransferError:
            backend.close()
            raise
        return backend

    def _name_targets(self) -> tuple[m.TransferTarget, ...]:
        return tuple(
            m.TransferTarget(
                self._backend.session_id,
                tuple(m.MemoryRegion(span.address, span.length) for span in pool.regions()),
            )
            for pool in self._pools
        )

    def _rebuild_engine(self) -> None:
        pages = self.allocator.quarantined_pages
        self._backend.close()
        attempts = self._receiver.engine_closed()
        self._rebuilds += 1
        self._backend = self._registered(self._make_backend())
        self._targets = self._name_targets()
        self._quarantined_since, self._wants_rebuild = None, False
        LOG.warning("transfer engine rebuilt: %d pages of %d attempts have left quarantine", pages, attempts)

    # What the state machine needs of a page store.

    @property
    def capacity_pages(self) -> int:
        """Pages that can be held in all."""
        return self.allocator.capacity_pages

    def allocate(self, request_id: str, count: int) -> tuple[int, ...]:
        """Set pages aside."""
        pages = self.allocator.allocate(request_id, count)
        self._fill(pages)
        return pages

    def free(self, request_id: str) -> tuple[int, ...]:
        """Give pages back."""
        pages = self.allocator.free(request_id)
        self._fill(pages)
        return pages

    def quarantine(self, request_id: str) -> tuple[int, ...]:
        """Keep pages out of use."""
        return self.allocator.quarantine(request_id)

    def release_quarantine(self, request_id: str) -> tuple[int, ...]:
        """Give quarantined pages back."""
        pages = self.allocator.release_quarantine(request_id)
        self._fill(pages)
        return pages

    def _fill(self, pages: Sequence[int]) -> None:
        if self._poison:
            for pool, local_page in self.local_pages(pages):
                pool.poison([local_page])
