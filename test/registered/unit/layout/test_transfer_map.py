"""Who sends which page where: every logical page position once, by its owner."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import PlanError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.schedule import next_batch
from cpkv.layout.transfer_map import PageMove, page_moves, sender_of_positions
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")


def shuffled_pages(count: int, *, seed: int, first: int = 100) -> tuple[int, ...]:
    return tuple(random.Random(seed).sample(range(first, first + 5 * count + 5), count))


def all_moves(
    pages: tuple[int, ...], targets: tuple[int, ...], placement: PagePlacement, cp_size: int
) -> dict[int, tuple[int, PageMove]]:
    """Position -> (rank, move), over what all ranks send; a position that two of them send fails."""
    moves: dict[int, tuple[int, PageMove]] = {}
    for rank in range(cp_size):
        for move in page_moves(pages, targets, placement, cp_size, rank):
            assert move.position not in moves, f"page position {move.position} is sent twice"
            moves[move.position] = (rank, move)
    return moves


@given(st.integers(0, 40), st.integers(2, 8), st.integers(0, 99))
def test_a_shared_page_is_sent_once_by_its_owner_from_its_local_page(count: int, cp_size: int, seed: int) -> None:
    """Kinds 11, 12 and 13: shuffled pages on both sides, targets by position."""
    pages, targets = shuffled_pages(count, seed=seed), shuffled_pages(count, seed=seed + 1, first=1)
    placement = PagePlacement(16, cp_size)
    moves = all_moves(pages, targets, placement, cp_size)
    assert sorted(moves) == list(range(count))
    senders = sender_of_positions(pages, placement, cp_size)
    for position, (rank, move) in moves.items():
        assert move.source * cp_size + rank == pages[position], "not the page that the owner holds there"
        assert move.target == targets[position]
        assert senders[position] == rank


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 99))
def test_replicated_ranks_send_equal_parts_and_no_page_twice(count: int, cp_size: int, seed: int) -> None:
    """Kind 37: every rank holds every page, and each is sent once all the same."""
    pages, targets = shuffled_pages(count, seed=seed), shuffled_pages(count, seed=seed + 1, first=1)
    placement = PagePlacement(16, 1)
    moves = all_moves(pages, targets, placement, cp_size)
    assert sorted(moves) == list(range(count))
    assert all((move.source, move.target) == (pages[at], targets[at]) for at, (_, move) in moves.items())
    by_rank = Counter(rank for rank, _ in moves.values())
    counts = [by_rank[rank] for rank in range(cp_size)]
    assert sum(counts) == count and max(counts) - min(counts) <= 1
    assert sender_of_positions(pages, placement, cp_size) == tuple(moves[at][0] for at in range(count))


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_every_length_up_to_three_pages_and_one_is_sent_in_full(page_size: int, cp_size: int) -> None:
    """Kind 13: a last page that is full, and one that holds a single token."""
    placement = PagePlacement(page_size, cp_size)
    for tokens in range(1, 3 * page_size + 2):
        pages = shuffled_pages(placement.pages_for(tokens), seed=tokens)
        moves = all_moves(pages, pages, placement, cp_size)
        assert set(moves) == {pos // page_size for pos in range(tokens)}


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("chunk_size", [1, 5, 7, 16, 17, 31])
def test_odd_chunks_write_every_row_once_and_send_every_page_once(chunk_size: int, cp_size: int) -> None:
    """Kind 11: the partial page at the end of a middle chunk is written by two chunks and sent once, whole."""
    page_size, tokens = 4, 50
    placement = PagePlacement(page_size, cp_size)
    pages = shuffled_pages(placement.pages_for(tokens), seed=chunk_size)
    written: Counter[tuple[int, int, int]] = Counter()
    done = 0
    while pieces := next_batch([(done, tokens)], chunk_size):
        done = pieces[0].end
        segment = Segment("r", pieces[0].start, (0,) * (done - pieces[0].start), pages, done == tokens)
        plan = BatchPlan.build(BatchSpec(0, (segment,), "zigzag", "full"), placement, cp_size)
        for owner in range(cp_size):
            writes = plan.page_writes(owner)
            written.update(
                (owner, *row) for row in zip(writes.local_pages.tolist(), writes.offsets.tolist(), strict=True)
            )
    assert set(written.values()) == {1} and written.total() == tokens
    moves = all_moves(pages, pages[::-1], placement, cp_size)
    sent_rows = {(rank, move.source, offset) for rank, move in moves.values() for offset in range(page_size)}
    assert set(written) <= sent_rows
    assert len(sent_rows) == len(pages) * page_size


def test_the_drawing_at_the_top_of_the_module_is_right() -> None:
    pages, targets = (6, 7, 8, 5, 10), (7, 2, 9, 4, 3)
    assert sender_of_positions(pages, PagePlacement(4, 4), 4) == (2, 3, 0, 1, 2)
    assert sender_of_positions(pages, PagePlacement(4, 1), 4) == (0, 1, 2, 3, 0)
    assert page_moves(pages, targets, PagePlacement(4, 4), 4, 2) == (PageMove(0, 1, 7), PageMove(4, 2, 3))
    assert page_moves(pages, targets, PagePlacement(4, 1), 4, 0) == (PageMove(0, 6, 7), PageMove(4, 10, 3))


@pytest.mark.parametrize("targets", [(), (1, 2), (1, 2, 3, 4)])
def test_lists_of_different_length_are_refused_with_both_lengths(targets: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=f"the prefill holds 3 pages and the decode worker named {len(targets)}"):
        page_moves((6, 7, 8), targets, PagePlacement(4, 4), 4, 0)
