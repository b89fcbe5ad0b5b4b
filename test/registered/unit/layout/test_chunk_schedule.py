"""Chunked prefill: each token once, first come first served, chunks filled to the last token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.layout.schedule import Piece, next_batch
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")


def all_batches(totals: list[int], chunk_size: int) -> list[tuple[Piece, ...]]:
    done = [0] * len(totals)
    batches = []
    while pieces := next_batch(list(zip(done, totals, strict=True)), chunk_size):
        batches.append(pieces)
        for piece in pieces:
            assert piece.start == done[piece.request], "a token is computed twice or left out"
            done[piece.request] = piece.end
        assert len(batches) <= sum(totals), "the schedule does not end"
    assert done == totals
    return batches


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 130))
def test_each_token_is_computed_once_and_in_order_for_any_chunk_size(totals: list[int], chunk_size: int) -> None:
    """Kinds 11 and 14: the chunk size is a number of tokens; it is no multiple of anything."""
    tokens = [
        (piece.request, pos)
        for batch in all_batches(totals, chunk_size)
        for piece in batch
        for pos in range(piece.start, piece.end)
    ]
    assert tokens == [(request, pos) for request, total in enumerate(totals) for pos in range(total)]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 130))
def test_every_chunk_but_the_last_is_full_and_none_is_over(totals: list[int], chunk_size: int) -> None:
    """Kind 14."""
    sizes = [sum(piece.end - piece.start for piece in batch) for batch in all_batches(totals, chunk_size)]
    assert all(size == chunk_size for size in sizes[:-1])
    assert 0 < sizes[-1] <= chunk_size


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8), st.integers(1, 70))
def test_a_batch_from_any_progress_holds_no_empty_piece(progress: list[tuple[int, int]], chunk_size: int) -> None:
    progress = [(done, done + left) for done, left in progress]
    pieces = next_batch(progress, chunk_size)
    assert [piece.request for piece in pieces] == sorted({piece.request for piece in pieces})
    assert all(piece.start == progress[piece.request][0] < piece.end <= progress[piece.request][1] for piece in pieces)
    left = sum(total - done for done, total in progress)
    assert sum(piece.end - piece.start for piece in pieces) == min(chunk_size, left)


@pytest.mark.parametrize("chunk_size", [1, 63, 64, 65, 100, 1000])
def test_chunks_around_a_page_cover_a_prompt_of_any_length(chunk_size: int) -> None:
    """Kinds 11 and 13."""
    for total in (1, 63, 64, 65, 127, 128, 129, 193):
        batches = all_batches([total], chunk_size)
        assert len(batches) == -(-total // chunk_size)
        assert [piece.end for (piece,) in batches[:-1]] == list(range(chunk_size, total, chunk_size))[
            : len(batches) - 1
        ]


def test_the_drawing_at_the_top_of_the_module_is_right() -> None:
    first, second = all_batches([7, 9, 2], 10)
    assert first == (Piece(0, 0, 7), Piece(1, 0, 3))
    assert second == (Piece(1, 3, 9), Piece(2, 0, 2))
    assert next_batch([(7, 7), (9, 9), (2, 2)], 10) == next_batch([], 10) == ()
