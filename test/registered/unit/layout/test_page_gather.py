"""Gathers of pages against a dict of what each owner sends: padded alike, each page once, found where it is said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.layout.page_gather import PageGather
from cpkv.layout.placement import PagePlacement
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

PAGES = st.integers(8, 200)
PAGE_LISTS = st.lists(st.lists(PAGES, max_size=12, unique=True), max_size=5)


def gather_of(page_lists: list[list[int]], cp_size: int) -> PageGather:
    return PageGather.of([np.array(pages, dtype=np.int64) for pages in page_lists], PagePlacement(4, cp_size))


def arriving_pages(gather: PageGather, cp_size: int) -> list[int | None]:
    """The logical page at every gathered place, by dealing pages to the owners in turn; None for a trash page."""
    page_at = {(page % cp_size, page // cp_size): page for page in range(cp_size, 400)}
    arriving: list[int | None] = []
    for owner in range(cp_size):
        sent = gather.padded_local_pages(owner).tolist()
        arriving += [page_at.get((owner, local_page)) for local_page in sent]
        assert len(sent) == gather.max_pages, "an owner sends another number of pages than the others"
    return arriving


@given(PAGE_LISTS, st.integers(1, 8))
def test_every_listed_page_is_where_the_gather_says_and_moves_once(page_lists: list[list[int]], cp_size: int) -> None:
    """Kinds 9 and 12: lists in any order, pages in several lists, empty lists, owners without a page."""
    gather = gather_of(page_lists, cp_size)
    arriving = arriving_pages(gather, cp_size)
    different = {page for pages in page_lists for page in pages}
    assert [[arriving[number] for number in numbers] for numbers in gather.gathered_pages] == page_lists
    assert sorted(page for page in arriving if page is not None) == sorted(different)
    assert gather.num_pages == len(different)
    assert gather.padded_pages == len(arriving) == cp_size * gather.max_pages
    owned = [sum(page % cp_size == owner for page in different) for owner in range(cp_size)]
    assert gather.max_pages == max(owned)
    assert [len(pages) for pages in gather.local_pages] == owned


@given(PAGE_LISTS, st.integers(1, 8))
def test_padding_is_the_trash_page_behind_the_owners_own(page_lists: list[list[int]], cp_size: int) -> None:
    gather = gather_of(page_lists, cp_size)
    for owner, own in enumerate(gather.local_pages):
        assert 0 not in own.tolist()
        sent = gather.padded_local_pages(owner).tolist()
        assert sent == own.tolist() + [0] * (gather.max_pages - len(own))


@pytest.mark.parametrize("page_lists", [[], [[]], [[], []]])
def test_nothing_to_gather_is_no_page_from_anyone(page_lists: list[list[int]]) -> None:
    gather = gather_of(page_lists, 3)
    assert (gather.max_pages, gather.padded_pages, gather.num_pages) == (0, 0, 0)
    assert [pages.tolist() for pages in gather.local_pages] == [[], [], []]
    assert [pages.tolist() for pages in gather.gathered_pages] == page_lists


def test_the_drawing_of_the_module() -> None:
    gather = gather_of([[4, 5, 6, 8, 9]], 4)
    assert (gather.max_pages, gather.padded_pages) == (2, 8)
    assert gather.gathered_pages[0].tolist() == [0, 2, 4, 1, 3]
    assert [gather.padded_local_pages(owner).tolist() for owner in range(4)] == [[1, 2], [1, 2], [1, 0], [0, 0]]
