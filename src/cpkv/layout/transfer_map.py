"""Who sends which page of a request to where: each logical page position once.

A request of 5 pages, prefilled over 4 ranks, for a decode worker that chose pages 7 2 9 4 3 of its own:

    position        0    1    2    3    4
    prefill page    6    7    8    5    10       shared: the owner sends   rank 2 3 0 1 2
    decode page     7    2    9    4    3        replicated: equal parts   rank 0 1 2 3 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cpkv.errors import PlanError
from cpkv.layout.placement import PagePlacement


class PageMove(NamedTuple):
    """One page to send: its logical page position, and its local page at either end."""

    position: int
    source: int
    target: int


def sender_of_positions(pages: Sequence[int], placement: PagePlacement, cp_size: int) -> tuple[int, ...]:
    """The rank that sends each position: the owner, or round-robin where every rank holds every page."""
    if placement.cp_size == 1:
        return tuple(position % cp_size for position in range(len(pages)))
    return tuple(placement.owner(page) for page in pages)


def page_moves(
    pages: Sequence[int], target_pages: Sequence[int], placement: PagePlacement, cp_size: int, rank: int
) -> tuple[PageMove, ...]:
    """What one rank sends.

    Args:
        pages: the request's pages at the prefill, by logical page position.
        target_pages: the decode worker's local pages, by logical page position.
        placement: of the prefill's pool.
        cp_size: number of prefill ranks.
        rank: the sender.

    Raises:
        PlanError: the two lists do not name the same positions.
    """
    if len(pages) != len(target_pages):
        raise PlanError(f"the prefill holds {len(pages)} pages and the decode worker named {len(target_pages)}")
    senders = sender_of_positions(pages, placement, cp_size)
    return tuple(
        PageMove(position, placement.local_page(page), target)
        for position, (page, target) in enumerate(zip(pages, target_pages, strict=True))
        if senders[position] == rank
    )
