"""Who sends which page where: every logical page position once, by its owner, to its place at the decode side."""

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

register_cpu_ci(est_time=2, suite="unit")

ONE_OWNER = PagePlacement(16, 1)


def shuffled_pages(count: int, *, seed: int, first: int = 100) -> tuple[int, ...]:
    return tuple(random.Random(seed).sample(range(first, first + 5 * count + 5), count))


def all_moves(
    pages: tuple[int, ...],
    targets: tuple[int, ...],
    placement: PagePlacement,
    cp_size: int,
    target_placement: PagePlacement = ONE_OWNER,
    wanted: tuple[int, ...] | None = None,
) -> dict[int, tuple[int, PageMove]]:
    """Position -> (rank, move), over what all ranks send; a position that two of them send fails."""
    senders = sender_of_positions(pages, placement, cp_size)
    moves: dict[int, tuple[int, PageMove]] = {}
    for rank in range(cp_size):
        mine = [at for at in (range(len(pages)) if wanted is None else wanted) if senders[at] == rank]
        sources, there = [pages[at] for at in mine], [targets[at] for at in mine]
        for move in page_moves(mine, sources, there, placement, target_placement, rank):
            assert move.position not in moves, f"page position {move.position} is sent twice"
            moves[move.position] = (rank, move)
    return moves


@given(st.integers(0, 40), st.integers(2, 8), st.integers(1, 4), st.integers(0, 99), st.data())
def test_a_shared_page_is_sent_once_by_its_owner_from_its_local_page(
    count: int, cp_size: int, owners: int, seed: int, data: st.DataObject
) -> None:
    """Kinds 1, 11, 12 and 13: shuffled pages on both sides, of which the decode side may have some already."""
    pages, targets = shuffled_pages(count, seed=seed), shuffled_pages(count, seed=seed + 1, first=owners)
    placement, target_placement = PagePlacement(16, cp_size), PagePlacement(16, owners)
    held = data.draw(st.sets(st.integers(0, 39), max_size=5))
    wanted = tuple(at for at in range(count) if at not in held)
    moves = all_moves(pages, targets, placement, cp_size, target_placement, wanted)
    assert tuple(sorted(moves)) == wanted
    for position, (rank, move) in moves.items():
        assert move.source * cp_size + rank == pages[position], "not the page that the owner holds there"
        assert move.target * owners + move.owner == targets[position], "not the page that decode named"
        assert 0 <= move.owner < owners


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 4), st.integers(0, 99))
def test_replicated_ranks_send_equal_parts_and_no_page_twice(count: int, cp_size: int, owners: int, seed: int) -> None:
    """Kind 37: every rank holds every page, and each is sent once all the same."""
    pages, targets = shuffled_pages(count, seed=seed), shuffled_pages(count, seed=seed + 1, first=owners)
    moves = all_moves(pages, targets, ONE_OWNER, cp_size, PagePlacement(16, owners))
    assert sorted(moves) == list(range(count))
    assert all(move.source == pages[at] for at, (_, move) in moves.items())
    assert all(move.target * owners + move.owner == targets[at] for at, (_, move) in moves.items())
    by_rank = Counter(rank for rank, _ in moves.values())
    counts = [by_rank[rank] for rank in range(cp_size)]
    assert sum(counts) == count and max(counts) - min(counts) <= 1
    assert sender_of_positions(pages, ONE_OWNER, cp_size) == tuple(moves[at][0] for at in range(count))


def test_small_cases_agree_with_brute_force() -> None:
    """Every byte place of every rank and decode owner, by a table that knows no arithmetic."""
    for cp_size in (1, 2, 3):
        for owners in (1, 2, 3):
            source_place, target_place = (
                dict(enumerate((owner, local_page) for local_page in range(8) for owner in range(size)))
                for size in (cp_size, owners)
            )
            pages = tuple(random.Random(cp_size).sample(range(cp_size, 8), 5))
            targets = tuple(random.Random(owners).sample(range(owners, 8), 5))
            placement = PagePlacement(4, cp_size)
            moves = all_moves(pages, targets, placement, cp_size, PagePlacement(4, owners))
            assert sorted(moves) == list(range(5))
            for position, (rank, move) in moves.items():
                assert cp_size == 1 or (rank, move.source) == source_place[pages[position]]
                assert (move.owner, move.target) == target_place[targets[position]]


@pytest.mark.parametrize("owners", [1, 2, 3, 4])
def test_ranks_begin_at_different_owners(owners: int) -> None:
    """Not all ranks write to one owner at a time; and each goes through the owners in one round."""
    count, ranks = 24, 4
    pages, targets = tuple(range(8, 8 + count)), tuple(range(owners, owners + count))
    placement, target_placement = PagePlacement(4, 1), PagePlacement(4, owners)
    for rank in range(ranks):
        moves = page_moves(range(count), pages, targets, placement, target_placement, rank)
        order = list(dict.fromkeys(move.owner for move in moves))
        assert order == [(rank + step) % owners for step in range(owners)]
        rounds = [move.owner for move in moves]
        assert sum(a != b for a, b in zip(rounds, rounds[1:], strict=False)) == owners - 1


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
    assert sender_of_positions(pages, ONE_OWNER, 4) == (0, 1, 2, 3, 0)
    shared, replicated = all_moves(pages, targets, PagePlacement(4, 4), 4), all_moves(pages, targets, ONE_OWNER, 4)
    assert shared[0] == (2, PageMove(0, 1, 0, 7)) and shared[4] == (2, PageMove(4, 2, 0, 3))
    assert replicated[0] == (0, PageMove(0, 6, 0, 7)) and replicated[4] == (0, PageMove(4, 10, 0, 3))
    assert all_moves(pages, targets, PagePlacement(4, 4), 4, PagePlacement(4, 2))[0] == (2, PageMove(0, 1, 1, 3))


@pytest.mark.parametrize(("pages", "targets"), [((6, 7), (1, 2, 3)), ((6, 7, 8), (1, 2)), ((), ())])
def test_lists_of_different_length_are_refused_with_all_lengths(
    pages: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    says = f"3 positions are to be sent, of {len(pages)} pages here to {len(targets)} there"
    with pytest.raises(PlanError, match=says):
        page_moves((0, 1, 2), pages, targets, PagePlacement(4, 1), ONE_OWNER, 0)


def test_a_rank_does_not_send_what_another_owns() -> None:
    """Kind 2: local page 1 of another rank is not that page."""
    with pytest.raises(PlanError, match="page position 3 belongs to rank 2, not to rank 0"):
        page_moves((3,), (6,), (1,), PagePlacement(4, 4), ONE_OWNER, 0)
