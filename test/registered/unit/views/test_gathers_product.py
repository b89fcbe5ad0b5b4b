"""What views gather and hold, in every combination of which the daily tests have some; nightly."""

from __future__ import annotations

from pathlib import Path

import pytest
from gather_checks import HISTORIES, LONGEST, NO_HISTORY, check_bytes, check_order, check_scratch
from view_ranks import ONE_COPY

from cpkv.config.names import ViewName
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit", nightly=True)


@pytest.mark.parametrize("topk", [1, LONGEST - 1, LONGEST])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("view", ["mixed", "full"])
def test_all_ranks_start_the_same_gathers_in_the_order_of_the_plan(
    view: ViewName, cp_size: int, prefetch: bool, topk: int
) -> None:
    check_order(view, cp_size, prefetch, topk)


@pytest.mark.parametrize("topk", [1, LONGEST])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(("cp_size", "page_size"), [(2, 1), (3, 16), (4, 3), (8, 3)])
@pytest.mark.parametrize("view", ["mixed", "full", "layer-split"])
def test_the_bytes_moved_are_those_of_the_planner_and_of_a_count(
    view: ViewName, cp_size: int, page_size: int, prefetch: bool, topk: int
) -> None:
    check_bytes(view, cp_size, page_size, prefetch, topk)


@pytest.mark.parametrize("topk", [1, LONGEST])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("lengths", [HISTORIES, NO_HISTORY, [(0, 1)]], ids=["history", "no history", "one token"])
@pytest.mark.parametrize("view", [*ONE_COPY, "current", "replicated", "layer-split"])
def test_the_scratch_is_what_the_planner_says(
    view: ViewName, lengths: list[tuple[int, int]], prefetch: bool, topk: int, tmp_path: Path
) -> None:
    check_scratch(view, lengths, prefetch, topk, tmp_path)
