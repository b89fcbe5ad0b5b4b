"""FlashMLA and DeepGEMM by our names: against the references in fp32 and fp64, and over pools full of NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from cpkv.layout.row_format import RowFormat
from cpkv.ops.reference import indexer as reference_indexer
from cpkv.ops.reference import sparse_mla as reference_attention
from cpkv.ops.reference.index_keys import store_index_keys
from cpkv.ops.reference.latent_rows import encode_latent_rows
from cpkv.ops.vendor import deep_gemm, flash_mla
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cuda_ci

register_cuda_ci(est_time=20, suite="kernels", num_gpus=1)

PAGE_SIZE, LAYERS, LAYER = 64, 3, 1
RANK, WIDTH = 512, 576
ROWS = RowFormat("fp8", kv_lora_rank=RANK, rope_dim=64, index_dtype="fp8", index_dim=128)
SCALE = 0.05
POISON = 0xFF
# Outputs are rounded to 8 bits, weights too.
TOLERANCE = 1.5e-2
SUM_TOLERANCE = 1.5e-3
# Of the sum of magnitudes. The fp8 tensor cores of Hopper add products with about 13 bits behind the largest.
SCORE_TOLERANCE = 2e-3


def skip_where(reason: str | None) -> None:
    if reason is not None:
        pytest.skip(reason)


def check_attention(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], *, rounded: bool = False
) -> None:
    """`rounded`: also the rows were rounded before anything was computed."""
    out, log_sums = found
    assert out.dtype == torch.bfloat16 and log_sums.dtype == torch.float32
    tolerance = 2 * TOLERANCE if rounded else TOLERANCE
    torch.testing.assert_close(out.double(), wanted[0].double(), rtol=tolerance, atol=tolerance)
    tolerance = TOLERANCE if rounded else SUM_TOLERANCE
    torch.testing.assert_close(log_sums.double(), wanted[1].double(), rtol=tolerance, atol=tolerance)


def with_gaps(rows: torch.Tensor) -> torch.Tensor:
    """-1 anywhere: first, last, a whole tile and more, everything but one, and everything."""
    rows = rows.clone()
    rows[0, ::3] = -1
    rows[0, -1] = -1
    rows[1, :-1] = -1
    rows[2] = -1
    return rows


def draw(queries: int, rows: int, chosen: int, device: torch.device) -> torch.Tensor:
    """Distinct rows for each query, int32, in any order."""
    return torch.rand(queries, rows, device=device).topk(chosen).indices.to(torch.int32)


@pytest.mark.parametrize(("heads", "chosen"), [(64, 1), (64, 128), (128, 200), (64, 2048)])
def test_attention_over_rows_of_a_view(device: torch.device, heads: int, chosen: int) -> None:
    """Rows that nobody chose are NaN, and bits do not depend on where rows lie."""
    skip_where(flash_mla.why_not(device, heads, WIDTH, RANK))
    torch.manual_seed(chosen)
    queries = torch.randn(5, heads, WIDTH, device=device).to(torch.bfloat16)
    content = torch.randn(2500, WIDTH, device=device).to(torch.bfloat16)
    rows = with_gaps(draw(5, 2500, chosen, device))
    shape = {"scale": SCALE, "kv_lora_rank": RANK}
    places = torch.randperm(6000, device=device)[:2500]
    view = torch.full((6000, WIDTH), float("nan"), dtype=torch.bfloat16, device=device)
    used = rows[rows >= 0].long().unique()
    view[places[used]] = content[used]
    view_rows = torch.where(rows < 0, -1, places[rows.clamp(min=0)]).to(torch.int32)
    found = flash_mla.sparse_mla_rows(queries, view, view_rows, **shape)
    check_attention(found, reference_attention.sparse_mla_rows(queries.double(), content.double(), rows, **shape))
    check_attention(found, reference_attention.sparse_mla_rows(queries, content, rows, **shape))
    assert not bool(found[0][2].any()) and bool((found[1][2] == float("-inf")).all())
    for ours, theirs in zip(found, flash_mla.sparse_mla_rows(queries, content, rows, **shape), strict=True):
        assert_same_bits(ours, theirs, "rows moved")


@dataclass(frozen=True)
class PackedPages:
    """A request batch's packed rows in some pages of one layer of a page-major pool; all other bytes are NaN.

    Attributes:
        pages: uint8 [pages, 64, 656], apart.
        numbers: int64 [pages of the content] where each page of the content lies.
        content: uint8 [pages of the content, 64, 656], contiguous.
    """

    pages: torch.Tensor
    numbers: torch.Tensor
    content: torch.Tensor

    @classmethod
    def make(cls, device: torch.device, count: int, *, exact_scales: bool) -> PackedPages:
        tokens = count * PAGE_SIZE
        latent, rope = torch.randn(tokens, RANK, device=device), torch.randn(tokens, 64, device=device)
        content = encode_latent_rows(latent, rope, "fp8")
        if exact_scales:
            # Powers of two, so that the kernel's rounding of scales and values to bfloat16 changes nothing.
            scales = torch.randint(-9, -6, (tokens, 4), device=device).to(torch.float32).exp2()
            content[:, RANK : RANK + 16] = scales.view(torch.uint8)
        content = content.view(count, PAGE_SIZE, 656)
        pool = torch.full((3 * count, LAYERS, PAGE_SIZE, 656), POISON, dtype=torch.uint8, device=device)
        # Page 0 stays NaN: it is the trash page, and what a kernel reads that divides -1 carelessly.
        numbers = torch.randperm(3 * count - 1, device=device)[:count] + 1
        pool[numbers, LAYER] = content
        return cls(pool[:, LAYER], numbers, content)

    def rows(self, rows: torch.Tensor, page_rows: int = PAGE_SIZE) -> torch.Tensor:
        """Rows of the content as rows of the pool."""
        readable = rows.clamp(min=0).long()
        places = self.numbers[readable // PAGE_SIZE] * page_rows + readable % PAGE_SIZE
        return places.masked_fill(rows < 0, -1).to(torch.int32)


@pytest.mark.parametrize("exact_scales", [True, False])
@pytest.mark.parametrize(("heads", "chosen"), [(64, 1), (64, 64), (128, 200), (64, 2048)])
def test_attention_over_packed_pages(device: torch.device, heads: int, chosen: int, exact_scales: bool) -> None:
    """One layer of a page-major pool, in place; bits are those of the same rows side by side."""
    skip_where(flash_mla.why_not_pages(device, heads, WIDTH, RANK))
    torch.manual_seed(chosen)
    packed = PackedPages.make(device, 40, exact_scales=exact_scales)
    queries = torch.randn(70, heads, WIDTH, device=device).to(torch.bfloat16)
    rows = with_gaps(draw(70, 40 * PAGE_SIZE, chosen, device))
    shape = {"scale": SCALE, "kv_lora_rank": RANK}
    found = flash_mla.sparse_mla_pages(queries, packed.pages, packed.rows(rows), **shape)
    for values in (queries, queries.double()):
        wanted = reference_attention.sparse_mla_pages(values, packed.pages, packed.rows(rows), **shape)
        check_attention(found, wanted, rounded=not exact_scales)
    assert not bool(found[0][2].any()) and bool((found[1][2] == float("-inf")).all())
    plain = flash_mla.sparse_mla_pages(queries, packed.content, rows, **shape)
    for ours, theirs in zip(found, plain, strict=True):
        assert_same_bits(ours, theirs, "pages apart")


def test_packed_pages_as_flat_rows(device: torch.device) -> None:
    """Pages of one row: the flat rows of a view, by the row numbers that all views use."""
    skip_where(flash_mla.why_not_pages(device, 64, WIDTH, RANK))
    packed = PackedPages.make(device, 20, exact_scales=False)
    queries = torch.randn(3, 64, WIDTH, device=device).to(torch.bfloat16)
    rows = with_gaps(draw(3, 20 * PAGE_SIZE, 500, device))
    count = len(packed.pages) * LAYERS * PAGE_SIZE - LAYER * PAGE_SIZE
    flat = packed.pages.as_strided((count, 1, 656), (656, 656, 1))
    view_rows = packed.rows(rows, LAYERS * PAGE_SIZE)
    found = flash_mla.sparse_mla_pages(queries, flat, view_rows, scale=SCALE, kv_lora_rank=RANK)
    wanted = flash_mla.sparse_mla_pages(queries, packed.content, rows, scale=SCALE, kv_lora_rank=RANK)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same_bits(ours, theirs, "flat rows")


@dataclass(frozen=True)
class Scored:
    """One query per request and its keys, on a device; the keys of a request from position 0 on."""

    queries: torch.Tensor
    weights: torch.Tensor
    keys: list[torch.Tensor]
    scales: list[torch.Tensor]

    @classmethod
    def make(cls, device: torch.device, heads: int, lengths: list[int]) -> Scored:
        def values(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device)

        return cls(
            (values(len(lengths), heads, 128) * 4).to(torch.float8_e4m3fn),
            values(len(lengths), heads),
            [(values(tokens, 128) * 40).to(torch.float8_e4m3fn) for tokens in lengths],
            [values(tokens).exp() for tokens in lengths],
        )

    def check(self, request: int, scores: torch.Tensor) -> None:
        """Against fp64, relative to the sum of the magnitudes of all products."""
        query, weight = self.queries[request].double(), self.weights[request].double()
        key, scale = self.keys[request].double(), self.scales[request].double()
        wanted = weight @ (query @ key.T).relu() * scale
        sizes = weight.abs() @ (query.abs() @ key.abs().T) * scale
        off = (scores.double() - wanted).abs() / sizes
        assert bool((off <= SCORE_TOLERANCE).all()), f"request {request}: off by {off.max()} of the sum of magnitudes"


@pytest.mark.parametrize("heads", [32, 64])
def test_scores_of_keys_in_position_order(device: torch.device, heads: int) -> None:
    """Keys beyond every limit are NaN."""
    skip_where(deep_gemm.why_not(device, heads, 128))
    torch.manual_seed(heads)
    scored = Scored.make(device, heads, [700])
    queries = scored.queries.expand(3, -1, -1).contiguous()
    weights = scored.weights.expand(3, -1).contiguous()
    limits = torch.tensor([700, 1, 333], device=device)
    keys = torch.full((900, 128), POISON, dtype=torch.uint8, device=device)
    scales = torch.full((900,), float("nan"), device=device)
    keys[:700], scales[:700] = scored.keys[0].view(torch.uint8), scored.scales[0]
    inputs = (queries, weights, keys.view(torch.float8_e4m3fn), scales, limits)
    scores = deep_gemm.fp8_indexer_scores(*inputs)
    wanted = reference_indexer.fp8_indexer_scores(*inputs)
    for query, limit in enumerate(limits.tolist()):
        one = replace(scored, keys=[scored.keys[0][:limit]], scales=[scored.scales[0][:limit]])
        one.check(0, scores[query, :limit])
        one.check(0, wanted[query, :limit])


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("heads", [32, 64])
def test_scores_of_index_blocks(device: torch.device, heads: int, slots: int) -> None:
    """Blocks of one slot of a page-major pool, in place; bits are those of the same blocks side by side."""
    skip_where(deep_gemm.why_not_paged(device, heads, 128, PAGE_SIZE))
    torch.manual_seed(heads)
    lengths = [1, 63, 64, 65, 0, 256, 257, 1500]
    scored = Scored.make(device, heads, lengths)
    pages = [-(-tokens // PAGE_SIZE) for tokens in lengths]
    pool = torch.full((2 * sum(pages), slots, PAGE_SIZE * 132), POISON, dtype=torch.uint8, device=device)
    plain = torch.full((sum(pages), PAGE_SIZE * 132), POISON, dtype=torch.uint8, device=device)
    numbers = (torch.randperm(len(pool) - 1, device=device)[: sum(pages)] + 1).split(pages)
    plain_numbers = torch.arange(sum(pages), device=device).split(pages)
    tables = []
    for blocks, own in ((pool[:, -1], numbers), (plain, plain_numbers)):
        # Behind a request's last page there is no page.
        tables.append(torch.full((len(lengths), max(pages)), -1, dtype=torch.int32, device=device))
        for request, tokens in enumerate(lengths):
            tables[-1][request, : pages[request]] = own[request].to(torch.int32)
            positions = torch.arange(tokens, device=device)
            stored = torch.cat(
                [scored.keys[request].view(torch.uint8), scored.scales[request].unsqueeze(1).view(torch.uint8)], dim=1
            )
            where = own[request][positions // PAGE_SIZE], positions % PAGE_SIZE
            store_index_keys(blocks, *where, stored, page_size=PAGE_SIZE, key_bytes=128)
    limits = torch.tensor(lengths, device=device)
    queries = scored.queries, scored.weights
    scores = deep_gemm.fp8_paged_indexer_scores(*queries, pool[:, -1], tables[0], limits)
    alone = deep_gemm.fp8_paged_indexer_scores(*queries, plain, tables[1], limits)
    wanted = reference_indexer.fp8_paged_indexer_scores(*queries, pool[:, -1], tables[0], limits)
    assert scores.shape == wanted.shape == (len(lengths), max(pages) * PAGE_SIZE)
    for request, tokens in enumerate(lengths):
        assert_same_bits(scores[request, :tokens], alone[request, :tokens], f"request {request}")
        for found in (scores, wanted) if tokens else ():
            scored.check(request, found[request, :tokens])
        assert bool((wanted[request, tokens:] == float("-inf")).all())
