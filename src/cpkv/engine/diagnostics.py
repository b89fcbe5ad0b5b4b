"""Synchronising diagnostics of one rank, on only with CPKV_DEBUG_SHARED_KV=1. Slow, and exact about what broke.

plans      digests of the batch plan are gathered and must be equal
pages      a page's digest after the batch that wrote it must still hold when a later batch reads it
views      every row that a view shows is compared with the bytes that the page's owner holds
"""

from __future__ import annotations

import torch

from cpkv.comm.communicator import Communicator
from cpkv.errors import PlanError
from cpkv.layout.plan import BatchPlan
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.pool.page_pool import PagePool
from cpkv.views.view import LayerRows, View


class Diagnostics:
    """Checks of one rank over one pool."""

    def __init__(self, pool: PagePool, comm: Communicator) -> None:
        self._pool = pool
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
        gather = plan.page_gather()
        return [int(page) for page in gather.local_pages[plan.pool_owner(self._comm.rank)]]

    def compare_view(self, plan: BatchPlan, layer: int, view: View, rows: LayerRows) -> None:
        """Compare what a view shows of one layer with the owners' pages, byte by byte.

        Raises:
            PlanError: naming request, position, page and owner of the first row that differs.
        """
        geometry = self._pool.geometry
        gather = plan.page_gather()
        own = torch.from_numpy(gather.local_pages[plan.pool_owner(self._comm.rank)])
        padded = torch.cat([own, own.new_zeros(gather.max_pages - len(own))])
        pages = self._comm.all_gather(self._pool.latent_pages(layer, padded), f"shadow of layer {layer}")
        latent = pages.flatten(0, 1).unflatten(1, (geometry.page_size, -1))
        index = None
        if geometry.slots[layer] >= 0:
            blocks = self._comm.all_gather(self._pool.index_pages(layer, padded), f"shadow of index keys {layer}")
            index = _rows_of_blocks(blocks.flatten(0, 1), geometry)
        for number, segment in enumerate(plan.spec.segments):
            view_pages = torch.from_numpy(gather.view_pages[number])
            shown = {"latent rows": (rows.latent[view.rows_of(number, torch.arange(segment.end))], latent)}
            if index is not None:
                shown["index keys"] = (rows.index_keys(number), index)
            for what, (ours, truth) in shown.items():
                wrong = (ours != truth[view_pages].flatten(0, 1)[: segment.end]).any(dim=1).nonzero().flatten()
                if len(wrong):
                    position = int(wrong[0])
                    page = segment.pages[position // geometry.page_size]
                    raise PlanError(
                        f"view {view.name}, layer {layer}, request {segment.request_id}: {what} of position "
                        f"{position} differ from page {page} of owner {plan.placement.owner(page)}"
                    )


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
