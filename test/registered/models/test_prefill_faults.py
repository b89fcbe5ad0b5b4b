"""Kinds of faults that prefill code of this field has shipped, each in the smallest run that would show it.

In float64 against the reference, so that any wrong row, position or choice is far above the tolerance of 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pool_comparison import PoolRun, check_same_bits, run_pool, stored_request
from reference_checks import assert_same_collectives, check_float64, pages_of

from cpkv.layout.plan import BatchPlan
from cpkv.model.dsa_model import DsaModel
from cpkv.pool.page_pool import POISON_BYTE
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.ranks import ThreadedRanks
from cpkv.testing.reference import ReferenceModel
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="models")

FAMILIES = ("glm5", "glm52", "deepseek-v32")
SPLITS = ("zigzag", "interleave")
SMALL = TinyShape(num_hidden_layers=2, index_topk=16)
PAGE = 4


def run_both(
    model: DsaModel, prompts: dict[str, list[int]], *, cp_size: int, chunk_size: int, strategy: str = "zigzag"
) -> PoolRun:
    """Both pools in float64, compared; the shared run."""
    shared, _ = check_same_bits(
        model,
        prompts,
        dtype="float64",
        index_dtype="float64",
        page_size=PAGE,
        cp_size=cp_size,
        chunk_size=chunk_size,
        strategy=strategy,  # type: ignore[arg-type]
    )
    return shared


def run_shared(model: DsaModel, prompts: dict[str, list[int]], *, cp_size: int, chunk_size: int) -> PoolRun:
    """The shared pool in float64 alone."""
    return run_pool(
        model,
        prompts,
        shared=True,
        dtype="float64",
        index_dtype="float64",
        page_size=PAGE,
        cp_size=cp_size,
        chunk_size=chunk_size,
        strategy="zigzag",
    )


def check_all(run: PoolRun, checkpoint: Path, prompts: dict[str, list[int]]) -> None:
    """Every request against the reference."""
    reference = ReferenceModel(checkpoint)
    for name, ids in prompts.items():
        check_float64(run.trace, name, reference.forward(ids, record_indices=True))


@pytest.mark.parametrize("strategy", SPLITS)
def test_every_token_count_from_one_to_four_per_rank(hot_model: Callable, prompt: Callable, strategy: str) -> None:
    """Kinds 18, 21, 22: blocks of unequal length, ranks with padding only; two requests, so that offsets count."""
    checkpoint, model = hot_model("glm5", torch.float64, 4, SMALL)
    cp_size = 3
    for tokens in range(1, 4 * cp_size + 1):
        prompts = {"r": prompt(tokens, tokens), "other": prompt(5, 99)}
        run = run_both(model, prompts, cp_size=cp_size, chunk_size=100, strategy=strategy)
        check_all(run, checkpoint, prompts)


@pytest.mark.parametrize("strategy", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_positions_are_those_of_the_request(
    hot_model: Callable, prompt: Callable, family: str, strategy: str
) -> None:
    """Kind 19: rotated keys in the pool do not depend on rank, split, chunk or neighbours in the batch."""
    _, model = hot_model(family, torch.float64, 4, SMALL)
    prompts = {"first": prompt(50, 1), "second": prompt(61, 2)}
    split = run_both(model, prompts, cp_size=4, chunk_size=37, strategy=strategy)
    for name, ids in prompts.items():
        alone = run_shared(model, {name: ids}, cp_size=1, chunk_size=100)
        rows, expected = (stored_request(run, name).latent_rows().view(torch.float64) for run in (split, alone))
        assert float((rows - expected).abs().max()) <= 1e-9, f"stored rows of {name} depend on the split"
        rope = expected[..., model.shape.kv_lora_rank :]
        assert float((rope[:, 1:] - rope[:, :-1]).abs().max()) > 0.1


@pytest.mark.parametrize("shared", [True, False])
def test_a_short_batch_after_a_long_one(hot_model: Callable, prompt: Callable, shared: bool) -> None:
    """Kind 20: nothing of the long batch is left in what the short one reads."""
    _, model = hot_model("glm5", torch.float64, 4, SMALL)
    geometry = model.shape.geometry(PAGE, "float64", "float64")

    def fresh() -> ThreadedRanks:
        pages = pages_of([150, 30], PAGE, 3 if shared else 1)
        return ThreadedRanks(model, geometry, cp_size=3, shared=shared, num_pages=pages)

    used = fresh()
    used.prefill({"long": prompt(150, 1)}, chunk_size=120)
    after = used.prefill({"short": prompt(30, 2)}, chunk_size=23)
    alone = fresh().prefill({"short": prompt(30, 2)}, chunk_size=23)
    assert_same_bits(after.logits["short"], alone.logits["short"], "logits of the short batch")
    for layer, chosen in alone.choices["short"].items():
        assert_same_bits(after.choices["short"][layer], chosen, f"choice of layer {layer}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", SPLITS)
def test_ranks_without_a_token_or_a_page(hot_model: Callable, prompt: Callable, strategy: str, family: str) -> None:
    """Kinds 21, 32: idle ranks take part in every collective, and nothing is NaN."""
    checkpoint, model = hot_model(family, torch.float64, 4, SMALL)
    prompts = {"r": prompt(5)}
    run = run_both(model, prompts, cp_size=8, chunk_size=3, strategy=strategy)
    check_all(run, checkpoint, prompts)
    plans = [BatchPlan.build(spec, run.ranks.placement, 8) for spec in run.trace.specs]
    assert [plan.spec.view for plan in plans] == ["current", "mixed"]
    for plan in plans:
        assert any(not len(plan.local_tokens(rank).packed) for rank in range(8))
        assert any(not len(plan.page_writes(rank).packed) for rank in range(8))
    assert_same_collectives(run.ranks)
    busy = run_shared(model, {"r": prompt(190)}, cp_size=8, chunk_size=100)
    labels = [[collective.label for collective in ranks.sequences[0]] for ranks in (run.ranks, busy.ranks)]
    assert labels[0] == labels[1], "which collectives run depends on how many tokens there are"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_choice_is_made_over_all_ranks(hot_model: Callable, prompt: Callable, family: str) -> None:
    """Kind 23: for some queries one owner holds far more of the best keys than its share."""
    checkpoint, model = hot_model(family, torch.float64, 4, SMALL)
    prompts, cp_size = {"r": prompt(200)}, 4
    run = run_both(model, prompts, cp_size=cp_size, chunk_size=70)
    check_all(run, checkpoint, prompts)
    chosen = run.trace.choices["r"][0][-100:]
    pages = torch.tensor(run.trace.pages["r"])
    owners = run.ranks.placement.owner(pages[chosen // PAGE])
    largest = max(int((owners == rank).sum(1).max()) for rank in range(cp_size))
    assert largest >= 2 * model.shape.topk // cp_size, "the prompt does not tell a merged top-k from one per rank"


@pytest.mark.parametrize(
    ("types", "slots"),
    [
        (("full", "shared", "full", "shared"), (0, -1, 1, -1)),
        (("full", "full", "shared", "shared"), (0, 1, -1, -1)),
        (("full", "shared", "shared", "full"), (0, -1, -1, 1)),
    ],
    ids=["alternating", "second half", "between"],
)
def test_layers_that_share_a_choice(
    hot_model: Callable, prompt: Callable, types: tuple[str, ...], slots: tuple[int, ...]
) -> None:
    """Kind 24: the last full layer's choice is reused, and the index slot of a layer is not its number."""
    checkpoint, model = hot_model("glm52", torch.float64, 4, TinyShape(index_topk=16), indexer_types=types)
    prompts = {"r": prompt(150), "s": prompt(33, 5)}
    run = run_both(model, prompts, cp_size=3, chunk_size=64)
    check_all(run, checkpoint, prompts)
    geometry = run.ranks.pools[0].geometry
    assert geometry.slots == slots
    assert run.ranks.pools[0].index.shape[1] == 2, "a layer without an indexer takes memory for keys"
    full = [layer for layer, kind in enumerate(types) if kind == "full"]
    assert list(run.trace.choices["r"]) == full
    first, last = (run.trace.choices["r"][layer] for layer in full)
    assert not torch.equal(first, last), "the full layers choose alike, so reusing the wrong one would not show"


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_are_written_where_scoring_is_skipped(hot_model: Callable, prompt: Callable, family: str) -> None:
    """Kind 25: a first chunk no longer than the top-k needs no scores; later chunks need its keys all the same."""
    checkpoint, model = hot_model(family, torch.float64, 4, SMALL)
    topk, start = model.shape.topk, {"r": prompt(model.shape.topk)}
    run = run_shared(model, start, cp_size=4, chunk_size=topk)
    keys = stored_request(run, "r").index_keys()
    assert not bool((keys == POISON_BYTE).all(-1).any()), "an index key was not written"
    longer = {"r": prompt(90)}
    check_all(run_both(model, longer, cp_size=4, chunk_size=topk), checkpoint, longer)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rope_layout_of_the_indexer(hot_model: Callable, prompt: Callable, family: str) -> None:
    """Kind 27: right as it is, and another layout would change choices and so be seen."""
    checkpoint, model = hot_model(family, torch.float64, 4, SMALL)
    assert model.shape.indexer_rope == ("halves" if family == "deepseek-v32" else "interleaved")
    prompts = {"r": prompt(120)}
    check_all(run_both(model, prompts, cp_size=2, chunk_size=50), checkpoint, prompts)
    right = model.shape
    other = "interleaved" if right.indexer_rope == "halves" else "halves"
    model.shape = replace(right, indexer_rope=other)  # type: ignore[arg-type]
    try:
        wrong = run_shared(model, prompts, cp_size=2, chunk_size=50)
    finally:
        model.shape = right
    with pytest.raises(AssertionError, match="chosen sets differ"):
        check_all(wrong, checkpoint, prompts)


@pytest.mark.parametrize("strategy", SPLITS)
def test_chunks_of_one_token_begin_in_pages_of_others(hot_model: Callable, prompt: Callable, strategy: str) -> None:
    """Kind 16: all but one chunk in four begins inside a page, which another rank than the computing one owns."""
    checkpoint, model = hot_model("glm52", torch.float64, 4, SMALL)
    prompts = {"r": prompt(3 * PAGE + 1)}
    check_all(run_both(model, prompts, cp_size=3, chunk_size=1, strategy=strategy), checkpoint, prompts)
