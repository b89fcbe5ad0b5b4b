"""More of the random prefills of the daily tests; nightly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import (
    FAMILIES,
    check_both_pools_and_reference,
    check_either_pool_and_reference,
    check_either_pool_and_transformers,
    check_served_formats,
)

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=130, suite="models", nightly=True)

EXAMPLES = 67


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_batch_has_the_same_bits(hot_model: Callable, prompt: Callable, data: st.DataObject) -> None:
    check_served_formats(data, hot_model, prompt)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_batch_equals_replicated_and_the_reference(
    hot_model: Callable, prompt: Callable, reference_model: Callable, family: str, data: st.DataObject
) -> None:
    check_both_pools_and_reference(data, family, hot_model, prompt, reference_model)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_batch_equals_the_reference(
    hot_model: Callable, prompt: Callable, reference_model: Callable, family: str, data: st.DataObject
) -> None:
    check_either_pool_and_reference(data, family, hot_model, prompt, reference_model)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_batch_equals_transformers(
    hot_model: Callable, prompt: Callable, oracle: Callable, family: str, data: st.DataObject
) -> None:
    check_either_pool_and_transformers(data, family, hot_model, prompt, oracle)  # type: ignore[arg-type]
