"""Placement: page p lives on rank p % N at local page p // N, and -1 is no page of any rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import ConfigError
from cpkv.layout.placement import PagePlacement, keep_none
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

SIZES = [(page_size, cp_size) for page_size in (1, 2, 3, 64) for cp_size in (1, 2, 3, 4, 8)]
PLACEMENTS = st.builds(PagePlacement, st.integers(1, 300), st.integers(1, 16))
LOCAL_PAGES = 25


class Place(NamedTuple):
    owner: int
    local_page: int
    offset: int
    local_row: int


def deal(page_size: int, cp_size: int) -> tuple[dict[int, Place], dict[int, tuple[int, int]]]:
    """Deals pages to the ranks in turn, like cards, and writes down where each loc and each page came to lie."""
    rows: list[list[int]] = [[] for _ in range(cp_size)]
    pages: list[list[int]] = [[] for _ in range(cp_size)]
    locs: dict[int, Place] = {}
    page_places: dict[int, tuple[int, int]] = {}
    loc = 0
    for page, owner in zip(range(LOCAL_PAGES * cp_size), cycle(range(cp_size)), strict=False):
        page_places[page] = (owner, len(pages[owner]))
        pages[owner].append(page)
        for offset in range(page_size):
            locs[loc] = Place(owner, len(pages[owner]) - 1, offset, len(rows[owner]))
            rows[owner].append(loc)
            loc += 1
    return locs, page_places


def every_method(placement: PagePlacement) -> dict[str, Callable[[Any], Any]]:
    return {
        "owner": placement.owner,
        "local_page": placement.local_page,
        "page": lambda local_page: placement.page(np.minimum(local_page, 0), local_page),
        "page_of_loc": placement.page_of_loc,
        "offset_of_loc": placement.offset_of_loc,
        "owner_of_loc": placement.owner_of_loc,
        "local_row": placement.local_row,
        "loc": lambda local_row: placement.loc(np.minimum(local_row, 0), local_row),
    }


@pytest.mark.parametrize(("page_size", "cp_size"), SIZES)
def test_every_loc_has_the_place_that_dealing_gives_it(page_size: int, cp_size: int) -> None:
    """Kinds 1 and 2: right owner AND right row, for locs up to 25 pools away."""
    placement = PagePlacement(page_size, cp_size)
    locs, pages = deal(page_size, cp_size)
    for loc, place in locs.items():
        page = placement.page_of_loc(loc)
        got = Place(
            placement.owner_of_loc(loc),
            placement.local_page(page),
            placement.offset_of_loc(loc),
            placement.local_row(loc),
        )
        assert got == place, f"loc {loc}"
        assert placement.loc(place.owner, place.local_row) == loc
    for page, (owner, local_page) in pages.items():
        assert (placement.owner(page), placement.local_page(page)) == (owner, local_page), f"page {page}"
        assert placement.page(owner, local_page) == page


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize(("page_size", "cp_size"), SIZES)
def test_arrays_are_translated_like_ints(page_size: int, cp_size: int, dtype: type) -> None:
    placement = PagePlacement(page_size, cp_size)
    numbers = np.random.default_rng(page_size * 10 + cp_size).permutation(page_size * cp_size * LOCAL_PAGES)
    numbers = np.concatenate([[-1], numbers[:400], [-1]]).astype(dtype)
    shaped = numbers[: len(numbers) // 2 * 2].reshape(2, -1)
    for name, method in every_method(placement).items():
        got = method(shaped)
        assert got.shape == shaped.shape and got.dtype == dtype, name
        assert got.tolist() == [[int(method(int(n))) for n in row] for row in shaped], name


@given(PLACEMENTS, st.lists(st.integers(0, 2**45), min_size=1, max_size=40))
def test_loc_to_owner_and_row_and_back_is_a_bijection(placement: PagePlacement, locs: list[int]) -> None:
    places: dict[tuple[int, int], int] = {}
    for loc in locs:
        owner, row = placement.owner_of_loc(loc), placement.local_row(loc)
        assert 0 <= owner < placement.cp_size and row >= 0
        assert placement.loc(owner, row) == loc
        assert places.setdefault((owner, row), loc) == loc, "two locs share a place"
    array = np.asarray(locs)
    assert (placement.loc(placement.owner_of_loc(array), placement.local_row(array)) == array).all()


@given(PLACEMENTS, st.integers(0, 15), st.integers(0, 2**40))
def test_owner_and_row_to_loc_and_back_is_a_bijection(placement: PagePlacement, owner: int, number: int) -> None:
    owner %= placement.cp_size
    loc, page = placement.loc(owner, number), placement.page(owner, number)
    assert (placement.owner_of_loc(loc), placement.local_row(loc)) == (owner, number)
    assert (placement.owner(page), placement.local_page(page)) == (owner, number)


@given(PLACEMENTS, st.integers(-(2**40), -1))
def test_no_token_stays_no_token_in_every_method(placement: PagePlacement, nothing: int) -> None:
    """Kind 9: -1 // 64 is a page and -1 % N the last rank, unless it is kept."""
    for name, method in every_method(placement).items():
        assert method(-1) == -1, name
        assert method(nothing) == -1, f"{name}({nothing})"
        assert method(np.asarray([nothing, 0, -1])).tolist() == [-1, method(0), -1], name


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_no_token_is_never_the_last_rank_nor_its_last_row(cp_size: int) -> None:
    """Kind 9."""
    placement = PagePlacement(64, cp_size)
    for method in (placement.owner, placement.owner_of_loc):
        assert method(-1) != cp_size - 1
        assert method(np.asarray([-1, -1])).tolist() == [-1, -1]
    assert placement.page_of_loc(-1) == placement.offset_of_loc(-1) == placement.local_row(-1) == -1


