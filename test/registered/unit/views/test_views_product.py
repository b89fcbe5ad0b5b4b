"""Every view at every boundary with more ranks and page sizes than the daily test; nightly."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from view_ranks import check_every_boundary

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="unit", nightly=True)


@pytest.mark.parametrize(("cp_size", "page_size"), list(product(range(1, 9), (1, 3, 16))))
def test_every_view_shows_every_position(cp_size: int, page_size: int, tmp_path: Path) -> None:
    check_every_boundary(cp_size, page_size, tmp_path)
