"""Which tokens go into the next batch: chunked prefill, first come first served.

A chunk of 10 tokens over requests of 7, 9 and 2 tokens:

    batch 0   request 0: 0..6    request 1: 0..2
    batch 1   request 1: 3..8    request 2: 0..1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens `start` to `end` - 1 of a request, by its place in the queue."""

    request: int
    start: int
    end: int


def next_batch(progress: Sequence[tuple[int, int]], chunk_size: int) -> tuple[Piece, ...]:
    """The next batch of at most `chunk_size` tokens.

    Args:
        progress: per admitted request, in order of arrival, tokens done and tokens in all.
        chunk_size: tokens of a batch at most.

    Returns:
        Pieces in order of arrival, each at least one token; empty when everything is done.
    """
    pieces: list[Piece] = []
    room = chunk_size
    for request, (done, total) in enumerate(progress):
        end = min(total, done + room)
        if end > done:
            pieces.append(Piece(request, done, end))
            room -= end - done
    return tuple(pieces)
