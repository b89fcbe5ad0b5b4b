"""How many tokens a pool can hold, counted by filling the allocator that serves it."""

from __future__ import annotations

from cpkv.cache.allocator import PageAllocator
from cpkv.layout.placement import PagePlacement


def allocatable_tokens(local_pages: int, placement: PagePlacement) -> int:
    """Fill an allocator of `local_pages` pages on each owner, page by page, and count the tokens that fit."""
    allocator = PageAllocator(local_pages * placement.cp_size, placement)
    pages = 0
    while allocator.free_pages:
        pages += len(allocator.allocate("filler", 1))
    allocator.check()
    return pages * placement.page_size


def capacity_ratio(local_pages: int, page_size: int, cp_size: int) -> float:
    """Tokens of a shared pool over tokens of a replicated one, for the same bytes on each rank."""
    shared = allocatable_tokens(local_pages, PagePlacement(page_size, cp_size))
    replicated = allocatable_tokens(local_pages, PagePlacement(page_size, 1))
    return shared / replicated
