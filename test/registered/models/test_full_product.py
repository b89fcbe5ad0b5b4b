"""The full product of the covering set's values, against the float64 reference; nightly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from covering import LONG_HEADS, PAGE, PARAMETERS, Case
from test_float64_reference import check, pages_of

from cpkv.testing.ranks import ThreadedRanks
from cpkv.testing.reference import ReferenceModel, ReferenceResult
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1500, suite="models", nightly=True)

FAMILIES = [(family, index_heads) for family in PARAMETERS[0] for index_heads in PARAMETERS[5]]


@pytest.mark.parametrize(("family", "index_heads"), FAMILIES)
@pytest.mark.parametrize("length_name", PARAMETERS[1])
def test_every_combination_equals_the_reference(
    hot_model: Callable, prompt: Callable, family: str, index_heads: int, length_name: str
) -> None:
    """Every rank count, split and chunk of one family and length."""
    if length_name == "5000" and LONG_HEADS[family] != index_heads:
        pytest.skip("the long prompt meets each family with one number of index heads, for the time it takes")
    checkpoint, model = hot_model(family, torch.float64, index_heads)
    geometry = model.shape.geometry(PAGE, "float64", "float64")
    oracle, known = ReferenceModel(checkpoint), dict[int, ReferenceResult]()
    for cp_size, strategy, chunk_size in product(PARAMETERS[2], PARAMETERS[3], PARAMETERS[4]):
        case = Case(family, length_name, cp_size, strategy, chunk_size, index_heads)  # type: ignore[arg-type]
        prompts = {"r": prompt(case.tokens)}
        if case.tokens not in known:
            known[case.tokens] = oracle.forward(prompts["r"], record_indices=True)
        ranks = ThreadedRanks(model, geometry, cp_size=cp_size, shared=True, num_pages=pages_of(prompts, PAGE, cp_size))
        ours = ranks.prefill(prompts, chunk_size=chunk_size, strategy=strategy)  # type: ignore[arg-type]
        check(ours, "r", known[case.tokens])
