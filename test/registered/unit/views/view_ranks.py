"""The ranks of a group without a model: pools of every kind, requests of known rows, and what each rank reads of them.

Rows are random bytes, none of them 0xFF, and every other byte of every pool and of every scratch is. Ranks are threads
that do what a forward pass does: per layer, put the current rows where the view wants them, write the own ones, open
the layer, read keys, then rows, and close it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from cpkv.comm.threads import ThreadGroup
from cpkv.config.names import SplitStrategy, ViewName
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.query_blocks import KEY_TILE, QueryBlocks
from cpkv.layout.row_format import RowFormat
from cpkv.layout.view_costs import BatchSizes, ViewCost, ViewCosts, ViewOptions
from cpkv.pool.layer_split_pool import LayerSplitPool
from cpkv.pool.page_pool import PagePool
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.ranks import run_on_ranks
from cpkv.views.counters import ViewCounters
from cpkv.views.factory import open_view
from cpkv.views.gathered import GatheredView
from cpkv.views.scratch import Scratch
from cpkv.views.view import CurrentRows, LayerRows, View, ViewContext

SLOTS = index_slots([True, False, True])
EIGHT_LAYERS = index_slots([True, False, True, False, True, True, False, True])
# Of latent rows and index keys; packed rows of these sizes have 15 bytes, so that nothing is aligned.
FORMATS = (
    ("float32", "float32"),
    ("bfloat16", "fp8"),
    ("float64", "float64"),
    ("fp8", "fp8"),
    ("fp8", "bfloat16"),
)
ONE_COPY: tuple[ViewName, ...] = ("mixed", "full", "unified", "blocked")
EVERY_PAGE: tuple[ViewName, ...] = ("replicated", "layer-split")
# Small enough that a history of a few pages takes several blocks of keys, and a request several rounds.
SMALL = ViewOptions(key_block_tokens=KEY_TILE, round_bytes=1024)


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
    """What one rank read of one request in one layer, in position order; no keys where none are scored."""

    latent: torch.Tensor
    keys: torch.Tensor | None


@dataclass
class Reading:
    """How ranks read.

    Attributes:
        strategy: how tokens are split.
        idle: ranks that read nothing, as a rank without a token.
        after_write: called with (rank, layer) once the own rows of a layer are written.
        before_rows: called with (rank, layer) before the rows are read.
    """

    strategy: SplitStrategy = "zigzag"
    idle: tuple[int, ...] = ()
    after_write: Callable[[int, int], None] = field(default=lambda rank, layer: None)
    before_rows: Callable[[int, int], None] = field(default=lambda rank, layer: None)


class ViewRanks:
    """The pools of a group that one view reads, and what its ranks need for it.

    Args:
        geometry: of all layers.
        cp_size: ranks.
        prompts: whose pages the pools must hold.
        view: decides what kind of pool it is.
        folder: for the sockets of `unified`.
        topk: requests of more tokens have their keys read.
        options: how views work.
        queries_bytes: bounds the rows that a block of queries chooses.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        cp_size: int,
        prompts: Sequence[Prompt],
        view: ViewName,
        *,
        folder: Path | None = None,
        topk: int = 1,
        options: ViewOptions = SMALL,
        queries_bytes: int = 32 * 23,
    ) -> None:
        self.geometry, self.cp_size, self.view, self.topk = geometry, cp_size, view, topk
        self.placement = PagePlacement(geometry.page_size, 1 if view in EVERY_PAGE else cp_size)
        queries = QueryBlocks(topk, geometry.row_format.latent_width, 2, 4, queries_bytes)
        self.costs = ViewCosts(geometry, queries, options)
        pages = [page for prompt in prompts for page in prompt.pages]
        local_pages = max(pages) // self.placement.cp_size + 2
        assert self.placement.cp_size == 1 or min(pages) >= local_pages, "a raw page would be inside the pool"
        self.group = ThreadGroup(cp_size)
        self.comms = [self.group.communicator(rank, record=True) for rank in range(cp_size)]
        self.pools = self._pools(local_pages, prompts, folder)
        for comm in self.comms:
            assert comm.sequence is not None
            comm.sequence.clear()
        self.counters = [ViewCounters() for _ in range(cp_size)]
        self.scratches = [Scratch(poison=True) for _ in range(cp_size)]
        self.raised: dict[int, BaseException] = {}

    def _pools(self, local_pages: int, prompts: Sequence[Prompt], folder: Path | None) -> list[PagePool]:
        geometry, cp_size = self.geometry, self.cp_size
        if self.view == "layer-split":
            return [LayerSplitPool(geometry, local_pages, rank, cp_size, poison=True) for rank in range(cp_size)]
        if self.view != "unified":
            return [PagePool(geometry, local_pages, poison=True) for _ in range(cp_size)]
        assert folder is not None
        current = sum(prompt.tokens - prompt.history for prompt in prompts)

        def open_pool(rank: int) -> PagePool:
            return UnifiedPool.open(
                geometry,
                local_pages,
                rank=rank,
                cp_size=cp_size,
                chunk_tokens=current,
                secret="secret",
                folder=folder,
                fence=self.comms[rank].barrier,
                poison=True,
            )

        return run_on_ranks(self.group, open_pool)

    def plan(self, prompts: Sequence[Prompt], strategy: SplitStrategy = "zigzag") -> BatchPlan:
        """The batch of everything behind the histories."""
        segments = tuple(prompt.segment(prompt.history, prompt.tokens) for prompt in prompts)
        return BatchPlan.build(BatchSpec(0, segments, strategy, self.view), self.placement, self.cp_size)

    def cost(self, plan: BatchPlan) -> ViewCost:
        """What the planner expects."""
        return self.costs.cost(self.view, BatchSizes.of(plan, self.costs.options))

    def open(self, plan: BatchPlan, rank: int) -> View:
        """The view of one rank."""
        context = ViewContext(self.pools[rank], self.comms[rank], self.costs, self.scratches[rank], self.counters[rank])
        return open_view(plan, context)

    def store_history(self, prompts: Sequence[Prompt]) -> None:
        """What earlier batches have written."""
        segments = tuple(prompt.segment(0, prompt.history) for prompt in prompts if prompt.history)
        if not segments:
            return
        plan = BatchPlan.build(BatchSpec(0, segments, "zigzag", self.view), self.placement, self.cp_size)
        for layer in range(self.geometry.num_layers):
            latent, index = rows_of_batch(plan, prompts, layer)
            for rank, pool in enumerate(self.pools):
                self._write(pool, rank, plan, layer, latent, index)

    def _write(
        self, pool: PagePool, rank: int, plan: BatchPlan, layer: int, latent: torch.Tensor, index: torch.Tensor
    ) -> None:
        places = pool.place(plan.page_writes(plan.pool_owner(rank)))
        pool.write(layer, places, latent, index if self.geometry.slots[layer] >= 0 else None)

    def read(self, prompts: Sequence[Prompt], reading: Reading | None = None) -> list[list[list[Seen]]]:
        """Run one batch over the rest of the prompts; [rank][request][layer] what was read."""
        how = reading or Reading()
        plan = self.plan(prompts, how.strategy)

        def work(rank: int) -> list[list[Seen]]:
            view = self.open(plan, rank)
            try:
                layers = [self._read_layer(view, plan, prompts, how, rank, layer) for layer in range(self.num_layers)]
            except BaseException as error:
                self.raised[rank] = error
                view.close(abandon=True)
                raise
            view.close()
            return [list(by_layer) for by_layer in zip(*layers, strict=True)]

        return run_on_ranks(self.group, work)

    @property
    def num_layers(self) -> int:
        return self.geometry.num_layers

    def _read_layer(
        self, view: View, plan: BatchPlan, prompts: Sequence[Prompt], how: Reading, rank: int, layer: int
    ) -> list[Seen]:
        latent, index = rows_of_batch(plan, prompts, layer)
        target = view.current_target(layer)
        target.latent[: plan.num_tokens] = latent
        has_indexer = self.geometry.slots[layer] >= 0
        assert (target.index is not None) == has_indexer
        if target.index is not None:
            target.index[: plan.num_tokens] = index
        current = CurrentRows(target.latent[: plan.num_tokens], target.index)
        self._write(self.pools[rank], rank, plan, layer, current.latent, index)
        how.after_write(rank, layer)
        rows = view.open_layer(layer, current)
        keys: list[torch.Tensor | None] = [None] * len(prompts)
        for number, prompt in enumerate(prompts):
            if has_indexer and prompt.tokens > self.topk:
                keys[number] = read_keys(rows, number)
        rows.keys_done()
        finish_gathers_ahead(view)
        how.before_rows(rank, layer)
        latents = [
            prompt.latent[layer] if rank in how.idle else self._read_rows(rows, number, prompt.tokens, rank)
            for number, prompt in enumerate(prompts)
        ]
        rows.close()
        return [Seen(*both) for both in zip(latents, keys, strict=True)]

    def _read_rows(self, rows: LayerRows, segment: int, tokens: int, rank: int) -> torch.Tensor:
        """Every row, in another order on every rank, as many at a time as one block of queries may choose."""
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(rank))
        most = self.costs.queries.most_rows(tokens)
        found = torch.full((tokens, self.geometry.row_format.latent_row_bytes), 0xFF, dtype=torch.uint8)
        for positions in order.split(max(1, most - rank)):
            # Twice each, and not as one row of positions.
            asked = torch.stack([positions, positions.flip(0)])
            shown = rows.chosen_rows(segment, asked)
            assert shown.shape == (*asked.shape, found.shape[1]) and shown.dtype == torch.uint8
            assert_same_bits(shown[1].flip(0), shown[0], "a row that was asked for twice")
            found[positions] = shown[0]
        return found


