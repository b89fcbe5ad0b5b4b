"""Pages of one layer: gathered by number, and the rows of positions: all of a request, or chosen ones of many.

program of a gather      one piece of one page: number of the page -> 8 KiB of it -> the same place of the page in `out`
program of rows          BLOCK_TOKENS positions, in `chosen_rows` whatever request they belong to
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cpkv.ops.reference.pages import check_view_rows
from cpkv.ops.triton.words import widest_word

PIECE_BYTES = 8192
BLOCK_TOKENS = 1024
NUM_WARPS = 4


def gather_pages(pages: torch.Tensor, page_numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Copy pages by number; 64-bit offsets, so a pool may have any size.

    Args:
        pages: uint8 [pages, page_bytes], each page contiguous; they may lie apart.
        page_numbers: int64 [n], contiguous; one may come several times. For -1 nothing is read and zeros are written.
        out: uint8 [n, page_bytes], contiguous.
    """
    if not out.numel():
        return
    page_bytes = pages.shape[1]
    word = widest_word(page_bytes, pages.stride(0), pages.data_ptr(), out.data_ptr())
    words = page_bytes // word.num_bytes
    block = min(PIECE_BYTES // word.num_bytes, triton.next_power_of_2(words))
    pieces = triton.cdiv(words, block)
    _gather_pages[(len(page_numbers) * pieces,)](
        word.over(pages),
        pages.stride(0) // word.num_bytes,
        page_numbers,
        word.over(out),
        PIECES=pieces,
        WORDS=words,
        LANES=word.lanes,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )


def position_rows(
    pages: torch.Tensor, *, tokens: int, page_size: int, cp_size: int, segment_rows: int, page_rows: int
) -> torch.Tensor:
    """View row of every position of a request, in a view that has all ranks' pools side by side.

    Args:
        pages: int64 [pages] logical pages by position, contiguous; those of a page that is -1 have the row -1.
        tokens: positions, at most those of the pages.
        page_size: tokens of a page.
        cp_size: ranks; 1 for one pool that holds every page.
        segment_rows: rows of a rank's pool in the view.
        page_rows: rows from a page of a pool to the next: those of all layers.

    Returns:
        int32 [tokens].

    Raises:
        ConfigError: row numbers would not fit in 32 bits.
    """
    check_view_rows(cp_size, segment_rows, page_rows)
    rows = torch.empty(tokens, dtype=torch.int32, device=pages.device)
    if tokens:
        _position_rows[(triton.cdiv(tokens, BLOCK_TOKENS),)](
            pages,
            rows,
            tokens,
            segment_rows,
            page_rows,
            PAGE_SIZE=page_size,
            CP_SIZE=cp_size,
            BLOCK=BLOCK_TOKENS,
            num_warps=NUM_WARPS,
        )
    return rows


def chosen_rows(page_table: torch.Tensor, positions: torch.Tensor, *, page_size: int, page_rows: int) -> torch.Tensor:
    """Row of every chosen position, each request by its own pages, in one pool that holds every page.

    Args:
        page_table: int32 [requests, pages] pages of each request by page position, each row contiguous; -1 is no page.
        positions: int64 [requests, chosen], contiguous, each on one of the request's pages; -1 is no token, wherever
            it stands.
        page_size: tokens of a page.
        page_rows: rows from a page to the next; see `cpkv.ops.reference.pages`.

    Returns:
        int32 [requests, chosen], -1 for no token and for no page.
    """
    rows = torch.empty(*positions.shape, dtype=torch.int32, device=positions.device)
    if rows.numel():
        _chosen_rows[(triton.cdiv(rows.numel(), BLOCK_TOKENS),)](
            page_table,
            page_table.stride(0),
            positions,
            rows,
            rows.numel(),
            rows.shape[1],
            page_rows,
            PAGE_SIZE=page_size,
            BLOCK=BLOCK_TOKENS,
            num_warps=NUM_WARPS,
        )
    return rows


@triton.jit
def _gather_pages(  # type: ignore[no-untyped-def]
    pages,
    stride,
    page_numbers,
    out,
    PIECES: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = (tl.program_id(0) // PIECES).to(tl.int64)
    words = (tl.program_id(0) % PIECES) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, LANES)[None, :]
    number = tl.load(page_numbers + page).to(tl.int64)
    readable = tl.where(number >= 0, WORDS, 0)
    sources = (number * stride + words)[:, None] * LANES + lanes
    targets = (page * WORDS + words)[:, None] * LANES + lanes
    values = tl.load(pages + sources, mask=(words < readable)[:, None], other=0)
    tl.store(out + targets, values, mask=(words < WORDS)[:, None])


@triton.jit
def _position_rows(  # type: ignore[no-untyped-def]
    pages,
    rows,
    tokens,
    segment_rows,
    page_rows,
    PAGE_SIZE: tl.constexpr,
    CP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = positions < tokens
    page = tl.load(pages + positions // PAGE_SIZE, mask=there, other=-1).to(tl.int64)
    row = page % CP_SIZE * segment_rows + page // CP_SIZE * page_rows + positions % PAGE_SIZE
    # -1 is no page, whatever the division makes of it.
    tl.store(rows + positions, tl.where(page >= 0, row, -1).to(tl.int32), mask=there)


@triton.jit
def _chosen_rows(  # type: ignore[no-untyped-def]
    page_table,
    table_stride,
    positions,
    rows,
    count,
    chosen,
    page_rows,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = places < count
    position = tl.load(positions + places, mask=there, other=-1).to(tl.int64)
    named = position >= 0
    request = places // chosen
    page = tl.load(page_table + request * table_stride + position // PAGE_SIZE, mask=named, other=-1).to(tl.int64)
    row = page * page_rows + position % PAGE_SIZE
    tl.store(rows + places, tl.where(page >= 0, row, -1).to(tl.int32), mask=there)
