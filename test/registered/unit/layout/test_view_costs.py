"""What views cost: the sizes of a batch against loops over its plan, and buffers that no batch outgrows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpkv.config.names import ViewName
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.query_blocks import KEY_TILE, MAX_BLOCK, QueryBlocks
from cpkv.layout.row_format import RowFormat
from cpkv.layout.view_costs import ALIGNMENT, TAIL, BatchSizes, ViewCost, ViewCosts, ViewOptions, key_block_tokens
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

ROW, INDEX_ROW = 16, 12
LAYERS, SLOTS = 3, 2
SHARED: tuple[ViewName, ...] = ("full", "mixed", "unified", "blocked")


def make_costs(
    page_size: int, *, topk: int = 8, workspace: int = 1 << 20, options: ViewOptions | None = None
) -> ViewCosts:
    """Rows of 16 and index rows of 12 bytes, three layers of which two have an indexer."""
    geometry = PoolGeometry(RowFormat("bfloat16", 5, 3, "fp8", 8), page_size, index_slots([True, False, True]))
    return ViewCosts(geometry, QueryBlocks(topk, 8, 2, 4, workspace), options or ViewOptions())


def make_plan(
    lengths: Sequence[tuple[int, int]],
    page_size: int,
    cp_size: int,
    *,
    view: str = "mixed",
    strategy: str = "zigzag",
    seed: int = 0,
) -> BatchPlan:
    """A batch of (history, current) tokens a request, on shuffled pages."""
    owners = 1 if view == "replicated" else cp_size
    pages = random.Random(seed).sample(range(owners, 8000), 2000)
    segments = []
    for number, (history, current) in enumerate(lengths):
        mine = tuple(pages.pop() for _ in range(-(-(history + current) // page_size)))
        segments.append(Segment(f"r{number}", history, (0,) * current, mine, True))
    spec = BatchSpec(0, tuple(segments), strategy, view)  # type: ignore[arg-type]
    return BatchPlan.build(spec, PagePlacement(page_size, owners), cp_size)


LENGTHS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=5)
PAGE_SIZES = st.sampled_from([1, 3, 16])
CP_SIZES = st.integers(2, 8)
STRATEGIES = st.sampled_from(["zigzag", "interleave"])


def most_of_an_owner(pages: set[int], cp_size: int) -> int:
    return max(sum(page % cp_size == owner for page in pages) for owner in range(cp_size))


@given(LENGTHS, PAGE_SIZES, CP_SIZES, STRATEGIES, st.integers(0, 99))
def test_the_sizes_of_a_batch_are_those_of_a_count_page_by_page(
    lengths: list[tuple[int, int]], page_size: int, cp_size: int, strategy: str, seed: int
) -> None:
    plan = make_plan(lengths, page_size, cp_size, strategy=strategy, seed=seed)
    sizes = BatchSizes.of(plan, ViewOptions(key_block_tokens=1))
    history, everything = set(), set()
    for segment in plan.spec.segments:
        for pos in range(segment.end):
            everything.add(segment.pages[pos // page_size])
            if pos < segment.start:
                history.add(segment.pages[pos // page_size])
    assert sizes.cp_size == cp_size
    assert sizes.tokens == sum(current for _, current in lengths)
    assert sizes.rank_tokens == max(len(plan.local_tokens(rank).packed) for rank in range(cp_size))
    assert sizes.history_pages == (most_of_an_owner(history, cp_size) if history else 0)
    assert sizes.fresh_pages == len(everything) - len(history)
    assert sizes.request_tokens == tuple(history + current for history, current in lengths)
    # No request here is longer than a block of keys.
    blocks = [
        most_of_an_owner(set(segment.pages[: -(-segment.start // page_size)]), cp_size)
        for segment in plan.spec.segments
        if segment.start
    ]
    assert sizes.key_block_pages == max(blocks, default=0)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100, 512, 1024])
@pytest.mark.parametrize("asked", [1, 511, 512, 1536, 5000, 1 << 16])
def test_a_block_of_keys_is_whole_tiles_and_whole_pages(page_size: int, asked: int) -> None:
    tokens = key_block_tokens(page_size, ViewOptions(key_block_tokens=asked))
    assert tokens % page_size == tokens % KEY_TILE == 0 < tokens
    step = next(size for size in range(KEY_TILE, 1 << 20, KEY_TILE) if size % page_size == 0)
    assert tokens == step or asked - step < tokens <= asked


def test_the_largest_block_of_keys_counts_where_a_request_has_several() -> None:
    """Owner 0 has every page of the second block, and one of each of the others."""
    pages = [0, 1, 2, 3] * 32 + [0] * 128 + [0, 1, 2, 3] * 8
    numbers = tuple(4 * (place + 2) + owner for place, owner in enumerate(pages))
    segment = Segment("r", 1024 + 100, (0,) * 28, numbers, True)
    plan = BatchPlan.build(BatchSpec(0, (segment,), "zigzag", "blocked"), PagePlacement(4, 4), 4)
    assert BatchSizes.of(plan, ViewOptions(key_block_tokens=512)).key_block_pages == 128
    assert BatchSizes.of(plan, ViewOptions(key_block_tokens=2048)).key_block_pages == 32 + 128 + 7


def padded(cost: ViewCost) -> int:
    return sum((size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT for size in cost.buffers.values())


def test_the_buffers_of_a_known_batch_in_bytes() -> None:
    """2 ranks; 3 pages of history on the fullest owner, 2 of 4 tokens without; two requests, one beyond topk."""
    sizes = BatchSizes(
        2, tokens=9, rank_tokens=5, history_pages=3, fresh_pages=2, request_tokens=(21, 8), key_block_pages=2
    )
    costs = make_costs(4, options=ViewOptions(key_block_tokens=512, round_bytes=100))
    always = {"exchange": 2 * 5 * ROW, "current index keys": 9 * INDEX_ROW}
    own, keys = {"current rows": 9 * ROW}, {"keys": 21 * INDEX_ROW}
    blocks = {"index blocks": 2 * 3 * 4 * INDEX_ROW}
    mixed, full = (6 * 4 + 9) * ROW, (6 + 2) * 4 * ROW
    moved = 6 * 4 * (LAYERS * ROW + SLOTS * INDEX_ROW)
    expected: dict[ViewName, tuple[dict[str, int], int]] = {
        "replicated": (always | own | keys, 0),
        "current": (always | own, 0),
        "mixed": (always | blocks | keys | {"latent 0": mixed, "latent 1": mixed}, moved),
        "full": (always | own | blocks | keys | {"latent 0": full, "latent 1": full}, moved),
        "unified": (always | keys | {TAIL: (LAYERS * 4 + 9) * ROW}, 0),
        "blocked": (
            always
            | own
            | keys
            | {"sent": 100, "received": 100, "chosen": 128 * 8 * ROW, "index blocks": 2 * 2 * 4 * INDEX_ROW},
            5 * 8 * ROW * LAYERS + 6 * 4 * SLOTS * INDEX_ROW,
        ),
    }
    for view, (buffers, bytes_moved) in expected.items():
        cost = costs.cost(view, sizes)
        assert cost.buffers == buffers, view
        assert (cost.view, cost.moved_bytes, cost.held_bytes) == (view, bytes_moved, padded(cost))
    one_buffer = make_costs(4, options=ViewOptions(prefetch=False)).cost("mixed", sizes)
    assert one_buffer.buffers == always | blocks | keys | {"latent 0": mixed}


def test_no_request_beyond_topk_means_no_key_anywhere() -> None:
    sizes = BatchSizes(
        2, tokens=4, rank_tokens=2, history_pages=1, fresh_pages=1, request_tokens=(8, 8), key_block_pages=1
    )
    for view in SHARED:
        cost = make_costs(4).cost(view, sizes)
        assert not {"keys", "index blocks"} & cost.buffers.keys()
        if view in ("mixed", "full"):
            assert cost.moved_bytes == 2 * 4 * LAYERS * ROW


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 200)), min_size=1, max_size=3),
    CP_SIZES,
    STRATEGIES,
    st.integers(1, 40),
    st.integers(4096, 1 << 17),
)
@example(lengths=[(800, 100)], cp_size=4, strategy="zigzag", topk=8, workspace=4 * 5 * (1024 + 3 * 850))
def test_the_chosen_rows_of_any_block_of_queries_fit_their_buffer(
    lengths: list[tuple[int, int]], cp_size: int, strategy: str, topk: int, workspace: int
) -> None:
    """Each query may choose other rows than its neighbours; a rank's blocks follow from its own last position."""
    plan = make_plan(lengths, 16, cp_size, view="blocked", strategy=strategy)
    costs = make_costs(16, topk=topk, workspace=workspace)
    buffer = costs.cost("blocked", BatchSizes.of(plan, costs.options)).buffers["chosen"]
    for rank in range(cp_size):
        local = plan.local_tokens(rank)
        for _, first, last in costs.queries.of(plan, local):
            sees = [int(pos) + 1 for pos in local.positions[first:last]]
            rows = min(max(sees), sum(min(topk, limit) for limit in sees))
            assert rows * ROW <= buffer, f"rank {rank} may choose {rows} rows and has {buffer // ROW}"