def rows_of_batch(plan: BatchPlan, prompts: Sequence[Prompt], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored rows of a batch's own tokens in token order."""
    by_name = {prompt.name: prompt for prompt in prompts}
    parts = [(by_name[segment.request_id], segment) for segment in plan.spec.segments]
    latent = torch.cat([prompt.latent[layer, segment.start : segment.end] for prompt, segment in parts])
    index = torch.cat([prompt.index[layer, segment.start : segment.end] for prompt, segment in parts])
    return latent, index


def read_keys(rows: LayerRows, segment: int) -> torch.Tensor:
    """The keys of a request, block by block; each is only valid until the next is asked for."""
    blocks: list[torch.Tensor] = []
    for start, block in rows.key_blocks(segment):
        assert start == sum(map(len, blocks)), "key blocks must come in position order, without a gap"
        assert all(len(earlier) % KEY_TILE == 0 for earlier in blocks), "only the last block may end inside a tile"
        blocks.append(block.clone())
    return torch.cat(blocks)


def finish_gathers_ahead(view: View) -> None:
    """Let what is gathered ahead arrive before the rows of this layer are read: the worst that can happen to them."""
    if isinstance(view, GatheredView):
        # All of them end, also behind one that has failed.
        wait(view.gather._pending)
        for future in view.gather._pending:
            future.result()


def make_geometry(
    page_size: int, row_format: tuple[str, str] = FORMATS[0], slots: tuple[int, ...] = SLOTS
) -> PoolGeometry:
    return PoolGeometry(RowFormat(row_format[0], 5, 3, row_format[1], 8), page_size, slots)  # type: ignore[arg-type]


def make_prompts(
    geometry: PoolGeometry, cp_size: int, lengths: Sequence[tuple[int, int]], *, owners: Sequence[int] | None = None
) -> list[Prompt]:
    """Requests of (history, current) tokens on shuffled pages, whose raw numbers lie behind every rank's pool."""
    rows, random_ = geometry.row_format, random.Random(cp_size)
    needed = sum(-(-sum(length) // geometry.page_size) + 1 for length in lengths)
    first = 2 * needed + 8 if owners is None else 10 * needed
    candidates = [page for page in range(first, 20 * first) if owners is None or page % cp_size in owners]
    pages = random_.sample(candidates[: needed + 2], needed)
    generator = torch.Generator().manual_seed(cp_size)

    def content(tokens: int, row_bytes: int) -> torch.Tensor:
        shape = (geometry.num_layers, tokens, row_bytes)
        return torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)

    prompts = []
    for number, (history, current) in enumerate(lengths):
        tokens = history + current
        mine = tuple(pages.pop() for _ in range(-(-tokens // geometry.page_size) + number % 2))
        latent, index = content(tokens, rows.latent_row_bytes), content(tokens, rows.index_row_bytes)
        prompts.append(Prompt(f"r{number}", history, mine, latent, index))
    return prompts


def boundaries(page_size: int) -> Iterator[tuple[int, int]]:
    """(history, current) tokens: every side of the start and of the end of a page."""
    for history in sorted({0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size + 1}):
        for current in sorted({1, page_size + 1} if history % 2 else {page_size, 2 * page_size - 1}):
            yield history, current


def check_seen(ranks: ViewRanks, seen: list[list[list[Seen]]], prompts: Sequence[Prompt]) -> None:
    """Every rank has seen every row and key, and nothing else."""
    assert len(seen) == ranks.cp_size
    for rank, by_request in enumerate(seen):
        for prompt, layers in zip(prompts, by_request, strict=True):
            for layer, (latent, keys) in enumerate(layers):
                where = f"{ranks.view}, rank {rank}, request {prompt.name}, layer {layer}, at [pos, byte]"
                assert_same_bits(latent, prompt.latent[layer], f"latent rows of {where}")
                scored = ranks.geometry.slots[layer] >= 0 and prompt.tokens > ranks.topk
                assert (keys is not None) == scored
                if keys is not None:
                    assert_same_bits(keys, prompt.index[layer], f"index keys of {where}")


def boundary_batches(page_size: int, cp_size: int) -> list[list[tuple[int, int]]]:
    """All boundaries, shuffled into batches of 1 to 8 requests, of which some have no history."""
    random_ = random.Random(cp_size)
    left = list(boundaries(page_size))
    random_.shuffle(left)
    found, size = [], 8
    while left:
        found.append(left[:size])
        left, size = left[size:], random_.randint(1, 8)
    return found


def check_every_boundary(cp_size: int, page_size: int, folder: Path) -> None:
    """Every view shows every position of histories and chunks that end at every side of a page, among poison."""
    formats = FORMATS[(cp_size + page_size) % len(FORMATS)]
    for number, lengths in enumerate(boundary_batches(page_size, cp_size)):
        strategy: SplitStrategy = "zigzag" if (number + page_size) % 2 else "interleave"
        for view in (*ONE_COPY, *EVERY_PAGE):
            if cp_size == 1 and view in ONE_COPY:
                continue
            geometry = make_geometry(page_size, formats, EIGHT_LAYERS if view == "layer-split" else SLOTS)
            prompts = make_prompts(geometry, cp_size, lengths)
            options = SMALL._replace(prefetch=(number + cp_size) % 2 == 0)
            ranks = ViewRanks(geometry, cp_size, prompts, view, folder=folder, options=options)
            ranks.store_history(prompts)
            check_seen(ranks, ranks.read(prompts, Reading(strategy)), prompts)
