"""Capacity is counted by filling allocators: shared holds exactly cp_size times what replicated holds."""

from __future__ import annotations

import pytest

from cpkv.cache.capacity import allocatable_tokens, capacity_ratio
from cpkv.errors import ConfigError
from cpkv.layout.placement import PagePlacement
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_the_capacity_ratio_is_the_number_of_ranks_for_every_pool_size(cp_size: int) -> None:
    """Kind 36: equal bytes a rank, its trash page counted on both sides."""
    for local_pages in (2, 3, 4, 7, 16, 33, 100):
        for page_size in (1, 3, 64):
            assert capacity_ratio(local_pages, page_size, cp_size) == cp_size


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_tokens_are_those_of_all_pages_but_one_a_rank(cp_size: int) -> None:
    for local_pages in (2, 5, 40):
        assert allocatable_tokens(local_pages, PagePlacement(16, cp_size)) == (local_pages - 1) * cp_size * 16


def test_a_pool_of_trash_pages_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 of them are reserved"):
        allocatable_tokens(1, PagePlacement(16, 4))
