"""The engine in float32 against transformers (eager experts, a stable top-k), over the same pairwise covering set.

transformers is given the positions that the engine chose, layer by layer, and says what it would have chosen itself.
Two float32 programs add in different orders, so scores that are equal to rounding may be decided otherwise: a row may
then differ in one position, and at most one row in 400 may. Logits must agree within 1e-4 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from covering import LONG, LONG_HEADS, PAGE, Case, covering_set

from cpkv.testing.checkpoints import Family
from cpkv.testing.oracle import TransformersOracle
from cpkv.testing.ranks import ThreadedRanks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=70, suite="models")

TOLERANCE = 1e-4
DECIDED_MARGIN = 1e-2
FLIPPED_SHARE = 1 / 400


def differing_rows(ours: torch.Tensor, theirs: torch.Tensor) -> list[int]:
    """Rows whose chosen sets differ; fails when a row differs in more than one position."""
    theirs = theirs.long()
    ours = ours.sort(dim=-1).values[:, ours.shape[1] - theirs.shape[1] :]
    rows = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
    for row in rows:
        extra = set(ours[row].tolist()) - set(theirs[row].tolist())
        assert len(extra) <= 1, f"position {row} chose {sorted(extra)} where transformers chose otherwise"
    return rows


@pytest.fixture(scope="module")
def oracle(hot_model: Callable) -> Callable[[Family, int], TransformersOracle]:
    """transformers by family and index heads."""
    made: dict[tuple[Family, int], TransformersOracle] = {}

    def load(family: Family, index_heads: int) -> TransformersOracle:
        key = (family, index_heads)
        if key not in made:
            made[key] = TransformersOracle(hot_model(family, torch.float32, index_heads)[0])
        return made[key]

    return load


def float32_cases() -> list[Case]:
    """The covering set; of the long cases one per family, since transformers takes seconds for each."""
    cases = covering_set()
    long_cases = {case.family: case for case in cases if case.tokens == LONG}
    assert set(long_cases) == set(LONG_HEADS)
    return [case for case in cases if case.tokens != LONG] + list(long_cases.values())


@pytest.mark.parametrize("case", float32_cases(), ids=str)
def test_prefill_equals_transformers(case: Case, hot_model: Callable, prompt: Callable, oracle: Callable) -> None:
    """Sets, logits of every position, and tokens wherever transformers' two best logits are apart."""
    _, model = hot_model(case.family, torch.float32, case.index_heads)
    ids = prompt(case.tokens)
    num_pages = (case.tokens // PAGE // case.cp_size + 2) * case.cp_size
    ranks = ThreadedRanks(
        model,
        model.shape.geometry(PAGE, "float32", "float32"),
        cp_size=case.cp_size,
        shared=True,
        num_pages=num_pages,
    )
    ours = ranks.prefill({"r": ids}, chunk_size=case.chunk_size, strategy=case.strategy)
    choices = ours.choices["r"]
    replay, last = [], torch.empty(0)
    for layer in range(model.shape.num_layers):
        last = choices.get(layer, last)
        replay.append(last.int())
    theirs = oracle(case.family, case.index_heads).trace(ids, 256, replay=replay)
    flipped = [row for layer, chosen in choices.items() for row in differing_rows(chosen, theirs.indices[layer])]
    assert len(flipped) <= FLIPPED_SHARE * len(ids) * len(choices), (
        f"{len(flipped)} rows chose otherwise: {flipped[:9]}"
    )
    difference = float((ours.logits["r"] - theirs.logits).abs().max())
    assert difference <= TOLERANCE, f"logits differ by {difference:.3g}"
    best = theirs.logits.topk(2, dim=-1).values
    decided = best[:, 0] - best[:, 1] > DECIDED_MARGIN
    assert torch.equal(ours.logits["r"].argmax(-1)[decided], theirs.logits.argmax(-1)[decided]), "decided tokens differ"
