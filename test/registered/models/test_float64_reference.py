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
from reference_checks import assert_same_collectives, check_float64, pages_of, prefill_case

from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.ranks import ThreadedRanks
from cpkv.testing.reference import ReferenceModel
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=60, suite="models")

FAMILIES = ("glm5", "glm52", "deepseek-v32")
SMALL = TinyShape(num_hidden_layers=2, index_topk=16)


def test_every_pair_of_values_is_covered() -> None:
    assert uncovered_pairs(covering_set()) == set()
    assert 30 <= len(covering_set()) <= 50


@pytest.mark.parametrize("case", covering_set(), ids=str)
def test_prefill_equals_the_reference(case: Case, hot_model: Callable, prompt: Callable, reference: Callable) -> None:
    """Kinds 16, 18, 19, 21, 22, 23, 24, 27: sets, logits and tokens, over a pairwise covering set."""
    _, model = hot_model(case.family, torch.float64, index_heads=case.index_heads, shape=case.shape)
    check_float64(prefill_case(case, model, prompt(case.tokens), "float64"), "r", reference(case))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=67)
@given(data=st.data())
def test_any_batch_equals_the_reference(
    hot_model: Callable, prompt: Callable, family: str, data: st.DataObject
) -> None:
    """Requests of any lengths, at most 300 tokens in all, any ranks, split, chunk and page, few index heads (ties)."""
    index_heads = data.draw(st.sampled_from((1, 4)), "index heads")
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=3), "lengths")
    cp_size = data.draw(st.integers(1, 4), "cp_size")
    page_size = data.draw(st.sampled_from((1, 3, 16)), "page_size")
    checkpoint, model = hot_model(family, torch.float64, index_heads=index_heads, shape=SMALL)
    prompts = {f"r{i}": prompt(length, i) for i, length in enumerate(lengths)}
    ranks = ThreadedRanks(
        model,
        model.shape.geometry(page_size, "float64", "float64"),
        cp_size=cp_size,
        shared=data.draw(st.booleans(), "shared"),
        num_pages=pages_of(lengths, page_size, cp_size),
    )
    ours = ranks.prefill(
        prompts,
        chunk_size=-(-sum(lengths) // data.draw(st.integers(1, 12), "batches")),
        strategy=data.draw(st.sampled_from(("zigzag", "interleave")), "strategy"),
        current_reuse=data.draw(st.booleans(), "current_reuse"),
    )
    reference = ReferenceModel(checkpoint)
    for name, ids in prompts.items():
        check_float64(ours, name, reference.forward(ids, record_indices=True))
    assert_same_collectives(ranks)
