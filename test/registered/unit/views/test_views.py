"""Views: `full`, `current` and `replicated` show the same bytes for every position, and nothing that is not theirs.

Rows are random bytes; every other byte of every pool is 0xFF. Ranks are threads that do what a forward pass does:
open the view, then for each layer write the current rows and open the layer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from cpkv.comm import ThreadGroup
from cpkv.comm.communicator import Collective
from cpkv.errors import PlanError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.row_format import RowFormat
from cpkv.pool.page_pool import PagePool
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.ranks import run_on_ranks
from cpkv.testing.registration import register_cpu_ci
from cpkv.views import CurrentRows, LayerRows, View, ViewCounters
from cpkv.views.factory import open_view

register_cpu_ci(est_time=4, suite="unit")

SLOTS = index_slots([True, False, True])
FORMATS = (("float32", "float32"), ("bfloat16", "fp8"), ("float64", "float64"))
HISTORIES = [(0, 7), (5, 1), (17, 20), (33, 2)]
"""(history, current) tokens of the requests of a batch"""
NO_HISTORY = [(0, 7), (0, 1), (0, 37)]


@dataclass(frozen=True)
class Prompt:
    """A request whose every row is known.

    Attributes:
        history: tokens that an earlier batch stores.
        latent: uint8 [layers, tokens, latent_row_bytes].
        index: uint8 [layers, tokens, index_row_bytes]; random also for layers that have no indexer.
    """

    name: str
    history: int
    pages: tuple[int, ...]
    latent: torch.Tensor
    index: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.latent.shape[1]

    def segment(self, start: int, end: int) -> Segment:
        return Segment(self.name, start, tuple(range(start, end)), self.pages, end == self.tokens)


class Seen(NamedTuple):
    """What one rank read of one request in one layer, in position order."""

    latent: torch.Tensor
    keys: torch.Tensor | None


class Ranks:
    """The pools of a group and what its ranks need, without a model."""

    def __init__(
        self, geometry: PoolGeometry, cp_size: int, prompts: Sequence[Prompt], *, shared: bool, surplus: int = 2
    ) -> None:
        self.geometry = geometry
        self.cp_size = cp_size
        self.shared = shared
        self.placement = PagePlacement(geometry.page_size, cp_size if shared else 1)
        pages = [page for prompt in prompts for page in prompt.pages]
        local_pages = max(pages) // self.placement.cp_size + surplus
        assert self.placement.cp_size == 1 or min(pages) >= local_pages, "a raw page would be inside the pool"
        self.pools = [PagePool(geometry, local_pages, poison=True) for _ in range(cp_size)]
        self.group = ThreadGroup(cp_size)
        self.comms = [self.group.communicator(rank, record=True) for rank in range(cp_size)]
        self.counters = [ViewCounters() for _ in range(cp_size)]

    def plan(self, segments: Sequence[Segment], view: str, strategy: str = "zigzag") -> BatchPlan:
        spec = BatchSpec(0, tuple(segments), strategy, view)  # type: ignore[arg-type]
        return BatchPlan.build(spec, self.placement, self.cp_size)

    def current_rows(self, plan: BatchPlan, prompts: Sequence[Prompt], layer: int) -> CurrentRows:
        """The rows of the batch's own tokens, as an all-gather leaves them."""
        by_name = {prompt.name: prompt for prompt in prompts}
        parts = [(by_name[segment.request_id], segment) for segment in plan.spec.segments]
        latent = torch.cat([prompt.latent[layer, segment.start : segment.end] for prompt, segment in parts])
        index = torch.cat([prompt.index[layer, segment.start : segment.end] for prompt, segment in parts])
        return CurrentRows(latent, index if SLOTS[layer] >= 0 else None)

    def store_history(self, prompts: Sequence[Prompt]) -> None:
        segments = [prompt.segment(0, prompt.history) for prompt in prompts if prompt.history]
        if not segments:
            return
        plan = self.plan(segments, "full" if self.shared else "replicated")
        for layer in range(self.geometry.num_layers):
            rows = self.current_rows(plan, prompts, layer)
            for rank, pool in enumerate(self.pools):
                pool.write(layer, plan.page_writes(rank if self.shared else 0), rows.latent, rows.index)

    def read(
        self, prompts: Sequence[Prompt], view: str, *, strategy: str = "zigzag", poison_after_write: bool = False
    ) -> list[list[list[Seen]]]:
        """Run one batch over the rest of the prompts; [rank][request][layer] what was read."""
        plan = self.plan([prompt.segment(prompt.history, prompt.tokens) for prompt in prompts], view, strategy)

        def work(rank: int) -> list[list[Seen]]:
            pool = self.pools[rank]
            opened = open_view(plan, pool, self.comms[rank], self.counters[rank])
            seen: list[list[Seen]] = [[] for _ in prompts]
            for layer in range(self.geometry.num_layers):
                current = self.current_rows(plan, prompts, layer)
                pool.write(layer, plan.page_writes(rank if self.shared else 0), current.latent, current.index)
                if poison_after_write:
                    pool.poison(list(range(pool.local_pages)))
                rows = opened.open_layer(layer, current)
                for number, prompt in enumerate(prompts):
                    seen[number].append(read_request(opened, rows, number, prompt.tokens, SLOTS[layer] >= 0))
            return seen

        return run_on_ranks(self.group, work)


