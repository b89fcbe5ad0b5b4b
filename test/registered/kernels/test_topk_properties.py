"""The exact choice over drawn blocks of scores. On the CPU alone, since machines with a GPU may lack hypothesis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from topk_cases import FEW_VALUES, ScoreBlock, check_choice, shrink

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="kernels")


@st.composite
def score_blocks(draw: st.DrawFn) -> ScoreBlock:
    tokens = draw(st.integers(1, 600))
    kinds = [st.sampled_from(FEW_VALUES), st.sampled_from([0.0, -0.0]), st.floats(-4, 4, width=32)]
    values = draw(st.sampled_from(kinds))
    # A few drawn scores over and over, since long lists of draws are slow.
    period = draw(st.lists(values, min_size=1, max_size=12))
    shifts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    rows = [[period[(position + shift) % len(period)] for position in range(tokens)] for shift in shifts]
    for row in rows:
        row[draw(st.integers(0, tokens - 1))] = draw(values)
    limits = [draw(st.integers(0, tokens)) for _ in rows]
    return ScoreBlock(rows, limits, draw(st.integers(1, tokens + 3)))


@settings(max_examples=15)
@given(block=score_blocks())
def test_the_choice_is_that_of_a_stable_sort(block: ScoreBlock) -> None:
    """Score descending, then lowest position; what lies beyond a limit is never chosen; -1 behind the last."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        check_choice(block, torch.device("cpu"))
