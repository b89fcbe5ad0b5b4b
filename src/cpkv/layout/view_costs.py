"""What each view moves and holds for a batch, from its sizes alone. Views take exactly these buffers from the scratch.

Buffers of one rank, 4 ranks, T tokens of the batch, h pages of history on the fullest owner (H = 4 h):

    exchange          4 x [tokens of a rank]      every view: where the ranks' own rows arrive before they are ordered
    current rows      [T]                         current, full, replicated, blocked: the batch's rows, in token order
    latent 0, 1       [H pages][T]                mixed: gathered history, then the current rows; one layer ahead
    latent 0, 1       [H pages][C pages]          full: the batch's pages, C of them without history
    tail              [L pages][T]                unified: the current rows, behind the ranks' pools
    index blocks      [H pages]                   full, mixed; of one block of keys: blocked
    keys              [tokens of a request]       index keys in position order, one request at a time
    sent, received    round_bytes                 blocked: chosen rows on their way
    chosen            [queries x k]               blocked: the rows of one block of queries
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cpkv.config.names import ViewName
from cpkv.layout.page_gather import PageGather
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.query_blocks import KEY_TILE, QueryBlocks
from cpkv.layout.split import IntArray

ALIGNMENT = 64
TAIL = "tail"


class ViewOptions(NamedTuple):
    """How views work; the same on every rank.

    Attributes:
        prefetch: `full` and `mixed` gather a layer ahead, into a second buffer.
        key_block_tokens: tokens whose index keys `blocked` holds at a time; made a multiple of the key tile and of
            the page size.
        round_bytes: bytes of chosen rows that `blocked` sends and receives at a time.
    """

    prefetch: bool = True
    key_block_tokens: int = 1 << 16
    round_bytes: int = 16 << 20


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a batch that costs depend on.

    Attributes:
        cp_size: ranks.
        tokens: tokens computed now.
        rank_tokens: of these, those of the rank with the most.
        history_pages: pages that each owner contributes to a gather of the history, padding included.
        fresh_pages: pages of the batch that hold no history.
        request_tokens: per request, tokens stored once the batch is done.
        key_block_pages: pages that each owner contributes to one block of keys, for the largest block.
    """

    cp_size: int
    tokens: int
    rank_tokens: int
    history_pages: int
    fresh_pages: int
    request_tokens: tuple[int, ...]
    key_block_pages: int

    @classmethod
    def of(cls, plan: BatchPlan, options: ViewOptions) -> BatchSizes:
        """The sizes of a planned batch."""
        size = key_block_tokens(plan.placement.page_size, options)
        blocks = [
            block.max_pages
            for number in range(len(plan.spec.segments))
            for block in key_block_gathers(plan.history_pages(number), plan.placement, size)
        ]
        return cls(
            cp_size=plan.cp_size,
            tokens=plan.num_tokens,
            rank_tokens=plan.split.max_tokens,
            history_pages=plan.history.max_pages,
            fresh_pages=plan.everything.num_pages - plan.history.num_pages,
            request_tokens=tuple(segment.end for segment in plan.spec.segments),
            key_block_pages=max(blocks, default=0),
        )

    @classmethod
    def even(cls, context: int, chunk: int, cp_size: int, page_size: int, options: ViewOptions) -> BatchSizes:
        """The last chunk of one request whose pages are spread evenly over the owners."""
        history = -(-max(0, context - chunk) // page_size)
        block = key_block_tokens(page_size, options) // page_size
        return cls(
            cp_size=cp_size,
            tokens=min(chunk, context),
            rank_tokens=-(-min(chunk, context) // cp_size),
            history_pages=-(-history // cp_size),
            fresh_pages=-(-context // page_size) - history,
            request_tokens=(context,),
            key_block_pages=-(-min(block, history) // cp_size),
        )

    @classmethod
    def largest(cls, context: int, chunk: int, cp_size: int, page_size: int, options: ViewOptions) -> BatchSizes:
        """No chunk of a request of up to `context` tokens with evenly spread pages is larger in any size.

        Of a block of keys all pages may be one owner's all the same.
        """
        pages = -(-context // page_size)
        block = key_block_tokens(page_size, options) // page_size
        return cls._bound(context, chunk, cp_size, page_size, -(-pages // cp_size), min(block, pages))

    @classmethod
    def largest_of(
        cls, tokens: int, pages: Sequence[int], chunk: int, cp_size: int, placement: PagePlacement, options: ViewOptions
    ) -> BatchSizes:
        """No chunk of a request with these pages is larger in any size, wherever it starts."""
        held = np.asarray(pages[: placement.pages_for(tokens)], dtype=np.int64)
        blocks = key_block_gathers(held, placement, key_block_tokens(placement.page_size, options))
        history = PageGather.of([held], placement).max_pages
        fullest = max(block.max_pages for block in blocks)
        return cls._bound(tokens, chunk, cp_size, placement.page_size, history, fullest)

    @classmethod
    def _bound(
        cls, context: int, chunk: int, cp_size: int, page_size: int, history_pages: int, key_block_pages: int
    ) -> BatchSizes:
        tokens = min(chunk, context)
        return cls(
            cp_size=cp_size,
            tokens=tokens,
            # A rank has two of the 2 N blocks of a zigzag, each perhaps one token longer.
            rank_tokens=min(tokens, 2 * -(-tokens // (2 * cp_size))),
            history_pages=history_pages,
            fresh_pages=-(-tokens // page_size) + 1,
            request_tokens=(context,),
            key_block_pages=key_block_pages,
        )


def key_block_tokens(page_size: int, options: ViewOptions) -> int:
    """Tokens of a block of keys: whole tiles and whole pages, so that scores do not depend on it."""
    step = math.lcm(KEY_TILE, page_size)
    return max(1, options.key_block_tokens // step) * step


def key_block_gathers(pages: IntArray, placement: PagePlacement, block_tokens: int) -> Sequence[PageGather]:
    """The gathers of a request's index keys on these pages, block by block in position order."""
    step = block_tokens // placement.page_size
    return [PageGather.of([pages[first : first + step]], placement) for first in range(0, len(pages), step)]


@dataclass(frozen=True)
class ViewCost:
    """What one batch through one view costs each rank.

    Attributes:
        view: its name.
        moved_bytes: bytes that gathers of pages bring to a rank over all layers, its own and the padding included;
            for `blocked` the most that it can be.
        buffers: bytes of each buffer beside the pool.
    """

    view: ViewName
    moved_bytes: int
    buffers: dict[str, int]

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, each rounded up to the alignment."""
        return sum(map(aligned, self.buffers.values()))


def aligned(num_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ViewCosts:
    """Costs for one model and pool.

    Attributes:
        geometry: of the pool.
        queries: how queries are blocked.
        options: how views work.
    """

    geometry: PoolGeometry
    queries: QueryBlocks
    options: ViewOptions

    def scored(self, sizes: BatchSizes) -> list[int]:
        """Tokens of the requests whose keys are scored: those that hold more than topk."""
        return [tokens for tokens in sizes.request_tokens if tokens > self.queries.topk]

    def cost(self, view: ViewName, sizes: BatchSizes) -> ViewCost:
        """What a view costs."""
        row, index_row = self.geometry.row_format.latent_row_bytes, self.geometry.row_format.index_row_bytes
        buffers = {
            "exchange": sizes.cp_size * sizes.rank_tokens * max(row, index_row),
            "current index keys": sizes.tokens * index_row,
        }
        if view not in ("mixed", "unified", "layer-split"):
            buffers["current rows"] = sizes.tokens * row
        if view in ("full", "mixed", "layer-split"):
            buffers |= self._gathered(view, sizes)
        if view == "unified":
            # Layer l of the current rows is shifted like the pools are.
            buffers[TAIL] = (self.geometry.num_layers * self.geometry.page_size + sizes.tokens) * row
        if view == "blocked":
            buffers |= self._blocked(sizes)
        elif view != "current" and self.scored(sizes):
            buffers["keys"] = max(self.scored(sizes)) * index_row
        return ViewCost(view, self._moved(view, sizes), {name: size for name, size in buffers.items() if size})

    def read_bytes(self, view: ViewName, sizes: BatchSizes) -> int:
        """Bytes that a rank's kernels read in the memory of others over all layers, at most.

        Only `unified` does: the chosen rows of every query, each time they are chosen, and the index blocks once. Where
        the ranks share one memory this costs what reading one's own does; over a link it can cost more than a gather.
        """
        if view != "unified" or not sizes.history_pages:
            return 0
        geometry = self.geometry
        chosen = sizes.rank_tokens * min(self.queries.topk, max(sizes.request_tokens)) * geometry.num_layers
        read = chosen * geometry.row_format.latent_row_bytes
        if self.scored(sizes):
            read += sizes.cp_size * sizes.history_pages * geometry.num_slots * geometry.index_block_bytes
        return read * (sizes.cp_size - 1) // sizes.cp_size

    def _gathered(self, view: ViewName, sizes: BatchSizes) -> dict[str, int]:
        geometry = self.geometry
        row = geometry.row_format.latent_row_bytes
        history = _arriving_pages(view, sizes)
        rows = history * geometry.page_size + sizes.tokens
        if view == "full":
            rows = (history + sizes.fresh_pages) * geometry.page_size
        buffers = {"latent 0": rows * row}
        if self.options.prefetch and view != "layer-split":
            buffers["latent 1"] = rows * row
        if self.scored(sizes):
            buffers["index blocks"] = history * geometry.index_block_bytes
        return buffers

    def _blocked(self, sizes: BatchSizes) -> dict[str, int]:
        geometry = self.geometry
        row, index_row = geometry.row_format.latent_row_bytes, geometry.row_format.index_row_bytes
        chosen = self.queries.most_rows(max(sizes.request_tokens)) * row
        round_bytes = max(min(self.options.round_bytes, sizes.cp_size * chosen), sizes.cp_size * row)
        buffers = {"sent": round_bytes, "received": round_bytes, "chosen": chosen}
        if self.scored(sizes):
            block = key_block_tokens(geometry.page_size, self.options)
            buffers["keys"] = min(max(self.scored(sizes)), block) * index_row
            buffers["index blocks"] = sizes.cp_size * sizes.key_block_pages * geometry.index_block_bytes
        return buffers

    def _moved(self, view: ViewName, sizes: BatchSizes) -> int:
        geometry = self.geometry
        row = geometry.row_format.latent_row_bytes
        index_slots = geometry.num_slots if self.scored(sizes) else 0
        page = geometry.latent_page_bytes + index_slots * geometry.index_block_bytes
        if view in ("full", "mixed", "layer-split"):
            return _arriving_pages(view, sizes) * page
        if view == "blocked":
            wanted = sizes.rank_tokens * min(self.queries.topk, max(sizes.request_tokens)) * row * geometry.num_layers
            return wanted + sizes.cp_size * sizes.history_pages * index_slots * geometry.index_block_bytes
        return 0


def _arriving_pages(view: ViewName, sizes: BatchSizes) -> int:
    """Pages of history that arrive on a rank for one layer: from each owner, or all of them from one rank."""
    return sizes.history_pages * (1 if view == "layer-split" else sizes.cp_size)
