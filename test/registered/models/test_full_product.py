"""Every combination of the covering set's values, against the reference and against transformers; nightly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from covering import Case, full_product
from reference_checks import check_float64, check_real_rows, prefill_case, sets_must_be_equal

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1500, suite="models", nightly=True)


@pytest.mark.parametrize("case", full_product(), ids=str)
def test_every_combination_equals_the_reference(
    case: Case, hot_model: Callable, prompt: Callable, reference: Callable
) -> None:
    _, model = hot_model(case.family, torch.float64, case.index_heads, case.shape)
    check_float64(prefill_case(case, model, prompt(case.tokens), "float64"), "r", reference(case))


@pytest.mark.parametrize("case", full_product(), ids=str)
def test_every_combination_equals_transformers(
    case: Case, hot_model: Callable, prompt: Callable, oracle: Callable
) -> None:
    _, model = hot_model(case.family, torch.float32, case.index_heads, case.shape)
    ids = prompt(case.tokens)
    ours = prefill_case(case, model, ids, "float32")
    oracle(case.family, case.index_heads, case.shape).check(ours, "r", ids, sets_equal=sets_must_be_equal(case))


def test_real_rows_and_the_best_2048_equal_transformers(
    hot_model: Callable, prompt: Callable, oracle: Callable
) -> None:
    """2,500 tokens, so that the last 452 queries leave keys out."""
    check_real_rows(hot_model, prompt, oracle, tokens=2500, topk=2048)
