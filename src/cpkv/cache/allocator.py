"""Which pages a request holds. Owners stay balanced: the i-th page of a request comes from class (start + i) % N.

Four ranks, one free list per owner class; a request of 6 pages that starts at class 2:

    class 0  [4 8 12 ..]      i = 2            class 2  [6 10 14 ..]     i = 0, 4
    class 1  [5 9 13 ..]      i = 3            class 3  [7 11 15 ..]     i = 1, 5
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cpkv.errors import AllocatorError, CapacityError
from cpkv.layout.capacity import allocatable_pages
from cpkv.layout.placement import Page, PagePlacement
from cpkv.layout.pool_geometry import local_pages


@dataclass
class _Chain:
    """A request's pages, in order of their logical page position."""

    start: int
    pages: list[Page] = field(default_factory=list)


class PageAllocator:
    """Hands out logical pages; one instance beside the scheduler, none on the ranks.

    Not thread-safe: one thread owns it.

    Args:
        num_pages: logical pages, the `cp_size` reserved ones included; a multiple of cp_size.
        placement: decides the owner class of a page.
        shuffle_seed: shuffles the free lists, so that no caller can lean on contiguous or sorted pages.
        option: what sets `num_pages`, for advice in errors.

    Raises:
        ConfigError: `num_pages` does not fit the placement.
    """

    def __init__(
        self,
        num_pages: int,
        placement: PagePlacement,
        shuffle_seed: int | None = None,
        *,
        option: str = "--num-pages",
    ) -> None:
        local_pages(num_pages, placement)
        self.num_pages = num_pages
        self.placement = placement
        self.option = option
        allocatable = list(range(placement.reserved_pages, num_pages))
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(allocatable)
        self._free: tuple[deque[Page], ...] = tuple(deque() for _ in range(placement.cp_size))
        for page in allocatable:
            self._free[placement.owner(page)].append(Page(page))
        self._chains: dict[str, _Chain] = {}
        self._quarantined: dict[str, list[Page]] = {}

    def __repr__(self) -> str:
        """Pages free, held and in quarantine."""
        held = sum(len(chain.pages) for chain in self._chains.values())
        return f"PageAllocator({self.free_pages} free, {held} held, {self.quarantined_pages} in quarantine)"

    @property
    def capacity_pages(self) -> int:
        """Pages that can be allocated in all."""
        return allocatable_pages(self.num_pages // self.placement.cp_size, self.placement)

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now, over all owners."""
        return sum(len(pages) for pages in self._free)

    @property
    def quarantined_pages(self) -> int:
        """Pages that a failed transfer may still write to."""
        return sum(len(pages) for pages in self._quarantined.values())

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that hold pages."""
        return tuple(self._chains)

    def pages_of(self, request_id: str) -> tuple[Page, ...]:
        """The pages of a request, by logical page position."""
        return tuple(self._chain(request_id).pages)

    def allocate(self, request_id: str, count: int) -> tuple[Page, ...]:
        """Append `count` pages to a request's chain and return them; nothing changes when they are not there.

        Raises:
            CapacityError: fewer pages are free, with the --num-pages that would do.
        """
        if count > self.free_pages:
            missing = count - self.free_pages
            enough = -(-(self.num_pages + missing) // self.placement.cp_size) * self.placement.cp_size
            raise CapacityError(
                f"request {request_id} needs {count} pages, {self.free_pages} are free of {self.capacity_pages}; "
                f"raise {self.option} to {enough}"
            )
        chain = self._chains.get(request_id)
        if chain is None:
            start = max(range(len(self._free)), key=lambda owner: len(self._free[owner]))
            chain = self._chains[request_id] = _Chain(start)
        taken = []
        for _ in range(count):
            page = self._take(chain.start + len(chain.pages))
            chain.pages.append(page)
            taken.append(page)
        return tuple(taken)

    def _take(self, preferred: int) -> Page:
        """A page of class `preferred`, or of the next class that has one."""
        cp_size = self.placement.cp_size
        for step in range(cp_size):
            pages = self._free[(preferred + step) % cp_size]
            if pages:
                return pages.popleft()
        raise AllocatorError("no class has a free page although free_pages said so")

    def free(self, request_id: str) -> tuple[Page, ...]:
        """Give back all pages of a request.

        Raises:
            AllocatorError: the request holds nothing: freed twice, or never allocated.
        """
        pages = self._chain(request_id).pages
        del self._chains[request_id]
        self._give_back(pages)
        return tuple(pages)

    def quarantine(self, request_id: str) -> tuple[Page, ...]:
        """Take a request's pages out of use without making them free: a failed transfer may still touch them."""
        pages = self._chain(request_id).pages
        del self._chains[request_id]
        self._quarantined.setdefault(request_id, []).extend(pages)
        return tuple(pages)

    def release_quarantine(self, request_id: str) -> tuple[Page, ...]:
        """Make quarantined pages free again: the engine that could touch them is drained or dead.

        Raises:
            AllocatorError: the request has no page in quarantine.
        """
        if request_id not in self._quarantined:
            raise AllocatorError(f"request {request_id} has no page in quarantine; released twice?")
        pages = self._quarantined.pop(request_id)
        self._give_back(pages)
        return tuple(pages)

    def reclaim(self, request_id: str) -> tuple[Page, ...]:
        """Make a request's pages free, whether it holds them or they are in quarantine.

        Raises:
            AllocatorError: it has none.
        """
        if request_id in self._quarantined:
            return self.release_quarantine(request_id)
        return self.free(request_id)

    def _give_back(self, pages: list[Page]) -> None:
        for page in pages:
            self._free[self.placement.owner(page)].append(page)

    def _chain(self, request_id: str) -> _Chain:
        if request_id not in self._chains:
            raise AllocatorError(f"request {request_id} holds no pages; freed twice, or never allocated?")
        return self._chains[request_id]

    def check(self) -> None:
        """Verify every invariant: each page in exactly one place, in its own class, none reserved, none lost.

        Raises:
            AllocatorError: naming the page and the places.
        """
        place_of: dict[Page, str] = {}
        places: list[tuple[str, Iterable[Page]]] = [
            (f"free list {owner}", pages) for owner, pages in enumerate(self._free)
        ]
        places += [(f"request {name}", chain.pages) for name, chain in self._chains.items()]
        places += [(f"quarantine of {name}", pages) for name, pages in self._quarantined.items()]
        for place, pages in places:
            for page in pages:
                if page in place_of:
                    raise AllocatorError(f"page {page} is in {place_of[page]} and in {place}")
                if not self.placement.reserved_pages <= page < self.num_pages:
                    raise AllocatorError(f"page {page} in {place} is reserved or out of range")
                place_of[page] = place
        for owner, pages in enumerate(self._free):
            wrong = [page for page in pages if self.placement.owner(page) != owner]
            if wrong:
                raise AllocatorError(
                    f"page {wrong[0]} of owner {self.placement.owner(wrong[0])} is in free list {owner}"
                )
        if len(place_of) != self.capacity_pages:
            raise AllocatorError(f"{self.capacity_pages - len(place_of)} of {self.capacity_pages} pages are lost")
