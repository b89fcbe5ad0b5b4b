"""Who sends which page of a request to where: each logical page position once.

A request of 5 pages, prefilled over 4 ranks, for a decode worker that chose pages 7 2 9 4 3 of its own:

    position        0    1    2    3    4
    prefill page    6    7    8    5    10       shared: the owner sends   rank 2 3 0 1 2
    decode page     7    2    9    4    3        replicated: equal parts   rank 0 1 2 3 0

The decode side has a placement too: with one owner (no context parallelism) its page 7 is local page 7 of owner 0; with
two owners it is local page 3 of owner 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cpkv.errors import PlanError
from cpkv.layout.placement import PagePlacement


class PageMove(NamedTuple):
    """One page to send.

    Attributes:
        position: logical page position in the request.
        source: local page at the sender.
        owner: decode owner that gets it.
        target: local page there.
    """

    position: int
    source: int
    owner: int
    target: int


def sender_of_positions(pages: Sequence[int], placement: PagePlacement, cp_size: int) -> tuple[int, ...]:
    """The rank that sends each position: the owner, or round-robin where every rank holds every page."""
    if placement.cp_size == 1:
        return tuple(position % cp_size for position in range(len(pages)))
    return tuple(placement.owner(page) for page in pages)


def page_moves(
    positions: Sequence[int],
    pages: Sequence[int],
    target_pages: Sequence[int],
    placement: PagePlacement,
    target_placement: PagePlacement,
    rank: int,
) -> tuple[PageMove, ...]:
    """What one rank sends of the positions that it was told to send.

    The first target owner differs by rank, so that the ranks do not all write to one owner at a time.

    Args:
        positions: logical page positions to send.
        pages: the prefill's page of each of `positions`.
        target_pages: the decode side's page of each of `positions`.
        placement: of the prefill's pool; one owner where every rank holds every page.
        target_placement: of the decode side's pool.
        rank: the sender.

    Raises:
        PlanError: the lists do not match, or a page belongs to another rank.
    """
    if not len(positions) == len(pages) == len(target_pages):
        raise PlanError(
            f"{len(positions)} positions are to be sent, of {len(pages)} pages here to {len(target_pages)} there"
        )
    owners = target_placement.cp_size
    moves = []
    for position, page, target in zip(positions, pages, target_pages, strict=True):
        if placement.cp_size > 1 and placement.owner(page) != rank:
            raise PlanError(f"page position {position} belongs to rank {placement.owner(page)}, not to rank {rank}")
        owner, local_page = target_placement.owner(target), target_placement.local_page(target)
        moves.append(PageMove(position, placement.local_page(page), owner, local_page))
    return tuple(sorted(moves, key=lambda move: ((move.owner - rank) % owners, move.position)))
