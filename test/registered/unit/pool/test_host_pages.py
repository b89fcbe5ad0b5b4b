"""Pages copied between pools: whole ones, those that are named, and no other byte."""

from __future__ import annotations

import ctypes

import pytest
import torch

from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.row_format import RowFormat
from cpkv.pool import page_pool
from cpkv.pool.host_pages import HostPages
from cpkv.pool.page_pool import PagePool
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

GEOMETRY = PoolGeometry(RowFormat("float32", 5, 3, "fp8", 7), 3, index_slots([True, False, True]))


def random_pool(geometry: PoolGeometry) -> PagePool:
    pool = PagePool(geometry, 7)
    pool.latent.random_(0, 255)
    pool.index.random_(0, 255)
    return pool


@pytest.mark.parametrize("copy_bytes", [1, 2 * GEOMETRY.pool_bytes(1), 1 << 20])
@pytest.mark.parametrize("pages", [[], [3], [6, 0, 2, 5]])
def test_the_pages_that_are_named_are_copied(
    monkeypatch: pytest.MonkeyPatch, pages: list[int], copy_bytes: int
) -> None:
    """A few at a time or all at once; the others keep their poison."""
    monkeypatch.setattr(page_pool, "COPY_BYTES", copy_bytes)
    source, target = random_pool(GEOMETRY), PagePool(GEOMETRY, 7, poison=True)
    target.copy_pages(source, pages)
    for page in range(7):
        for ours, theirs in ((target.latent, source.latent), (target.index, source.index)):
            assert torch.equal(ours[page], theirs[page] if page in pages else torch.full_like(ours[page], 0xFF))


def test_a_sender_reads_the_copy_and_digests_the_original() -> None:
    """What a span of memory holds once its page is staged; a page that was not is not there."""
    pool = random_pool(GEOMETRY)
    pages = HostPages(pool)
    pages.stage([4])
    (latent, index), regions = pages.page_spans(4), pages.regions()
    assert ctypes.string_at(latent.address, latent.length) == pool.latent[4].numpy().tobytes()
    assert ctypes.string_at(index.address, index.length) == pool.index[4].numpy().tobytes()
    assert [region.length for region in regions] == [7 * latent.length, 7 * index.length]
    assert latent.address - regions[0].address == 4 * latent.length
    assert latent.address != pool.page_spans(4)[0].address
    assert pages.page_digest(4) == pool.page_digest(4)
    pool.latent[4] += 1
    assert pages.page_digest(4) == pool.page_digest(4)
