"""A rank's pool against a dict of (owner, local page, layer, offset): each row lands there, and no other byte moves."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.config.settings import ROW_FORMATS
from cpkv.errors import AllocatorError, ConfigError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, PageWrites, Segment
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.row_format import RowFormat
from cpkv.pool.page_pool import PagePool
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

Format = tuple[str, str]
# Two layers share the choice of the layer before them and store no index keys.
SLOTS = index_slots([True, True, False, True, False])
LOCAL_PAGES = 12


def make_geometry(row_format: Format, page_size: int, slots: tuple[int, ...] = SLOTS) -> PoolGeometry:
    """Odd widths, so that latent rows, keys and blocks all have different sizes."""
    return PoolGeometry(RowFormat(row_format[0], 5, 3, row_format[1], 7), page_size, slots)  # type: ignore[arg-type]


def key_bytes_of(block_offset: int, geometry: PoolGeometry) -> list[int]:
    """The bytes of an index block that hold the token at an offset: fp8 has all scales behind all keys."""
    row_format = geometry.row_format
    key = {"float64": 8, "float32": 4, "bfloat16": 2, "fp8": 1}[row_format.index_dtype] * row_format.index_dim
    places = [block_offset * key + at for at in range(key)]
    if row_format.index_dtype == "fp8":
        places += [geometry.page_size * key + block_offset * 4 + at for at in range(4)]
    return places


@dataclass
class Batch:
    """Rows of a batch and the pools of every rank, all poisoned, with what each must hold written out beside them."""

    plan: BatchPlan
    geometry: PoolGeometry
    pools: list[PagePool]
    latent: dict[int, torch.Tensor]
    index: dict[int, torch.Tensor]
    wanted_latent: list[torch.Tensor]
    wanted_index: list[torch.Tensor]

    def tokens(self) -> Iterator[tuple[int, int, int, int]]:
        """(packed, owner, local page, offset) of every token, by dealing pages to owners in turn."""
        owners = len(self.wanted_latent)
        place_of: dict[int, tuple[int, int]] = {}
        for local_page in range(LOCAL_PAGES):
            for owner in range(owners):
                place_of[len(place_of)] = (owner, local_page)
        packed = 0
        for segment in self.plan.spec.segments:
            for pos in range(segment.start, segment.start + len(segment.token_ids)):
                page, offset = segment.pages[pos // self.geometry.page_size], pos % self.geometry.page_size
                yield packed, *place_of[page], offset
                packed += 1

    def write(self) -> None:
        shared = self.plan.placement.cp_size > 1
        for layer in range(self.geometry.num_layers):
            for rank, pool in enumerate(self.pools):
                places = pool.place(self.plan.page_writes(rank if shared else 0))
                pool.write(layer, places, self.latent[layer], self.index.get(layer))
            for packed, owner, local_page, offset in self.tokens():
                self.wanted_latent[owner][local_page, layer, offset] = self.latent[layer][packed]
                if layer in self.index:
                    slot = sum(other >= 0 for other in SLOTS[:layer])
                    places = key_bytes_of(offset, self.geometry)
                    self.wanted_index[owner][local_page, slot, places] = self.index[layer][packed]

    def check(self) -> None:
        for rank, pool in enumerate(self.pools):
            owner = rank if self.plan.placement.cp_size > 1 else 0
            assert_same_bits(
                pool.latent, self.wanted_latent[owner], f"latent rows of rank {rank} at [page, layer, offset, byte]"
            )
            assert_same_bits(pool.index, self.wanted_index[owner], f"index blocks of rank {rank} at [page, slot, byte]")


def random_bytes(*shape: int) -> torch.Tensor:
    """Never 0xFF, so that a written byte is not taken for poison."""
    return torch.from_numpy(np.random.default_rng(shape[0]).integers(0, 255, shape, dtype=np.uint8))


def make_batch(
    geometry: PoolGeometry, placement: PagePlacement, cp_size: int, segments: tuple[Segment, ...], view: str
) -> Batch:
    spec = BatchSpec(0, segments, "zigzag", view)  # type: ignore[arg-type]
    plan = BatchPlan.build(spec, placement, cp_size)
    tokens, rows = plan.num_tokens, geometry.row_format
    pools = [PagePool(geometry, LOCAL_PAGES, poison=True) for _ in range(cp_size)]
    layers = range(geometry.num_layers)
    return Batch(
        plan,
        geometry,
        pools,
        {layer: random_bytes(tokens, rows.latent_row_bytes) for layer in layers},
        {layer: random_bytes(tokens, rows.index_row_bytes) for layer in layers if SLOTS[layer] >= 0},
        [torch.full_like(pools[0].latent, 0xFF) for _ in range(placement.cp_size)],
        [torch.full_like(pools[0].index, 0xFF) for _ in range(placement.cp_size)],
    )


def make_segments(page_size: int, pages: list[int]) -> tuple[Segment, ...]:
    """Requests that begin at 0, inside a page and at a page's start, on shuffled pages."""
    pages = list(pages)
    segments = []
    for name, start, length in (("a", 0, page_size + 1), ("b", page_size + page_size // 2, 2), ("c", page_size, 1)):
        count = -(-(start + length) // page_size)
        mine = tuple(pages.pop() for _ in range(count))
        segments.append(Segment(name, start, tuple(range(length)), mine, True))
    return tuple(segments)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("row_format", ROW_FORMATS, ids="/".join)
def test_each_rank_holds_exactly_the_rows_it_owns(row_format: Format, page_size: int, cp_size: int) -> None:
    """Kinds 1, 2, 6, 7 and 24: every loc is beyond the local pool, and all other bytes stay 0xFF."""
    pages = random.Random(cp_size).sample(range(LOCAL_PAGES, LOCAL_PAGES * cp_size), 9)
    geometry, placement = make_geometry(row_format, page_size), PagePlacement(page_size, cp_size)
    batch = make_batch(geometry, placement, cp_size, make_segments(page_size, pages), "full")
    batch.write()
    batch.check()


@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("row_format", ROW_FORMATS, ids="/".join)
def test_in_a_replicated_pool_every_rank_holds_every_row(row_format: Format, cp_size: int) -> None:
    """Kind 10: the page is not divided where every rank holds it."""
    pages = random.Random(cp_size).sample(range(1, LOCAL_PAGES), 9)
    geometry = make_geometry(row_format, 3)
    batch = make_batch(geometry, PagePlacement(3, 1), cp_size, make_segments(3, pages), "replicated")
    batch.write()
    batch.check()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_whole_pool_can_be_written_and_read_but_for_the_trash_pages(page_size: int, cp_size: int) -> None:
    """Kind 4: every page that the allocator has, to its last row on the last rank."""
    placement = PagePlacement(page_size, cp_size)
    allocator = PageAllocator(LOCAL_PAGES * cp_size, placement, shuffle_seed=1)
    pages = allocator.allocate("all", allocator.capacity_pages)
    segment = Segment("all", 0, (0,) * (len(pages) * page_size), pages, True)
    batch = make_batch(make_geometry(("bfloat16", "fp8"), page_size), placement, cp_size, (segment,), "full")
    batch.write()
    batch.check()
    for pool in batch.pools:
        for part in (pool.latent, pool.index):
            assert bool((part[0] == 0xFF).all()), "the trash page was written"
            assert bool((part[1:] != 0xFF).all()), "a page was never written"


def test_a_rank_that_owns_nothing_of_a_batch_writes_nothing() -> None:
    """Kind 21."""
    segment = Segment("a", 0, (1, 2, 3), (4 * 7 + 2,), True)
    batch = make_batch(make_geometry(("float32", "fp8"), 3), PagePlacement(3, 4), 4, (segment,), "full")
    batch.write()
    batch.check()
    written = [bool((pool.latent != 0xFF).any()) for pool in batch.pools]
    assert written == [False, False, True, False]


def test_nan_rows_written_to_the_trash_page_change_no_other_page() -> None:
    """Kind 8."""
    batch = make_batch(
        make_geometry(("float32", "fp8"), 3), PagePlacement(3, 2), 2, make_segments(3, list(range(12, 21))), "full"
    )
    batch.write()
    pool, rows = batch.pools[1], batch.geometry.row_format
    padding = pool.place(PageWrites(np.arange(3), np.zeros(3, dtype=np.int64), np.arange(3)))
    for layer, slot in enumerate(SLOTS):
        index = torch.full((3, rows.index_row_bytes), 0xFE, dtype=torch.uint8) if slot >= 0 else None
        pool.write(layer, padding, torch.full((3, rows.latent_row_bytes), 0xFE, dtype=torch.uint8), index)
    assert bool((pool.latent[0] == 0xFE).all()) and bool((pool.index[0] == 0xFE).all())
    batch.wanted_latent[1][0], batch.wanted_index[1][0] = 0xFE, 0xFE
    batch.check()


def copied(collect: Callable[..., None], layer: int, numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What a copy puts into the middle of a poisoned buffer, at any alignment; the rest keeps its poison."""
    for first in (0, 1, 4, 8):
        buffer = torch.full((like.numel() + 20,), 0xFF, dtype=torch.uint8)
        out = buffer[first : first + like.numel()].view(like.shape)
        collect(layer, numbers, out=out)
        assert bool((buffer[:first] == 0xFF).all()) and bool((buffer[first + like.numel() :] == 0xFF).all())
        assert_same_bits(out.clone(), like, f"from byte {first} of a buffer on")
    return out


@pytest.mark.parametrize("page_size", [1, 3])
def test_layer_views_and_the_row_map_name_the_same_rows_as_plain_indexing(page_size: int) -> None:
    """The base of layer l is shifted by l * page_size rows, that of its slot by one block a slot (kind 24)."""
    geometry = make_geometry(("bfloat16", "fp8"), page_size)
    pool = PagePool(geometry, LOCAL_PAGES)
    pool.latent.copy_(random_bytes(*pool.latent.shape))
    pool.index.copy_(random_bytes(*pool.index.shape))
    slot = -1
    for layer, has_indexer in enumerate([True, True, False, True, False]):
        slot += has_indexer
        for page in range(LOCAL_PAGES):
            for offset in range(page_size):
                row = pool.latent_rows(layer)[geometry.latent_row(page, offset)]
                assert_same_bits(row, pool.latent[page, layer, offset], f"page {page}, layer {layer}, offset {offset}")
            if has_indexer:
                block = pool.index_blocks(layer)[geometry.index_block(page)]
                assert_same_bits(block, pool.index[page, slot], f"page {page}, layer {layer}")
        numbers = torch.tensor([7, 0, 11, 7])
        wanted = pool.latent[numbers, layer].flatten(1)
        assert_same_bits(copied(pool.latent_pages, layer, numbers, wanted), wanted, f"pages of layer {layer}")
        if has_indexer:
            wanted = pool.index[numbers, slot]
            assert_same_bits(copied(pool.index_pages, layer, numbers, wanted), wanted, f"blocks of layer {layer}")


@pytest.mark.parametrize("layer", [2, 4])
def test_a_layer_that_shares_a_choice_has_no_index_keys_to_read_or_write(layer: int) -> None:
    """Kind 24: slot -1 is not the last slot."""
    geometry = make_geometry(("float32", "float32"), 2)
    pool = PagePool(geometry, 3, poison=True)
    places = pool.place(PageWrites(np.arange(1), np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)))
    rows = geometry.row_format
    uses = (
        lambda: pool.index_blocks(layer),
        lambda: pool.index_pages(layer, torch.tensor([1]), out=torch.empty(1, geometry.index_block_bytes)),
        lambda: pool.write(
            layer,
            places,
            torch.zeros(1, rows.latent_row_bytes, dtype=torch.uint8),
            torch.zeros(1, rows.index_row_bytes, dtype=torch.uint8),
        ),
    )
    for use in uses:
        with pytest.raises(AllocatorError, match=f"layer {layer} reuses another layer's choice and stores no index"):
            use()
    assert bool((pool.index == 0xFF).all())


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("row_format", ROW_FORMATS, ids="/".join)
def test_the_ranks_pools_together_hold_one_copy_and_a_trash_page_a_rank(row_format: Format, cp_size: int) -> None:
    """Kind 36: what is allocated is what the planner's formula says, and a byte more nowhere."""
    page_size, num_pages = 3, 10 * cp_size
    geometry = make_geometry(row_format, page_size)
    pools = [PagePool(geometry, num_pages // cp_size) for _ in range(cp_size)]
    item = {"float64": 8, "float32": 4, "bfloat16": 2, "fp8": 1}
    token = 5 * (5 + 3) * item[row_format[0]] + 3 * (7 * item[row_format[1]] + 4 * (row_format[1] == "fp8"))
    for pool in pools:
        assert pool.allocated_bytes == geometry.pool_bytes(pool.local_pages)
        storages = [part.untyped_storage().nbytes() for part in (pool.latent, pool.index)]
        assert sum(storages) == pool.allocated_bytes, "more memory is held than counted"
        assert [region.length for region in pool.regions()] == storages
    one_copy, trash = (num_pages - cp_size) * page_size * token, cp_size * page_size * token
    assert sum(pool.allocated_bytes for pool in pools) == one_copy + trash


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_spans_of_a_page_are_its_bytes_and_the_spans_of_all_pages_are_the_regions(page_size: int) -> None:
    """One run of bytes a page and allocation: one descriptor, not one a layer."""
    geometry = make_geometry(("bfloat16", "fp8"), page_size)
    pool = PagePool(geometry, 5)
    for number, part in enumerate((pool.latent, pool.index)):
        part.copy_(random_bytes(*part.shape))
        end = part.data_ptr()
        for page in range(5):
            span = pool.page_spans(page)[number]
            assert span.address == end, "pages leave a gap or overlap"
            assert ctypes.string_at(span.address, span.length) == part[page].numpy().tobytes()
            end = span.address + span.length
        region = pool.regions()[number]
        assert (region.address, region.address + region.length) == (part.data_ptr(), end)
    assert sum(span.length for span in pool.page_spans(3)) == geometry.page_bytes


def test_poison_fills_the_named_pages_and_no_others() -> None:
    pool = PagePool(make_geometry(("float64", "float64"), 2), 5)
    assert not bool(pool.latent.any()) and not bool(pool.index.any())
    pool.poison([1, 4])
    for part in (pool.latent, pool.index):
        assert [bool((part[page] == 0xFF).all()) for page in range(5)] == [False, True, False, False, True]
        assert not bool(part[[0, 2, 3]].any())
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert bool(pool.latent[1].view(dtype).isnan().all())
    assert bool(pool.index[1].view(torch.float8_e4m3fn).to(torch.float32).isnan().all())


def test_the_digest_of_a_page_covers_every_layer_and_slot_and_no_other_page() -> None:
    geometry = make_geometry(("bfloat16", "fp8"), 2)
    pool = PagePool(geometry, 3)
    before = pool.page_digest(1)
    for part in (pool.latent, pool.index):
        for place in range(part.shape[1]):
            for at in (0, -1):
                byte = part[1, place].view(-1)[at]
                byte += 1
                assert pool.page_digest(1) != before
                byte -= 1
        part[2] = 7
    assert pool.page_digest(1) == before
    twin = PagePool(geometry, 4)
    assert twin.page_digest(3) == before


def test_a_pool_whose_rows_have_more_than_31_bits_is_refused_before_it_is_allocated() -> None:
    geometry = PoolGeometry(RowFormat("bfloat16", 512, 64, "fp8", 128), 1024, index_slots([True] * 78))
    with pytest.raises(ConfigError, match="row numbers have 31 bits; use at most 26886 local pages a rank"):
        PagePool(geometry, 26887)


def test_memory_that_is_not_there_is_a_typed_error_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_left(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    geometry = make_geometry(("float32", "float32"), 4)
    monkeypatch.setattr(torch, "full", nothing_left)
    with pytest.raises(ConfigError, match=rf"takes {geometry.pool_bytes(9)} bytes .*lower --num-pages"):
        PagePool(geometry, 9)