def read_request(view: View, rows: LayerRows, segment: int, tokens: int, has_indexer: bool) -> Seen:
    latent = rows.latent[view.rows_of(segment, torch.arange(tokens))]
    return Seen(latent, rows.index_keys(segment).clone() if has_indexer else None)


def make_geometry(page_size: int, row_format: tuple[str, str] = FORMATS[0]) -> PoolGeometry:
    return PoolGeometry(RowFormat(row_format[0], 5, 3, row_format[1], 8), page_size, SLOTS)  # type: ignore[arg-type]


def make_prompts(
    geometry: PoolGeometry, cp_size: int, lengths: Sequence[tuple[int, int]], *, owners: Sequence[int] | None = None
) -> list[Prompt]:
    """Prompts on shuffled pages, whose raw numbers lie behind the end of every rank's pool."""
    rows, random_ = geometry.row_format, random.Random(cp_size)
    needed = sum(-(-sum(length) // geometry.page_size) + 1 for length in lengths)
    first = 2 * needed + 8 if owners is None else 10 * needed
    candidates = [page for page in range(first, 20 * first) if owners is None or page % cp_size in owners]
    pages = random_.sample(candidates[: needed + 2], needed)
    generator = torch.Generator().manual_seed(cp_size)

    def content(tokens: int, row_bytes: int) -> torch.Tensor:
        return torch.randint(0, 255, (len(SLOTS), tokens, row_bytes), dtype=torch.uint8, generator=generator)

    prompts = []
    for number, (history, current) in enumerate(lengths):
        tokens = history + current
        mine = tuple(pages.pop() for _ in range(-(-tokens // geometry.page_size) + number % 2))
        latent, index = content(tokens, rows.latent_row_bytes), content(tokens, rows.index_row_bytes)
        prompts.append(Prompt(f"r{number}", history, mine, latent, index))
    return prompts


def check_seen(seen: list[list[list[Seen]]], prompts: Sequence[Prompt], what: str) -> None:
    for rank, by_request in enumerate(seen):
        for prompt, layers in zip(prompts, by_request, strict=True):
            for layer, (latent, keys) in enumerate(layers):
                where = f"{what}, rank {rank}, request {prompt.name}, layer {layer}, at [pos, byte]"
                assert_same_bits(latent, prompt.latent[layer], f"latent rows of {where}")
                assert (keys is None) == (SLOTS[layer] < 0)
                if keys is not None:
                    assert_same_bits(keys, prompt.index[layer], f"index keys of {where}")


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_full_and_replicated_show_every_position_of_requests_with_history(
    cp_size: int, page_size: int, strategy: str
) -> None:
    """Kinds 1, 9, 10, 12, 13, 16 and 24: chunks that begin inside pages of other ranks, among poison."""
    geometry = make_geometry(page_size, FORMATS[cp_size % 3])
    prompts = make_prompts(geometry, cp_size, HISTORIES)
    for shared, view in ((True, "full"), (False, "replicated")):
        ranks = Ranks(geometry, cp_size, prompts, shared=shared)
        ranks.store_history(prompts)
        check_seen(ranks.read(prompts, view, strategy=strategy), prompts, view)


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_all_three_views_show_every_position_of_requests_without_history(
    cp_size: int, page_size: int, strategy: str
) -> None:
    """Kinds 12, 13 and 24."""
    geometry = make_geometry(page_size, FORMATS[page_size % 3])
    prompts = make_prompts(geometry, cp_size, NO_HISTORY)
    for shared, view in ((True, "full"), (True, "current"), (False, "replicated")):
        ranks = Ranks(geometry, cp_size, prompts, shared=shared)
        check_seen(ranks.read(prompts, view, strategy=strategy), prompts, view)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_length_up_to_three_pages_and_one_is_shown_to_its_last_token(page_size: int) -> None:
    """Kind 13: all of them as one batch, with a history of every length too."""
    geometry = make_geometry(page_size)
    lengths = [(total // 2, total - total // 2) for total in range(1, 3 * page_size + 2)]
    prompts = make_prompts(geometry, 2, lengths)
    ranks = Ranks(geometry, 2, prompts, shared=True)
    ranks.store_history(prompts)
    check_seen(ranks.read(prompts, "full"), prompts, "full")


@pytest.mark.parametrize("owners", [[0], [3], [1, 2]])
def test_full_pads_owners_that_have_fewer_pages_and_shows_no_padding(owners: list[int]) -> None:
    """Kinds 9 and 21: all pages on one or two owners; the others contribute their trash page."""
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, HISTORIES, owners=owners)
    ranks = Ranks(geometry, 4, prompts, shared=True)
    ranks.store_history(prompts)
    check_seen(ranks.read(prompts, "full"), prompts, f"full with pages of owners {owners}")


@pytest.mark.parametrize("fill", [0x00, 0x7B, 0xFF])
@pytest.mark.parametrize(("shared", "view"), [(True, "full"), (True, "current"), (False, "replicated")])
def test_what_lies_in_the_trash_pages_changes_nothing(shared: bool, view: str, fill: int) -> None:
    """Kind 8: NaN or any other value."""
    geometry = make_geometry(3, FORMATS[1])
    prompts = make_prompts(geometry, 4, NO_HISTORY if view == "current" else HISTORIES)
    ranks = Ranks(geometry, 4, prompts, shared=shared)
    for pool in ranks.pools:
        pool.latent[0], pool.index[0] = fill, fill
    ranks.store_history(prompts)
    check_seen(ranks.read(prompts, view), prompts, view)


@pytest.mark.parametrize(("shared", "view"), [(True, "full"), (True, "current"), (False, "replicated")])
def test_no_token_stays_no_token_and_its_neighbours_keep_their_rows(shared: bool, view: str) -> None:
    """Kind 9: -1 in any place of an array of any shape."""
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, NO_HISTORY)
    ranks = Ranks(geometry, 4, prompts, shared=shared)
    plan = ranks.plan([prompt.segment(0, prompt.tokens) for prompt in prompts], view)
    opened = open_view(plan, ranks.pools[1], ranks.comms[1], ranks.counters[1])
    positions = torch.tensor([[-1, 36, 0], [5, -1, -1]])
    rows = opened.rows_of(2, positions)
    alone = {pos: int(opened.rows_of(2, torch.tensor([pos]))[0]) for pos in (36, 0, 5)}
    assert rows.tolist() == [[-1, alone[36], alone[0]], [alone[5], -1, -1]]
    assert rows.dtype == torch.int64 and min(alone.values()) >= 0
    assert opened.rows_of(1, torch.tensor([-1, -1])).tolist() == [-1, -1]
    with pytest.raises(IndexError):
        opened.rows_of(1, torch.tensor([1]))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_current_only_batch_reads_no_row_of_the_pool_and_takes_no_collective(cp_size: int) -> None:
    """The pools are NaN from end to end when the view is opened."""
    geometry = make_geometry(3, FORMATS[1])
    prompts = make_prompts(geometry, cp_size, NO_HISTORY)
    ranks = Ranks(geometry, cp_size, prompts, shared=True)
    check_seen(ranks.read(prompts, "current", poison_after_write=True), prompts, "current over poisoned pools")
    for rank in range(cp_size):
        assert ranks.counters[rank].moved_bytes == ranks.counters[rank].history_bytes == 0
        assert ranks.counters[rank].batches == {"current": 1}
        assert ranks.comms[rank].sequence == []


def test_the_test_above_sees_a_view_that_reads_the_pool() -> None:
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, NO_HISTORY)
    seen = Ranks(geometry, 4, prompts, shared=True).read(prompts, "full", poison_after_write=True)
    assert bool((seen[0][0][0].latent == 0xFF).all())


def test_the_current_view_hands_out_the_gathered_rows_themselves() -> None:
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 2, NO_HISTORY)
    ranks = Ranks(geometry, 2, prompts, shared=True)
    plan = ranks.plan([prompt.segment(0, prompt.tokens) for prompt in prompts], "current")
    current = ranks.current_rows(plan, prompts, 0)
    assert current.index is not None
    rows = open_view(plan, ranks.pools[0], ranks.comms[0], ranks.counters[0]).open_layer(0, current)
    assert rows.latent.data_ptr() == current.latent.data_ptr()
    assert rows.index_keys(2).data_ptr() == current.index[8:].data_ptr()
    assert ranks.counters[0].scratch_bytes == current.num_bytes == current.latent.numel() + current.index.numel()


def test_the_current_view_is_refused_for_a_batch_with_history() -> None:
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, HISTORIES)
    with pytest.raises(PlanError, match="has history, which the view `current` does not hold"):
        Ranks(geometry, 4, prompts, shared=True).read(prompts, "current")


def test_a_short_batch_after_a_long_one_shows_its_own_rows() -> None:
    """Kind 20: nothing of the batch before is left in a buffer."""
    geometry = make_geometry(3, FORMATS[1])
    prompts = make_prompts(geometry, 4, [(17, 40), (0, 37), (4, 1), (0, 2)])
    ranks = Ranks(geometry, 4, prompts, shared=True)
    ranks.store_history(prompts)
    for batch in (prompts[:2], prompts[2:3], prompts[3:]):
        check_seen(ranks.read(batch, "full"), batch, "full")
    check_seen(ranks.read(prompts[3:], "current"), prompts[3:], "current")
    assert ranks.counters[2].batches == {"full": 3, "current": 1}


@pytest.mark.parametrize("lengths", [HISTORIES, NO_HISTORY, [(0, 1)]], ids=["history", "no history", "one token"])
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_every_rank_takes_the_same_collectives_whatever_it_owns_or_computes(
    cp_size: int, lengths: list[tuple[int, int]]
) -> None:
    """Kinds 21 and 32: also ranks without a token or a page; a layer without an indexer gathers no blocks."""
    geometry = make_geometry(16, FORMATS[1])
    prompts = make_prompts(geometry, cp_size, lengths)
    ranks = Ranks(geometry, cp_size, prompts, shared=True)
    ranks.store_history(prompts)
    check_seen(ranks.read(prompts, "full"), prompts, "full")
    plan = ranks.plan([prompt.segment(prompt.history, prompt.tokens) for prompt in prompts], "full")
    pages = plan.page_gather().max_pages
    latent_bytes, block_bytes = 16 * geometry.row_format.latent_row_bytes, geometry.index_block_bytes
    sequence = ranks.comms[0].sequence
    assert sequence is not None and len(sequence) == 5
    gathered = [(one.shape, one.dtype) for one in sequence]
    latent, blocks = (((pages, size), "torch.uint8") for size in (latent_bytes, block_bytes))
    assert gathered == [latent, blocks, latent, latent, blocks]
    assert [comm.sequence for comm in ranks.comms] == [sequence] * cp_size
    assert all(isinstance(one, Collective) for one in sequence)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_full_counts_what_it_moves_and_what_of_that_is_history(cp_size: int, page_size: int) -> None:
    """Kind 36: each page that holds history counts once, with all layers and slots; padding moves too."""
    geometry = make_geometry(page_size, FORMATS[1])
    prompts = make_prompts(geometry, cp_size, HISTORIES)
    ranks = Ranks(geometry, cp_size, prompts, shared=True)
    ranks.store_history(prompts)
    ranks.read(prompts, "full")
    history = {page for prompt in prompts for page in prompt.pages[: -(-prompt.history // page_size)]}
    pages = [page for prompt in prompts for page in prompt.pages[: -(-prompt.tokens // page_size)]]
    most = max(sum(page % cp_size == owner for page in pages) for owner in range(cp_size))
    layer_bytes = page_size * (geometry.row_format.latent_row_bytes + geometry.row_format.index_row_bytes)
    for counters in ranks.counters:
        assert counters.batches == {"full": 1}
        assert counters.history_bytes == len(history) * geometry.page_bytes
        assert counters.moved_bytes == cp_size * most * geometry.page_bytes
        # The gathered pages of a layer, this rank's contribution to them, and the current rows, all at once.
        current = sum(prompt.tokens - prompt.history for prompt in prompts) * layer_bytes // page_size
        assert counters.scratch_bytes >= current + (cp_size + 1) * most * layer_bytes


def test_full_without_history_gathers_no_byte_of_history() -> None:
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, NO_HISTORY)
    ranks = Ranks(geometry, 4, prompts, shared=True)
    ranks.read(prompts, "full")
    assert all(counters.history_bytes == 0 < counters.moved_bytes for counters in ranks.counters)


def test_a_replicated_batch_moves_nothing() -> None:
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, HISTORIES)
    ranks = Ranks(geometry, 4, prompts, shared=False)
    ranks.store_history(prompts)
    ranks.read(prompts, "replicated")
    for rank in range(4):
        assert ranks.counters[rank].moved_bytes == ranks.counters[rank].history_bytes == 0
        assert ranks.comms[rank].sequence == []
        assert ranks.counters[rank].scratch_bytes > 0


def test_counters_of_batches_add_up_and_keep_the_highest_scratch() -> None:
    total = ViewCounters({"full": 2}, moved_bytes=5, history_bytes=3, scratch_bytes=70)
    total.add(ViewCounters({"full": 1, "current": 4}, moved_bytes=10, history_bytes=2, scratch_bytes=60))
    assert total == ViewCounters({"full": 3, "current": 4}, moved_bytes=15, history_bytes=5, scratch_bytes=70)


@pytest.mark.parametrize("view", ["full", "replicated"])
def test_a_plan_of_another_page_size_than_the_pool_is_refused(view: str) -> None:
    """Kind 5: one page size, or two named ones with a checked ratio."""
    geometry = make_geometry(4)
    prompts = make_prompts(geometry, 2, HISTORIES)
    ranks = Ranks(geometry, 2, prompts, shared=view == "full")
    ranks.placement = PagePlacement(8, ranks.placement.cp_size)
    plan = ranks.plan([prompt.segment(prompt.history, prompt.tokens) for prompt in prompts], view)
    with pytest.raises(PlanError):
        open_view(plan, ranks.pools[0], ranks.comms[0], ranks.counters[0])
