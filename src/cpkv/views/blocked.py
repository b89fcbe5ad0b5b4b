"""The `blocked` view: any length of history in a fixed scratch. Two passes, and no buffer that grows with the history.

pass 1   index keys      one block of keys at a time: gather its pages, unpack, score, merge the best k
pass 2   chosen rows     per block of queries: ask their owners for the rows that were chosen, in rounds

round, 4 ranks, rank 1 asks    counts [4, 4]   ->   row numbers   ->   rows
                               all-gathered         all-to-all         all-to-all
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from cpkv.errors import PlanError
from cpkv.layout.page_gather import PageGather
from cpkv.layout.plan import BatchPlan
from cpkv.layout.view_costs import key_block_gathers, key_block_tokens
from cpkv.views.view import CurrentRows, LayerRows, View, ViewContext

NOTHING_LEFT = -1


class BlockedView(View):
    """Gathers what is read now, and nothing else."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        row_bytes = context.geometry.row_format.latent_row_bytes
        self.block_tokens = key_block_tokens(plan.placement.page_size, context.costs.options)
        self.round_rows = self.buffers["sent"].numel() // (context.comm.size * row_bytes)
        history = [plan.history_pages(number) for number in range(len(plan.spec.segments))]
        self.key_gathers = [key_block_gathers(pages, plan.placement, self.block_tokens) for pages in history]
        self._pages = [context.tensor(pages) for pages in history]

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """Nothing moves until it is asked for."""
        return BlockedLayerRows(self, layer, current)

    def places(self, segment: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Owner and row in the owner's pool of history positions, int64 [positions]."""
        placement, geometry = self.plan.placement, self.context.geometry
        pages = self._pages[segment][positions // placement.page_size]
        rows = geometry.latent_row(placement.local_page(pages), positions % placement.page_size)
        return placement.owner(pages), rows


class BlockedLayerRows(LayerRows):
    """One layer, block by block."""

    def __init__(self, view: BlockedView, layer: int, current: CurrentRows) -> None:
        super().__init__(view, current.latent)
        self._blocked = view
        self._layer = layer
        self._current = current

    def key_blocks(self, segment: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Blocks of `key_block_tokens`; history gathered from its owners, then the current keys."""
        view, geometry = self._blocked, self._blocked.context.geometry
        entry = view.plan.spec.segments[segment]
        row_bytes = geometry.row_format.index_row_bytes
        current = view.current_keys(segment, self._current)
        for first in range(0, entry.end, view.block_tokens):
            last = min(entry.end, first + view.block_tokens)
            keys = view.buffers["keys"][: (last - first) * row_bytes].view(-1, row_bytes)
            history = max(0, min(last, entry.start) - first)
            if history:
                gather = view.key_gathers[segment][first // view.block_tokens]
                view.context.kernels.unpack_index_keys(
                    self._gather(gather),
                    view.context.tensor(gather.gathered_pages[0]),
                    tokens=history,
                    page_size=geometry.page_size,
                    key_bytes=geometry.row_format.index_key_bytes,
                    out=keys[:history],
                )
            keys[history:] = current[max(0, first - entry.start) : max(0, last - entry.start)]
            yield first, keys

    def _gather(self, gather: PageGather) -> torch.Tensor:
        context = self._blocked.context
        started = time.perf_counter()
        block_bytes = context.geometry.index_block_bytes
        buffer = self._blocked.buffers["index blocks"][: gather.padded_pages * block_bytes]
        blocks = buffer.view(context.comm.size, gather.max_pages, block_bytes)
        own = blocks[context.comm.rank]
        context.pool.index_pages(self._layer, context.tensor(gather.padded_local_pages(context.comm.rank)), out=own)
        context.comm.all_gather(own, f"index pages {self._layer}", out=blocks)
        context.counters.moved(blocks.numel(), gather.num_pages * block_bytes, time.perf_counter() - started)
        return blocks.flatten(0, 1)

    def chosen_rows(self, segment: int, positions: torch.Tensor) -> torch.Tensor:
        """Ask the owners, for each row once; current rows are here already."""
        view = self._blocked
        entry, row_bytes = view.plan.spec.segments[segment], self._current.latent.shape[1]
        wanted, inverse = torch.unique(positions, return_inverse=True)
        buffer = view.buffers["chosen"]
        if len(wanted) * row_bytes > buffer.numel():
            raise PlanError(
                f"request {entry.request_id}: {len(wanted)} chosen rows are asked for at once, and the view has room "
                f"for {buffer.numel() // row_bytes}; ask for those of fewer queries"
            )
        rows = buffer[: len(wanted) * row_bytes].view(-1, row_bytes)
        history = int((wanted < entry.start).sum())
        current = wanted[history:] - entry.start + view.plan.offsets[segment]
        view.context.kernels.gather_pages(self._current.latent, current, rows[history:])
        owners, places = view.places(segment, wanted[:history])
        self._fetch(owners, places, rows)
        return view.context.kernels.gather_rows(rows, inverse)

    def _fetch(self, owners: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Fill rows [: len(owners)] from their owners, at most `round_rows` from each per round."""
        by_owner = [(owners == owner).nonzero().flatten() for owner in range(self._blocked.context.comm.size)]
        most = max(map(len, by_owner))
        for first in range(0, most, self._blocked.round_rows):
            part = [numbers[first : first + self._blocked.round_rows] for numbers in by_owner]
            received = self._round([places[numbers] for numbers in part])
            assert received is not None
            self._blocked.context.kernels.store_rows(rows, torch.cat(part), received)

    def _round(self, asked: list[torch.Tensor] | None) -> torch.Tensor | None:
        """One round of questions and answers; with None this rank only answers.

        Returns:
            The rows asked for, owner by owner; None when no rank asks any more.
        """
        view, comm, layer = self._blocked, self._blocked.context.comm, self._layer
        started = time.perf_counter()
        row_bytes = self._current.latent.shape[1]
        mine = [NOTHING_LEFT] * comm.size if asked is None else [len(part) for part in asked]
        counts = comm.all_gather(torch.tensor(mine), f"rows asked for {layer}").tolist()
        if all(row[0] == NOTHING_LEFT for row in counts):
            return None
        sizes = [[max(0, size) for size in row] for row in counts]
        to_send = [row[comm.rank] for row in sizes]
        device = view.context.pool.device
        questions = torch.cat(asked) if asked is not None else torch.empty(0, dtype=torch.int64, device=device)
        numbers = torch.empty(sum(to_send), dtype=torch.int64, device=device)
        comm.all_to_all(questions, sizes[comm.rank], numbers, to_send, f"row numbers {layer}")
        sent = view.buffers["sent"][: len(numbers) * row_bytes].view(-1, row_bytes)
        view.context.kernels.gather_pages(view.context.pool.latent_rows(layer), numbers, sent)
        received = view.buffers["received"][: len(questions) * row_bytes].view(-1, row_bytes)
        comm.all_to_all(sent, to_send, received, sizes[comm.rank], f"rows {layer}")
        view.context.counters.moved(received.numel(), received.numel(), time.perf_counter() - started)
        return received

    def close(self) -> None:
        """Answer the others until nobody asks any more."""
        while self._round(None) is not None:
            pass
