"""Every pair of values of the plans of which the daily tests run some, and every boundary with both splits; nightly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pool_comparison import ViewKind, check_same_bits
from view_cases import (
    BOUNDARIES,
    SPLITS,
    LongPrompts,
    ThreeRequests,
    check_history,
    pairs_of_long_prompts,
    pairs_of_three_requests,
)

from cpkv.config.names import SplitStrategy
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=110, suite="models", nightly=True)


@pytest.mark.parametrize(("kind", "case"), pairs_of_three_requests(), ids=str)
def test_a_batch_of_requests_has_the_same_bits(
    hot_model: Callable, prompt: Callable, kind: ViewKind, case: ThreeRequests
) -> None:
    case.check(hot_model, prompt, (kind,))


@pytest.mark.parametrize("case", pairs_of_long_prompts(), ids=str)
def test_every_view_of_long_prompts(hot_model: Callable, prompt: Callable, case: LongPrompts) -> None:
    case.check(hot_model, prompt)


@pytest.mark.parametrize("strategy", SPLITS)
@pytest.mark.parametrize("history", BOUNDARIES)
def test_every_view_of_a_history_at_a_boundary(
    hot_model: Callable, prompt: Callable, history: int, strategy: SplitStrategy
) -> None:
    check_history(hot_model, prompt, history, strategy)


def test_real_rows_and_the_best_2048_have_the_same_bits(hot_model: Callable, prompt: Callable) -> None:
    """3,000 tokens over 4 ranks, the second chunk with history."""
    _, model = hot_model("glm5", torch.bfloat16, 4, TinyShape.real_rows())
    check_same_bits(
        model,
        {"r": prompt(3000)},
        dtype="bfloat16",
        index_dtype="fp8",
        page_size=64,
        cp_size=4,
        chunk_size=2300,
        strategy="zigzag",
    )