def test_keep_none_takes_its_sign_from_the_value_not_from_the_translation() -> None:
    assert keep_none(-1, 77) == -1
    assert keep_none(0, 77) == 77
    assert keep_none(np.asarray([-1, 0, 5]), np.asarray([9, 8, 7])).tolist() == [-1, 8, 7]


@pytest.mark.parametrize(("page_size", "cp_size"), SIZES)
def test_the_last_page_of_the_widened_range_is_inside_every_local_pool(page_size: int, cp_size: int) -> None:
    """Kind 4: N * P logical pages fill P local pages of each rank, exactly."""
    placement = PagePlacement(page_size, cp_size)
    local_pages = 7
    rows: dict[int, set[int]] = {owner: set() for owner in range(cp_size)}
    for loc in range(local_pages * cp_size * page_size):
        rows[placement.owner_of_loc(loc)].add(placement.local_row(loc))
    for owner, used in rows.items():
        assert used == set(range(local_pages * page_size)), f"rank {owner}"
    last = local_pages * cp_size - 1
    assert (placement.owner(last), placement.local_page(last)) == (cp_size - 1, local_pages - 1)


@pytest.mark.parametrize(("page_size", "cp_size"), [size for size in SIZES if size[1] > 1])
def test_a_loc_used_raw_or_translated_twice_is_a_wrong_row(page_size: int, cp_size: int) -> None:
    """Kinds 1 and 3: behind the reserved pages no loc is its own row, so each mistake changes what is read."""
    placement = PagePlacement(page_size, cp_size)
    locs = np.arange(placement.reserved_pages * page_size, 20 * cp_size * page_size)
    rows = placement.local_row(locs)
    assert (rows < locs).all()
    assert (placement.local_row(rows) < rows).all()


@pytest.mark.parametrize("cp_size", [1, 2, 5, 8])
def test_reserved_pages_are_local_page_0_of_each_rank_and_no_others(cp_size: int) -> None:
    placement = PagePlacement(16, cp_size)
    trash = [page for page in range(20 * cp_size) if placement.local_page(page) == 0]
    assert trash == list(range(placement.reserved_pages))
    assert [placement.owner(page) for page in trash] == list(range(cp_size))


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_pages_for_every_length_up_to_three_pages_and_one(page_size: int) -> None:
    """Kind 13."""
    placement = PagePlacement(page_size, 4)
    assert placement.pages_for(0) == 0
    for tokens in range(1, 3 * page_size + 2):
        assert placement.pages_for(tokens) == len({pos // page_size for pos in range(tokens)}), f"{tokens} tokens"


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["page_size", "cp_size"])
def test_sizes_below_one_are_refused_by_name(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {size}; it must be 1 or more$"):
        PagePlacement(**{"page_size": 4, "cp_size": 4, name: size})


def test_a_placement_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PagePlacement(4, 4).cp_size = 2  # type: ignore[misc]
