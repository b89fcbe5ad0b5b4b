"""Synchronising diagnostics of one rank, on only with CPKV_DEBUG_SHARED_KV=1. Slow, and exact about what broke.

plans      digests of the batch plan are gathered and must be equal
pages      a page's digest after the batch that wrote it must still hold when a later batch reads it
views      every row that a view shows is compared with the bytes that the page's owner holds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from cpkv.comm.communicator import Communicator
from cpkv.errors import PlanError
from cpkv.layout.plan import BatchPlan
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.pool.page_pool import PagePool
from cpkv.views.view import LayerRows, View

ROWS_AT_A_TIME = 32


class Diagnostics:
    """Checks of one rank over one pool, for a model that chooses `topk` keys a query."""

    def __init__(self, pool: PagePool, comm: Communicator, topk: int) -> None:
        self._pool = pool
        self._topk = topk
        self._comm = comm
        self._digests: dict[int, str] = {}

    def before_batch(self, plan: BatchPlan) -> None:
        """Compare plans over the ranks, and this rank's pages with what they were when written.

        Raises:
            PlanError: naming the ranks or the page.
        """
        digest = torch.frombuffer(bytearray(plan.spec.digest().encode()), dtype=torch.uint8)
        everyone = self._comm.all_gather(digest, "plan digest")
        different = [rank for rank in range(self._comm.size) if not torch.equal(everyone[rank], everyone[0])]
        if different:
            raise PlanError(f"batch {plan.spec.batch_number}: ranks {different} hold another plan than rank 0")
        for local_page in self._own_pages(plan):
            known = self._digests.get(local_page)
            if known is not None and known != self._pool.page_digest(local_page):
                raise PlanError(
                    f"local page {local_page} of rank {self._comm.rank} changed between the batch that wrote it and "
                    f"batch {plan.spec.batch_number}, which reads it"
                )

    def after_batch(self, plan: BatchPlan) -> None:
        """Note the digests of this rank's pages of the batch."""
        for local_page in self._own_pages(plan):
            self._digests[local_page] = self._pool.page_digest(local_page)

    def forget(self, local_pages: list[int]) -> None:
        """These pages were freed."""
        for local_page in local_pages:
            self._digests.pop(local_page, None)

    def _own_pages(self, plan: BatchPlan) -> list[int]:
        return [int(page) for page in plan.everything.local_pages[plan.pool_owner(self._comm.rank)]]

    def compare_view(self, plan: BatchPlan, layer: int, view: View, rows: LayerRows) -> None:
        """Compare what a view shows of one layer with the owners' pages, byte by byte.

        Raises:
            PlanError: naming request, position, page and owner of the first row that differs.
        """
        geometry = self._pool.geometry
        gather = plan.everything
        local_pages = view.context.tensor(gather.padded_local_pages(plan.pool_owner(self._comm.rank)))
        page_bytes = geometry.page_size * geometry.row_format.latent_row_bytes
        latent = self._gather(local_pages, page_bytes, partial(self._pool.latent_pages, layer), f"rows {layer}")
        truth = {"latent rows": latent.unflatten(1, (geometry.page_size, -1))}
        if geometry.slots[layer] >= 0:
            collect = partial(self._pool.index_pages, layer)
            blocks = self._gather(local_pages, geometry.index_block_bytes, collect, f"index keys {layer}")
            truth["index keys"] = _rows_of_blocks(blocks, geometry)
        for number, segment in enumerate(plan.spec.segments):
            pages = view.context.tensor(gather.gathered_pages[number])
            for what, stored in truth.items():
                expected = stored[pages].flatten(0, 1)[: segment.end]
                if what == "latent rows":
                    shown = _latent_rows(rows, number, segment.end)
                elif segment.end > self._topk:
                    shown = rows.key_blocks(number)
                else:
                    # Keys that nobody scores are not gathered.
                    continue
                for first, part in shown:
                    wrong = (part != expected[first : first + len(part)]).any(dim=1).nonzero().flatten()
                    if len(wrong):
                        position = first + int(wrong[0])
                        page = segment.pages[position // geometry.page_size]
                        raise PlanError(
                            f"view {view.name}, layer {layer}, request {segment.request_id}: {what} of position "
                            f"{position} differ from page {page} of owner {plan.placement.owner(page)}"
                        )

    def _gather(
        self, local_pages: torch.Tensor, num_bytes: int, collect: Callable[..., None], label: str
    ) -> torch.Tensor:
        """Pages of every rank, uint8 [ranks * pages, num_bytes]."""
        own = torch.empty(len(local_pages), num_bytes, dtype=torch.uint8, device=local_pages.device)
        collect(local_pages, out=own)
        return self._comm.all_gather(own, f"shadow of {label}").flatten(0, 1)


def _latent_rows(rows: LayerRows, segment: int, tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
    """All latent rows of a request that a view shows, a few at a time."""
    for first in range(0, tokens, ROWS_AT_A_TIME):
        positions = torch.arange(first, min(tokens, first + ROWS_AT_A_TIME), device=rows.latent.device)
        yield first, rows.chosen_rows(segment, positions)


def _rows_of_blocks(blocks: torch.Tensor, geometry: PoolGeometry) -> torch.Tensor:
    """Index rows [blocks, page_size, index_row_bytes], token by token: written apart from what the views use."""
    key_bytes, page_size = geometry.row_format.index_key_bytes, geometry.page_size
    scale_bytes = geometry.row_format.index_row_bytes - key_bytes
    tokens = []
    for offset in range(page_size):
        key = blocks[:, offset * key_bytes : (offset + 1) * key_bytes]
        first = page_size * key_bytes + offset * scale_bytes
        tokens.append(torch.cat([key, blocks[:, first : first + scale_bytes]], dim=1))
    return torch.stack(tokens, dim=1)
