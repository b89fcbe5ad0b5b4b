"""`unified` with every rank held at every point, and more random moments than the daily test holds them; nightly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from held_ranks import POINTS, Group

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="models", nightly=True)


@pytest.fixture(scope="module", params=[2, 3, 4, 8])
def group(
    request: pytest.FixtureRequest, hot_model: Callable, prompt: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Group:
    """Ranks of each number, with a model of two layers."""
    return Group(hot_model, request.param, prompt, tmp_path_factory.mktemp("pools"))


@pytest.mark.parametrize("chance", [0.03, 0.15, 0.5])
@pytest.mark.parametrize("seed", range(10, 14))
def test_ranks_held_at_random_moments_change_no_bit(
    group: Group, seed: int, chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.check_random_holds(monkeypatch, seed, chance)


@pytest.mark.parametrize("point", POINTS)
def test_one_rank_that_is_always_last_changes_no_bit(group: Group, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for slow in range(group.cp_size):
        group.check_slow_rank(monkeypatch, slow, point)
