"""How many pages a pool can hand out: the one formula behind allocators and capacity plans."""

from __future__ import annotations

from cpkv.layout.placement import PagePlacement


def allocatable_pages(local_pages: int, placement: PagePlacement) -> int:
    """Logical pages that requests can have when each owner has that many pages, its trash page included; 0 at least."""
    return max(0, local_pages * placement.cp_size - placement.reserved_pages)