@given(LENGTHS, CP_SIZES, STRATEGIES, st.integers(1, 40), st.integers(6, 20))
def test_blocks_of_queries_cover_each_token_once_and_never_mix_requests(
    lengths: list[tuple[int, int]], cp_size: int, strategy: str, topk: int, workspace: int
) -> None:
    plan = make_plan(lengths, 3, cp_size, strategy=strategy)
    queries = QueryBlocks(topk, 8, 2, 4, 1 << workspace)
    for rank in range(cp_size):
        local = plan.local_tokens(rank)
        covered = []
        for segment, first, last in queries.of(plan, local):
            assert 0 < last - first <= MAX_BLOCK
            assert set(plan.segment_of_token[local.packed[first:last]].tolist()) == {segment}
            covered += range(first, last)
        assert covered == list(range(len(local.packed)))


@pytest.mark.parametrize("tokens", [1, 100, 2048, 131072, 1 << 20])
def test_the_arrays_of_a_block_of_queries_stay_within_the_workspace(tokens: int) -> None:
    """At the sizes of DeepSeek-V3.2: chosen rows, scores and the products of one tile."""
    queries = QueryBlocks(2048, 576, 64, 4)
    size = queries.size(tokens)
    assert 1 <= size <= MAX_BLOCK
    chosen, scored = size * min(2048, tokens) * 576 * 4, size * (3 * tokens + 64 * KEY_TILE) * 4
    assert size == 1 or max(chosen, scored) <= queries.workspace_bytes
    assert size == MAX_BLOCK or max(chosen, scored) // size * (size + 1) > queries.workspace_bytes


