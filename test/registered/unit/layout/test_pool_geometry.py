"""The shape of a pool: row maps against an array that holds its own row numbers, and bytes against arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.errors import ConfigError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.pool_geometry import MAX_ROWS, PoolGeometry, index_slots, local_pages
from cpkv.layout.row_format import ITEM_BYTES, RowFormat
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

ROWS = RowFormat("float32", kv_lora_rank=5, rope_dim=3, index_dtype="fp8", index_dim=7)
SLOTS = [(0,), (0, 1, 2), (0, 1, -1, -1, 2, -1), (-1, 0), (-1, -1)]
PAGES = 6


def numbered(*shape: int) -> np.ndarray:
    """An array whose every element is its place in memory."""
    return np.arange(math.prod(shape)).reshape(shape)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("slots", SLOTS)
def test_latent_row_of_every_page_layer_and_offset(slots: tuple[int, ...], page_size: int) -> None:
    """Layer l: the same row of the base shifted by l * page_size rows."""
    geometry = PoolGeometry(ROWS, page_size, slots)
    rows = numbered(PAGES, len(slots), page_size)
    for layer in range(len(slots)):
        shifted = rows.reshape(-1)[layer * page_size :]
        for page in range(PAGES):
            for offset in range(page_size):
                assert shifted[geometry.latent_row(page, offset)] == rows[page, layer, offset]
    pages, offsets = np.divmod(np.arange(PAGES * page_size), page_size)
    assert geometry.latent_row(pages, offsets).tolist() == rows[:, 0].reshape(-1).tolist()


@pytest.mark.parametrize("slots", SLOTS)
def test_index_block_of_every_page_and_slot_with_shared_layers(slots: tuple[int, ...]) -> None:
    """Kind 24: the map layer -> slot is compact; layers that reuse a choice take no block."""
    geometry = PoolGeometry(ROWS, 4, slots)
    used = sorted(slot for slot in slots if slot >= 0)
    assert geometry.num_slots == len(used) and used == list(range(len(used)))
    blocks = numbered(PAGES, len(used))
    for slot in used:
        for page in range(PAGES):
            assert blocks.reshape(-1)[slot:][geometry.index_block(page)] == blocks[page, slot]


def test_index_slots_number_the_layers_that_have_an_indexer() -> None:
    """Kind 24."""
    assert index_slots([True, True, False, True, False]) == (0, 1, -1, 2, -1)
    assert index_slots([False, False]) == (-1, -1)
    # GLM-5.2: a layer has an indexer if it is one of the first three, and every fourth from then on.
    has_indexer = [max(layer - 3 + 1, 0) % 4 == 0 for layer in range(78)]
    slots = index_slots(has_indexer)
    assert [layer for layer, slot in enumerate(slots) if slot >= 0] == [0, 1, 2, *range(6, 78, 4)]
    assert [slot for slot in slots if slot >= 0] == list(range(21))
    assert PoolGeometry(ROWS, 64, slots).num_slots == 21


def test_no_page_has_no_row_and_no_block() -> None:
    """Kind 9."""
    geometry = PoolGeometry(ROWS, 16, (0, -1, 1))
    assert geometry.latent_row(-1, 5) == geometry.index_block(-1) == -1
    assert geometry.latent_row(np.asarray([-1, 1]), np.asarray([15, 2])).tolist() == [-1, 3 * 16 + 2]
    assert geometry.index_block(np.asarray([-1, 2])).tolist() == [-1, 4]


@given(
    st.sampled_from(["float64", "float32", "bfloat16"]),
    st.sampled_from(["float64", "float32", "bfloat16", "fp8"]),
    st.lists(st.integers(1, 40), min_size=3, max_size=3),
    st.integers(1, 70),
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_bytes_are_those_of_arrays_of_that_shape(
    latent: str, index: str, widths: list[int], page_size: int, has_indexer: list[bool], pages: int
) -> None:
    """Kinds 7 and 36: two buffers of different row size, each counted once, scales included."""
    latent_values, rope_values, index_values = widths
    rows = RowFormat(latent, latent_values, rope_values, index, index_values)  # type: ignore[arg-type]
    geometry = PoolGeometry(rows, page_size, index_slots(has_indexer))
    item = {"float64": 8, "float32": 4, "bfloat16": 2, "fp8": 1}
    latent_page = len(has_indexer) * page_size * (latent_values + rope_values) * item[latent]
    scales = 4 if index == "fp8" else 0
    index_page = sum(has_indexer) * page_size * (index_values * item[index] + scales)
    assert (geometry.latent_page_bytes, geometry.index_page_bytes) == (latent_page, index_page)
    assert geometry.page_bytes == latent_page + index_page
    assert geometry.pool_bytes(pages) == pages * (latent_page + index_page)
    assert geometry.index_block_bytes * sum(has_indexer) == index_page


def test_rows_of_the_published_models_have_their_published_sizes() -> None:
    rows = RowFormat("bfloat16", kv_lora_rank=512, rope_dim=64, index_dtype="fp8", index_dim=128)
    assert (rows.latent_row_bytes, rows.index_row_bytes, rows.index_key_bytes) == (1152, 132, 128)
    assert rows.latent_width == 576
    assert set(ITEM_BYTES) == {"float64", "float32", "bfloat16", "fp8"}


@pytest.mark.parametrize(("layers", "page_size"), [(78, 64), (61, 64), (1, 1), (5, 1024)])
def test_rows_beyond_31_bits_are_refused_with_the_largest_number_that_fits(layers: int, page_size: int) -> None:
    """2^31 rows and more are refused; 27 million tokens at 78 layers are not."""
    geometry = PoolGeometry(ROWS, page_size, (-1,) * layers)
    with pytest.raises(
        ConfigError, match=f"{layers} layers x {page_size} tokens .* row numbers have 31 bits"
    ) as refused:
        geometry.check_rows(2**31 // (layers * page_size) + 1)
    largest = int(str(refused.value).split("use at most ")[1].split()[0])
    geometry.check_rows(largest)
    assert geometry.latent_row(largest - 1, page_size - 1) + (layers - 1) * page_size < 2**31
    with pytest.raises(ConfigError, match=f"{largest + 1} local pages"):
        geometry.check_rows(largest + 1)
    assert MAX_ROWS == 2**31 - 1
    PoolGeometry(ROWS, 64, (-1,) * 78).check_rows(27_000_000 // 64)


def advised_pages(refused: pytest.ExceptionInfo[ConfigError]) -> int:
    return int(str(refused.value).split("set --num-pages to ")[1].split()[0])


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_num_pages_that_do_not_fit_are_refused_with_a_number_that_does(cp_size: int) -> None:
    placement = PagePlacement(64, cp_size)
    for num_pages in range(1, 5 * cp_size):
        if num_pages % cp_size == 0 and num_pages >= 2 * cp_size:
            assert local_pages(num_pages, placement) * cp_size == num_pages
            continue
        with pytest.raises(ConfigError, match=f"num_pages is {num_pages}, .*set --num-pages to") as refused:
            local_pages(num_pages, placement)
        if num_pages > cp_size:
            advised = advised_pages(refused)
            assert local_pages(advised, placement) * cp_size == advised
            assert advised - num_pages < cp_size, "more pages than it takes"


@pytest.mark.parametrize("num_pages", [1, 3])
def test_fewer_pages_than_ranks_are_refused_with_a_number_that_suffices(num_pages: int) -> None:
    placement = PagePlacement(64, 4)
    with pytest.raises(ConfigError) as refused:
        local_pages(num_pages, placement)
    assert local_pages(advised_pages(refused), placement) == 2


@pytest.mark.parametrize("num_pages", [-4, 0])
def test_no_pages_are_refused(num_pages: int) -> None:
    with pytest.raises(ConfigError, match="4 of them are reserved .one trash page a rank.; set --num-pages to 8"):
        local_pages(num_pages, PagePlacement(64, 4))
