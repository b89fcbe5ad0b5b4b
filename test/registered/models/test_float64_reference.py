"""The engine in float64 against the float64 reference: chosen sets equal, logits within 1e-9, tokens equal.

Every prompt position and every layer is compared. The reference shares no code with the engine: it expands MLA instead
of absorbing it, attends densely under a mask, and runs the prompt in one shot.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from covering import LONG, PAGE, Case, covering_set
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.testing.checkpoints import Family, TinyShape
from cpkv.testing.ranks import PrefillTrace, ThreadedRanks
from cpkv.testing.reference import ReferenceModel, ReferenceResult
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=95, suite="models")

TOLERANCE = 1e-9
SMALL = TinyShape(num_hidden_layers=2, index_topk=16)


def pages_of(prompts: dict[str, list[int]], page_size: int, cp_size: int) -> int:
    """Logical pages that hold the prompts, reserved ones included, a multiple of cp_size."""
    pages = sum(-(-len(ids) // page_size) for ids in prompts.values())
    return (-(-pages // cp_size) + 1) * cp_size


def check(ours: PrefillTrace, name: str, theirs: ReferenceResult) -> None:
    """Compare one request at every position and in every layer."""
    for layer, chosen in ours.choices[name].items():
        expected = theirs.indices[layer].long()
        sorted_ours = chosen.sort(dim=-1).values[:, chosen.shape[1] - expected.shape[1] :]
        wrong = (sorted_ours != expected).any(dim=1).nonzero().flatten().tolist()
        assert not wrong, f"layer {layer}: the chosen set differs at positions {wrong[:5]} of {len(expected)}"
        assert int((chosen >= 0).sum()) == int((expected >= 0).sum()), f"layer {layer}: chosen positions are cut off"
    difference = float((ours.logits[name] - theirs.logits).abs().max())
    assert difference <= TOLERANCE, f"logits differ by {difference:.3g}"
    assert torch.equal(ours.logits[name].argmax(-1), theirs.logits.argmax(-1)), "greedy tokens differ"
    assert torch.allclose(ours.last_logits[name], theirs.logits[-1], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def reference(hot_model: Callable, prompt: Callable) -> Callable[[Family, int, int], ReferenceResult]:
    """References by family and heads; a long one serves shorter prompts, since they are its prefixes."""
    known: dict[tuple[Family, int], ReferenceResult] = {}

    def run(family: Family, index_heads: int, tokens: int) -> ReferenceResult:
        key = (family, index_heads)
        if key not in known or len(known[key].logits) < tokens:
            checkpoint, _ = hot_model(family, torch.float64, index_heads)
            length = LONG if tokens == LONG else max(tokens, 701)
            known[key] = ReferenceModel(checkpoint).forward(prompt(length), record_indices=True)
        full = known[key]
        width = min(full.indices[0].shape[1], tokens)
        indices = [layer[:tokens, layer.shape[1] - width :] for layer in full.indices]
        return ReferenceResult(full.logits[:tokens], indices)

    return run


@pytest.mark.parametrize("case", covering_set(), ids=str)
def test_prefill_equals_the_reference(case: Case, hot_model: Callable, prompt: Callable, reference: Callable) -> None:
    """Kinds 16, 18, 19, 21, 22, 23, 24, 27: sets, logits and tokens, over a pairwise covering set."""
    _, model = hot_model(case.family, torch.float64, case.index_heads)
    prompts = {"r": prompt(case.tokens)}
    ranks = ThreadedRanks(
        model,
        model.shape.geometry(PAGE, "float64", "float64"),
        cp_size=case.cp_size,
        shared=True,
        num_pages=pages_of(prompts, PAGE, case.cp_size),
    )
    ours = ranks.prefill(prompts, chunk_size=case.chunk_size, strategy=case.strategy)
    check(ours, "r", reference(case.family, case.index_heads, case.tokens))
    assert all(sequence == ranks.sequences[0] for sequence in ranks.sequences), "the ranks' collectives differ"


@settings(max_examples=200)
@given(data=st.data())
def test_any_batch_equals_the_reference(hot_model: Callable, prompt: Callable, data: st.DataObject) -> None:
    """Requests of any lengths, at most 300 tokens in all, any ranks, split, chunk and page, few index heads (ties)."""
    family = data.draw(st.sampled_from(("glm5", "glm52", "deepseek-v32")), "family")
    index_heads = data.draw(st.sampled_from((1, 4)), "index heads")
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=3), "lengths")
    cp_size = data.draw(st.integers(1, 4), "cp_size")
    page_size = data.draw(st.sampled_from((1, 3, 16)), "page_size")
    checkpoint, model = hot_model(family, torch.float64, index_heads, SMALL)
    prompts = {f"r{i}": prompt(length, i) for i, length in enumerate(lengths)}
    ranks = ThreadedRanks(
        model,
        model.shape.geometry(page_size, "float64", "float64"),
        cp_size=cp_size,
        shared=data.draw(st.booleans(), "shared"),
        num_pages=pages_of(prompts, page_size, cp_size),
    )
    ours = ranks.prefill(
        prompts,
        chunk_size=data.draw(st.integers(1, 120), "chunk_size"),
        strategy=data.draw(st.sampled_from(("zigzag", "interleave")), "strategy"),
        current_reuse=data.draw(st.booleans(), "current_reuse"),
    )
    oracle = ReferenceModel(checkpoint)
    for name, ids in prompts.items():
        check(ours, name, oracle.forward(ids, record_indices=True))
    assert all(sequence == ranks.sequences[0] for sequence in ranks.sequences), "the ranks' collectives differ"
