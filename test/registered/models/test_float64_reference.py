"""The engine in float64 against the float64 reference: chosen sets equal, logits within 1e-9, tokens equal.

Every prompt position and every layer is compared. The reference shares no code with the engine: it expands MLA instead
of absorbing it, attends densely under a mask, and runs the prompt in one shot.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from covering import Case, covering_set, uncovered_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import FAMILIES, check_either_pool_and_reference
from reference_checks import check_float64, prefill_case

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=11, suite="models")


def test_every_pair_of_values_is_covered() -> None:
    for family in (*FAMILIES, None):
        assert uncovered_pairs(covering_set(family), family) == set()
        assert 30 <= len(covering_set(family)) <= 50


@pytest.mark.parametrize("case", covering_set(), ids=str)
def test_prefill_equals_the_reference(case: Case, hot_model: Callable, prompt: Callable, reference: Callable) -> None:
    """Kinds 16, 18, 19, 21, 22, 23, 24, 27: sets, logits and tokens, over a pairwise covering set."""
    _, model = hot_model(case.family, torch.float64, index_heads=case.index_heads, shape=case.shape)
    check_float64(prefill_case(case, model, prompt(case.tokens), "float64"), "r", reference(case))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(data=st.data())
def test_any_batch_equals_the_reference(
    hot_model: Callable, prompt: Callable, reference_model: Callable, family: str, data: st.DataObject
) -> None:
    """Requests of any lengths, at most 300 tokens in all, any ranks, split, chunk and page, few index heads (ties)."""
    check_either_pool_and_reference(data, family, hot_model, prompt, reference_model)  # type: ignore[arg-type]
