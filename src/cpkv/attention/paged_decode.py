"""DSA attention of a decode batch over a pool that holds every page: all requests in one launch of each kernel.

request   pos      index blocks by page table          chosen positions -> rows of the pool
a         9000     | b12 | b7 | b30 | ...   -> scores    (page table)      -> packed rows, read where they lie
b         130000   | b2  | b9 | ...         -> scores
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cpkv.attention.choice import Choice, IndexInputs, SparseAttention
from cpkv.attention.kernel_attention import KernelAttention
from cpkv.layout.plan import BatchPlan, LocalTokens
from cpkv.pool.page_pool import PagePool
from cpkv.views.index_blocks import PagedLayerRows
from cpkv.views.view import LayerRows


@dataclass(frozen=True)
class PagedDecode(SparseAttention):
    """Of one batch.

    Attributes:
        one_by_one: the same attention, a request at a time.
        pages: int32 [requests, pages] local pages by page position, -1 behind the last.
        blocks: int32 of the same shape, their index blocks.
        limits: int64 [requests] keys that each query may see.
        page_size: tokens of a page.
        page_rows: rows of the pool from a page to the next.
    """

    one_by_one: KernelAttention
    pages: torch.Tensor
    blocks: torch.Tensor
    limits: torch.Tensor
    page_size: int
    page_rows: int

    @classmethod
    def of(cls, plan: BatchPlan, pool: PagePool, one_by_one: KernelAttention) -> PagedDecode | None:
        """For a batch that it can serve with the pool's kernels; else None."""
        kernels, geometry, segments = pool.kernels, pool.geometry, plan.spec.segments
        whole = plan.spec.view == "replicated" and plan.cp_size == 1
        if not whole or any(segment.length != 1 for segment in segments) or kernels.paged_page_size is None:
            return None
        packed = geometry.row_format.latent_dtype == "fp8" and geometry.row_format.index_dtype == "fp8"
        if not packed or geometry.page_size != kernels.paged_page_size:
            return None
        held = [plan.placement.pages_for(segment.end) for segment in segments]
        table = np.full((len(segments), max(held)), -1, dtype=np.int64)
        for row, (segment, count) in enumerate(zip(segments, held, strict=True)):
            table[row, :count] = plan.placement.local_page(np.asarray(segment.pages[:count], dtype=np.int64))
        pages = torch.from_numpy(table).to(pool.device)
        return cls(
            one_by_one,
            pages.to(torch.int32),
            torch.where(pages < 0, pages, geometry.index_block(pages)).to(torch.int32),
            torch.tensor([segment.end for segment in segments], device=pool.device),
            geometry.page_size,
            geometry.num_layers * geometry.page_size,
        )

    def choose(self, plan: BatchPlan, rows: LayerRows, local: LocalTokens, index: IndexInputs) -> list[Choice]:
        """All requests at once; tokens are in the order of the segments, one each."""
        assert isinstance(rows, PagedLayerRows)
        assert rows.blocks is not None
        inputs = self.one_by_one.quantised(index)
        kernels = self.one_by_one.kernels
        scores = kernels.fp8_paged_indexer_scores(inputs.queries, inputs.weights, rows.blocks, self.blocks, self.limits)
        positions = kernels.exact_topk(scores, self.limits, self.one_by_one.blocks.topk, debug=self.one_by_one.debug)
        chosen = kernels.chosen_rows(self.pages, positions, page_size=self.page_size, page_rows=self.page_rows)
        return [Choice(0, 0, len(positions), positions, chosen)]

    def attend(self, rows: LayerRows, queries: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
        """To packed rows, each a page of one."""
        (choice,) = choices
        one_by_one = self.one_by_one
        attended, _ = one_by_one.kernels.sparse_mla_pages(
            queries.to(one_by_one.value_dtype),
            rows.latent.unsqueeze(1),
            choice.rows,
            scale=one_by_one.scale,
            kv_lora_rank=one_by_one.row_format.kv_lora_rank,
        )
        return attended.to(one_by_one.compute_dtype)
