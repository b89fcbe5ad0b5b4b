"""Pages of one layer: gathered by number, and the rows of positions: all of a request, or chosen ones of many.

A page-major pool of L layers has a layer's part of a page every L * page_size rows:

    | page 0: l0 l1 .. | page 1: l0 l1 .. | page 2: ..        pages of l1: length page_size rows, stride L of them
"""

from __future__ import annotations

import torch

from cpkv.errors import ConfigError
from cpkv.layout.placement import PagePlacement, keep_none
from cpkv.layout.pool_geometry import MAX_ROWS
from cpkv.ops.words import select_rows


def gather_pages(pages: torch.Tensor, page_numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Copy pages by number.

    Args:
        pages: uint8 [pages, page_bytes], each page contiguous; they may lie apart.
        page_numbers: int64 [n], 0 or more; one may come several times.
        out: uint8 [n, page_bytes], contiguous.
    """
    select_rows(pages, page_numbers, out)


def position_rows(
    pages: torch.Tensor, *, tokens: int, page_size: int, cp_size: int, segment_rows: int, page_rows: int
) -> torch.Tensor:
    """View row of every position of a request, in a view that has all ranks' pools side by side.

    Args:
        pages: int64 [pages] logical pages by position, those of a page that is -1 have the row -1.
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
    placement = PagePlacement(page_size, cp_size)
    first_rows = placement.owner(pages) * segment_rows + placement.local_page(pages) * page_rows
    page_of_position = pages.repeat_interleave(page_size)[:tokens]
    return keep_none(page_of_position, token_rows(first_rows, tokens, page_size)).to(torch.int32)


def chosen_rows(page_table: torch.Tensor, positions: torch.Tensor, *, page_size: int, page_rows: int) -> torch.Tensor:
    """Row of every chosen position, each request by its own pages, in one pool that holds every page.

    Args:
        page_table: int32 [requests, pages] pages of each request by page position; -1 is no page.
        positions: int64 [requests, chosen], each on one of the request's pages; -1 is no token, wherever it stands.
        page_size: tokens of a page.
        page_rows: rows from a page to the next, in the numbers that the reader takes: `page_size` where pages are
            numbered in one layer, the rows of all layers in the pool's flat tensor of rows. The pool is no larger than
            `PoolGeometry.check_rows` allows, so that row numbers fit in 32 bits.

    Returns:
        int32 [requests, chosen], -1 for no token and for no page.
    """
    readable = positions.clamp(min=0)
    pages = page_table.gather(1, readable // page_size).to(torch.int64)
    rows = pages * page_rows + readable % page_size
    return rows.masked_fill_((positions < 0) | (pages < 0), -1).to(torch.int32)


def token_rows(page_rows: torch.Tensor, tokens: int, page_size: int) -> torch.Tensor:
    """First row of each page [pages] -> row of each position [tokens]."""
    return (page_rows.unsqueeze(1) + torch.arange(page_size, device=page_rows.device)).flatten()[:tokens]


def check_view_rows(cp_size: int, segment_rows: int, page_rows: int) -> None:
    """Refuse a view whose row numbers would not fit in 32 bits.

    Raises:
        ConfigError: with the largest number of local pages that fits.
    """
    if cp_size * segment_rows > MAX_ROWS:
        raise ConfigError(
            f"{cp_size} pools of {segment_rows} rows are {cp_size * segment_rows} rows, and row numbers have 31 bits; "
            f"use at most {MAX_ROWS // (cp_size * page_rows)} local pages a rank"
        )
