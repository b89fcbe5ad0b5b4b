"""The engine in float32 against transformers (eager attention and experts, its top-k replaced by a stable one).

Every prompt position and every layer is compared. transformers is given the engine's choices and tells, layer by layer,
what it would have chosen by itself and from which scores:

    at most 1,000 tokens, 16 heads   the chosen sets are equal, logits within 5e-5 of their deviation, tokens equal
    else                             each choice is right within a score of 1e-5, logits within 1e-4, tokens equal where
                                     the two best logits are more than 1e-2 apart
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from covering import Case, covering_set
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import FAMILIES, check_either_pool_and_transformers
from reference_checks import ChoiceRule, prefill_case, sets_must_be_equal

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="models")


@pytest.mark.parametrize("case", covering_set("deepseek-v32"), ids=str)
def test_prefill_equals_transformers(case: Case, hot_model: Callable, prompt: Callable, oracle: Callable) -> None:
    """Kinds 16, 18, 19, 21, 22, 23, 24, 27: sets, logits and tokens, over a pairwise covering set."""
    _, model = hot_model(case.family, torch.float32, index_heads=case.index_heads, shape=case.shape)
    ids = prompt(case.tokens)
    ours = prefill_case(case, model, ids, "float32")
    oracle(case.family, case.index_heads, case.shape).check(ours, "r", ids, sets_equal=sets_must_be_equal(case))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(data=st.data())
def test_any_batch_equals_transformers(
    hot_model: Callable, prompt: Callable, oracle: Callable, family: str, data: st.DataObject
) -> None:
    """Requests of any lengths, at most 300 tokens in all, any ranks, split, chunk and page."""
    check_either_pool_and_transformers(data, family, hot_model, prompt, oracle)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "wrong"),
    [
        pytest.param([[0, 1, 2]], None, id="the best three"),
        pytest.param([[0, 1, 3]], None, id="a near-tie decided otherwise"),
        pytest.param([[0, 2, 3]], "misses the best", id="a clear one left out"),
        pytest.param([[0, 1, 4]], "misses the best", id="a clearly worse one taken"),
        pytest.param([[-1, 0, 1]], "too few", id="one too few"),
        pytest.param([[0, 1, 5]], "future", id="one of the future"),
    ],
)
def test_the_rule_for_choices(chosen: list[list[int]], wrong: str | None) -> None:
    """The rule itself passes what float32 may do, and nothing else."""
    scores = torch.tensor([[[0.9, 0.8, 0.5, 0.5 - 1e-6, 0.1, float("-inf")]]])
    rule = ChoiceRule([torch.tensor(chosen)])
    if wrong is None:
        with rule.around(0):
            scores.topk(3, dim=-1)
        rule.check_saw_all(1, [0])
    else:
        with pytest.raises(AssertionError, match=wrong), rule.around(0):
            scores.topk(3, dim=-1)
