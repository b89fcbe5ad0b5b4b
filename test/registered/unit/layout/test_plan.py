"""The plan of a batch: who computes, writes and gathers what, against dictionaries filled token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import PlanError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")


class Token(NamedTuple):
    """One token of a packed batch."""

    request: int
    pos: int
    token_id: int
    page: int
    offset: int


def make_batch(
    lengths: list[tuple[int, int]],
    page_size: int,
    reserved: int,
    *,
    seed: int = 0,
    view: str | None = None,
    **spec: object,
) -> BatchSpec:
    """A batch of (history, current) tokens a request; its pages are shuffled and lie far behind one rank's pool."""
    random_ = random.Random(seed)
    pages = random_.sample(range(max(reserved, 300), 1000), 400)
    segments = []
    for number, (history, current) in enumerate(lengths):
        count = -(-(history + current) // page_size)
        mine = tuple(pages.pop() for _ in range(count + number % 2))
        ids = tuple(random_.randrange(10**6) for _ in range(current))
        segments.append(Segment(f"r{number}", history, ids, mine, is_last=True))
    view = view or ("full" if any(history for history, _ in lengths) else "current")
    return BatchSpec(0, tuple(segments), spec.get("strategy", "zigzag"), view)  # type: ignore[arg-type]


def tokens_of(spec: BatchSpec, page_size: int) -> list[Token]:
    """Every token of the batch in packed order, counted off one by one."""
    tokens = []
    for request, segment in enumerate(spec.segments):
        place, offset = 0, 0
        for pos in range(segment.start + len(segment.token_ids)):
            if pos >= segment.start:
                token_id = segment.token_ids[pos - segment.start]
                tokens.append(Token(request, pos, token_id, segment.pages[place], offset))
            place, offset = (place + 1, 0) if offset == page_size - 1 else (place, offset + 1)
    return tokens


def places(cp_size: int) -> dict[int, tuple[int, int]]:
    """Page -> (owner, local page), by dealing pages to the owners in turn."""
    place_of = {}
    page = 0
    for turn in range(1000 // cp_size + 1):
        for owner in range(cp_size):
            place_of[page] = (owner, turn)
            page += 1
    return place_of


def plan_and_tokens(
    lengths: list[tuple[int, int]], page_size: int, cp_size: int, **options: object
) -> tuple[BatchPlan, list[Token]]:
    spec = make_batch(lengths, page_size, cp_size, **options)  # type: ignore[arg-type]
    return BatchPlan.build(spec, PagePlacement(page_size, cp_size), cp_size), tokens_of(spec, page_size)


LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=4)
PAGE_SIZES = st.sampled_from([1, 2, 3, 7, 16])
CP_SIZES = st.integers(1, 8)
STRATEGIES = st.sampled_from(["zigzag", "interleave"])


@given(LENGTHS, PAGE_SIZES, CP_SIZES, STRATEGIES, st.integers(0, 99))
def test_the_owners_writes_partition_the_tokens_and_each_lands_in_its_own_row(
    lengths: list[tuple[int, int]], page_size: int, cp_size: int, strategy: str, seed: int
) -> None:
    """Kinds 1, 2 and 16: a dict of (owner, local page, offset), chunks that begin inside any page."""
    plan, tokens = plan_and_tokens(lengths, page_size, cp_size, strategy=strategy, seed=seed)
    place_of = places(cp_size)
    wanted = {(*place_of[token.page], token.offset): packed for packed, token in enumerate(tokens)}
    assert len(wanted) == len(tokens)
    written = {}
    for owner in range(cp_size):
        writes = plan.page_writes(owner)
        for packed, local_page, offset in zip(writes.packed, writes.local_pages, writes.offsets, strict=True):
            row = (owner, int(local_page), int(offset))
            assert row not in written, f"row {row} is written twice"
            written[row] = int(packed)
    assert written == wanted


@given(LENGTHS, PAGE_SIZES, CP_SIZES, STRATEGIES)
def test_a_replicated_pool_writes_every_token_at_its_undivided_page(
    lengths: list[tuple[int, int]], page_size: int, cp_size: int, strategy: str
) -> None:
    """Kind 10: the placement of a replicated pool has one owner, whatever the number of ranks."""
    spec = make_batch(lengths, page_size, 1, strategy=strategy, view="replicated")
    plan = BatchPlan.build(spec, PagePlacement(page_size, 1), cp_size)
    tokens = tokens_of(spec, page_size)
    writes = plan.page_writes(0)
    assert writes.packed.tolist() == list(range(len(tokens)))
    assert writes.local_pages.tolist() == [token.page for token in tokens]
    assert writes.offsets.tolist() == [token.offset for token in tokens]
    assert len(plan.split.rank_tokens) == cp_size


@given(LENGTHS, PAGE_SIZES, CP_SIZES, st.integers(0, 99))
def test_the_plan_gathers_the_pages_of_the_history_and_those_of_all_tokens(
    lengths: list[tuple[int, int]], page_size: int, cp_size: int, seed: int
) -> None:
    """Kinds 12 and 13: pages in any order, exactly those that hold tokens, each contributed once by its owner."""
    plan, _ = plan_and_tokens(lengths, page_size, cp_size, seed=seed, view="full")
    place_of = places(cp_size)
    for gather, ends in (
        (plan.history, [history for history, _ in lengths]),
        (plan.everything, [history + current for history, current in lengths]),
    ):
        arriving = []
        for owner in range(cp_size):
            arriving += [(owner, int(page)) for page in gather.padded_local_pages(owner)]
        wanted = set()
        for segment, numbers, end in zip(plan.spec.segments, gather.gathered_pages, ends, strict=True):
            pages = [page for place, page in enumerate(segment.pages) if place * page_size < end]
            assert [arriving[number] for number in numbers] == [place_of[page] for page in pages]
            wanted.update(pages)
        assert gather.num_pages == len(wanted) == sum(map(len, gather.local_pages))
    for number, segment in enumerate(plan.spec.segments):
        pages = [page for place, page in enumerate(segment.pages) if place * page_size < segment.start]
        assert plan.history_pages(number).tolist() == pages


@given(LENGTHS, PAGE_SIZES, CP_SIZES, STRATEGIES)
def test_position_token_and_request_stay_together_on_every_rank(
    lengths: list[tuple[int, int]], page_size: int, cp_size: int, strategy: str
) -> None:
    """Kinds 18, 19 and 22: positions are those in the request, of the chunk and of the rank never."""
    plan, tokens = plan_and_tokens(lengths, page_size, cp_size, strategy=strategy)
    seen = []
    for rank in range(cp_size):
        local = plan.local_tokens(rank)
        assert len(local.packed) == len(local.positions) == len(local.token_ids)
        request_of = {}
        end = 0
        for request, first, last in local.runs:
            assert end == first < last, "the runs leave a gap or overlap"
            request_of.update(dict.fromkeys(range(first, last), request))
            end = last
        assert end == len(local.packed)
        for row in range(len(local.packed)):
            token = tokens[local.packed[row]]
            got = (request_of[row], int(local.positions[row]), int(local.token_ids[row]))
            assert got == (token.request, token.pos, token.token_id)
            seen.append(int(local.packed[row]))
    assert sorted(seen) == list(range(len(tokens)))
    assert plan.num_tokens == len(tokens)
    assert plan.offsets == (0, *np.cumsum([current for _, current in lengths]).tolist())


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
def test_ranks_without_a_token_or_without_a_page_still_have_a_part_in_the_plan(strategy: str) -> None:
    """Kind 21: one token over eight ranks; one page, which rank 3 owns."""
    segment = Segment("r", 0, (42,), (8 * 50 + 3,), is_last=True)
    plan = BatchPlan.build(BatchSpec(0, (segment,), strategy, "full"), PagePlacement(4, 8), 8)  # type: ignore[arg-type]
    busy = [rank for rank in range(8) if len(plan.local_tokens(rank).packed)]
    assert busy == [0]
    assert all(plan.local_tokens(rank).runs == () for rank in range(1, 8))
    assert [len(plan.page_writes(rank).packed) for rank in range(8)] == [0, 0, 0, 1, 0, 0, 0, 0]
    gather = plan.everything
    assert (gather.max_pages, gather.padded_pages, gather.num_pages) == (1, 8, 1)
    assert [pages.tolist() for pages in gather.local_pages] == [[], [], [], [50], [], [], [], []]
    assert gather.gathered_pages[0].tolist() == [3]
    assert (plan.history.max_pages, plan.history.padded_pages, plan.history.num_pages) == (0, 0, 0)


def test_a_chunk_that_begins_inside_a_page_of_another_rank_is_written_there() -> None:
    """Kind 16: the drawing at the top of the module."""
    segment = Segment("r", 6, (60, 70, 80, 90), (4, 9, 6), is_last=True)
    plan = BatchPlan.build(BatchSpec(1, (segment,), "interleave", "full"), PagePlacement(4, 4), 4)
    rows = [
        list(zip(*(part.tolist() for part in (writes.packed, writes.local_pages, writes.offsets)), strict=True))
        for writes in map(plan.page_writes, range(4))
    ]
    assert rows == [[], [(0, 2, 2), (1, 2, 3)], [(2, 1, 0), (3, 1, 1)], []]
    assert plan.local_tokens(0).positions.tolist() == [6]
    assert (plan.history.num_pages, plan.everything.num_pages) == (2, 3)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_counts_are_right_for_every_length_up_to_three_pages_and_one(page_size: int) -> None:
    """Kind 13."""
    for tokens in range(1, 3 * page_size + 2):
        for start in range(tokens):
            plan, _ = plan_and_tokens([(start, tokens - start)], page_size, 3, view="full")
            assert len(plan.everything.gathered_pages[0]) == len({pos // page_size for pos in range(tokens)})
            assert plan.history.num_pages == len({pos // page_size for pos in range(start)})


def test_a_page_that_two_requests_share_is_gathered_and_counted_once() -> None:
    segments = (Segment("a", 4, (1,), (40, 41), True), Segment("b", 4, (2,), (40, 43), True))
    plan = BatchPlan.build(BatchSpec(0, segments, "zigzag", "full"), PagePlacement(4, 4), 4)
    gather = plan.everything
    assert [pages.tolist() for pages in gather.local_pages] == [[10], [10], [], [10]]
    assert [pages.tolist() for pages in gather.gathered_pages] == [[0, 1], [0, 3]]
    assert (gather.num_pages, plan.history.num_pages) == (3, 1)
    assert [pages.tolist() for pages in plan.history.gathered_pages] == [[0], [0]]


def test_pages_set_aside_behind_the_last_token_are_not_gathered() -> None:
    segment = Segment("r", 5, (1, 2), (40, 41, 42, 43), is_last=False)
    plan = BatchPlan.build(BatchSpec(0, (segment,), "zigzag", "full"), PagePlacement(4, 4), 4)
    assert [pages.tolist() for pages in plan.everything.local_pages] == [[10], [10], [], []]


GOOD = Segment("good", 0, (1, 2, 3), (40,), is_last=True)


@pytest.mark.parametrize(
    ("segment", "says"),
    [
        (Segment("r7", 6, (1, 2, 3), (40, 41), True), "request r7 has 2 pages and needs 3 for 9 tokens"),
        (Segment("r7", 0, (1,), (), True), "request r7 has 0 pages and needs 1 for 1 tokens"),
        (Segment("r7", 0, (1, 2, 3, 4, 5), (40, 3), True), "request r7 holds page 3, which is reserved or no page"),
        (Segment("r7", 0, (1,), (-1,), True), "request r7 holds page -1, which is reserved or no page"),
        (Segment("r7", 4, (1,), (40, 0), True), "request r7 holds page 0, which is reserved or no page"),
        (Segment("r7", 0, (), (40,), True), "a request of 0 tokens"),
    ],
)
def test_a_segment_that_cannot_be_served_is_refused_by_name(segment: Segment, says: str) -> None:
    """Kind 9, and pages that do not cover the tokens."""
    with pytest.raises(PlanError, match=says):
        BatchPlan.build(BatchSpec(0, (GOOD, segment), "zigzag", "full"), PagePlacement(4, 4), 4)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="batch 12 holds no request"):
        BatchPlan.build(BatchSpec(12, (), "zigzag", "full"), PagePlacement(4, 4), 4)


def test_the_current_view_is_refused_where_one_request_has_history() -> None:
    segments = (GOOD, Segment("late", 1, (1,), (41,), True))
    with pytest.raises(PlanError, match="batch 3 has history, which the view `current` does not hold; use `mixed`"):
        BatchPlan.build(BatchSpec(3, segments, "zigzag", "current"), PagePlacement(4, 4), 4)
    BatchPlan.build(BatchSpec(3, (GOOD,), "zigzag", "current"), PagePlacement(4, 4), 4)


@pytest.mark.parametrize(("view", "owners"), [("replicated", 4), ("full", 1), ("full", 2)])
def test_a_view_that_the_placement_cannot_serve_is_refused(view: str, owners: int) -> None:
    """Kind 10: a sharded pool read as a replicated one, and the reverse."""
    with pytest.raises(PlanError):
        BatchPlan.build(BatchSpec(0, (GOOD,), "zigzag", view), PagePlacement(4, owners), 4)  # type: ignore[arg-type]


def changed_specs(spec: BatchSpec) -> Iterator[tuple[str, BatchSpec]]:
    """The spec with one field changed, for every field of it and of its segments."""
    for name, value in (
        ("batch_number", 1),
        ("strategy", "interleave"),
        ("view", "full"),
        ("segments", spec.segments[:1]),
    ):
        yield name, msgspec.structs.replace(spec, **{name: value})
    other = {"request_id": "x", "start": 9, "token_ids": (7, 8, 9), "pages": (44,), "is_last": False}
    assert set(other) == set(Segment.__struct_fields__) and len(BatchSpec.__struct_fields__) == 4
    for name, changed in other.items():
        segment = msgspec.structs.replace(spec.segments[1], **{name: changed})
        yield f"segment.{name}", msgspec.structs.replace(spec, segments=(spec.segments[0], segment))


def test_the_digest_of_a_batch_changes_with_every_field_and_survives_the_wire() -> None:
    """Kind 32: ranks compare digests, so each field that decides about a collective must be in it."""
    spec = BatchSpec(0, (GOOD, msgspec.structs.replace(GOOD, request_id="other")), "zigzag", "current")
    for name, changed in changed_specs(spec):
        assert changed.digest() != spec.digest(), f"{name} is not in the digest"
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=BatchSpec)
    assert received == spec and received.digest() == spec.digest()