@given(st.integers(1, 1300), st.integers(1, 700), st.sampled_from([1, 4, 16]), CP_SIZES, STRATEGIES)
@example(context=1300, chunk=17, page_size=16, cp_size=3, strategy="zigzag")
def test_no_chunk_of_an_evenly_spread_request_is_larger_in_any_size_than_the_largest(
    context: int, chunk: int, page_size: int, cp_size: int, strategy: str
) -> None:
    options = ViewOptions(key_block_tokens=KEY_TILE)
    most = BatchSizes.largest(context, chunk, cp_size, page_size, options)
    pages = tuple(range(cp_size, cp_size + -(-context // page_size)))
    for tokens in {context, max(1, context - 1), max(1, context // 2)}:
        # The first chunk, the last, the one before it, and one that begins inside a page.
        last = (tokens - 1) // chunk * chunk
        for start in {0, last, max(0, last - chunk), max(0, tokens - chunk)}:
            segment = Segment("r", start, (0,) * (min(tokens, start + chunk) - start), pages, True)
            spec = BatchSpec(0, (segment,), strategy, "mixed")  # type: ignore[arg-type]
            sizes = BatchSizes.of(BatchPlan.build(spec, PagePlacement(page_size, cp_size), cp_size), options)
            assert sizes.cp_size == most.cp_size
            assert sizes.request_tokens <= most.request_tokens == (context,)
            for name in ("tokens", "rank_tokens", "history_pages", "fresh_pages", "key_block_pages"):
                assert getattr(sizes, name) <= getattr(most, name), f"{name} of tokens {start} to {segment.end}"


def test_every_rank_blocks_a_request_alike() -> None:
    """By the request's end, which all ranks know, and not by the last token that a rank has."""
    plan = make_plan([(500, 700)], 16, 4)
    queries = QueryBlocks(64, 8, 2, 4, 1 << 15)
    expected = queries.size(1200)
    assert expected < queries.size(600), "blocks must depend on the length, or nothing is tested"
    for rank in range(4):
        ranges = [(first, last) for _, first, last in queries.of(plan, plan.local_tokens(rank))]
        assert {last - first for first, last in ranges[:-1]} == {expected}
        assert 1 <= ranges[-1][1] - ranges[-1][0] <= expected
