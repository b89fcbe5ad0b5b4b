"""Every view over the same plans equals replicated bit for bit: long prompts, full batches, histories of every length.

The replicated run of a plan is made once and every view is held against it. Pools and scratch start poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from allpairspy import AllPairs
from pool_comparison import BLOCKED, FULL, MIXED, UNIFIED, VIEW_KINDS, PoolRun, check_views
from reference_checks import pages_of

from cpkv.config.names import KvView
from cpkv.errors import CapacityError
from cpkv.layout.view_costs import ViewOptions
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.ranks import PrefillTrace, ThreadedRanks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=75, suite="models")

# Of the model, its latent rows and its index keys.
FORMATS = (
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "fp8"),
    ("float32", "fp8", "fp8"),
    ("bfloat16", "fp8", "fp8"),
)
SMALL = TinyShape(num_hidden_layers=2, index_topk=16)
PAGE, CP_SIZE, KEY_BLOCK = 16, 4, 512
LAYOUTS = ((2, 16), (3, 5), (4, 64), (8, 16))


def combinations() -> list[tuple[object, ...]]:
    """Every pair of format, (ranks, page size), family, split and (tokens of the first prompt, chunk) occurs."""
    values: tuple[Sequence[object], ...] = (
        FORMATS, LAYOUTS, ("glm52", "glm5", "deepseek-v32"), ("zigzag", "interleave"), ((1290, 600), (700, 333)),
    )  # fmt: skip
    return [tuple(row) for row in AllPairs(values)]


@pytest.mark.parametrize(("formats", "layout", "family", "strategy", "lengths"), combinations())
def test_every_view_of_long_prompts(
    hot_model: Callable,
    prompt: Callable,
    formats: tuple[str, str, str],
    layout: tuple[int, int],
    family: str,
    strategy: str,
    lengths: tuple[int, int],
) -> None:
    """Several blocks of keys and several rounds of rows, behind which others with little or no history come."""
    types = ("full", "shared") if family == "glm52" else None
    _, model = hot_model(family, torch_dtype(formats[0]), 4, SMALL, indexer_types=types)  # type: ignore[arg-type]
    (cp_size, page_size), (tokens, chunk_size) = layout, lengths
    runs, _ = check_views(
        model,
        {"long": prompt(tokens, 1), "one": prompt(1, 2), "short": prompt(90, 3)},
        dtype=formats[1],  # type: ignore[arg-type]
        index_dtype=formats[2],  # type: ignore[arg-type]
        page_size=page_size,
        cp_size=cp_size,
        chunk_size=chunk_size,
        strategy=strategy,  # type: ignore[arg-type]
    )
    check_what_ran(runs)


def check_what_ran(runs: list[PoolRun]) -> None:
    """Each run used the views that its name says, and moved what those move."""
    for kind, run in zip(VIEW_KINDS, runs, strict=True):
        names = set(run.ranks.counters[0].batches)
        history = "unified" if kind.one_range else "mixed"
        if kind.view == "auto":
            assert names == ({"current", history} if kind.current_reuse else {history})
        else:
            assert names == {kind.view}
    moved = {kind: run.ranks.counters[0].moved_bytes for kind, run in zip(VIEW_KINDS, runs, strict=True)}
    assert moved[MIXED] == moved[FULL] == moved[MIXED._replace(prefetch=False)] > 0
    assert moved[UNIFIED] == 0
    labels = [label for _, label, *_ in runs[VIEW_KINDS.index(BLOCKED)].ranks.sequences[0]]
    assert len(labels) > len(set(labels)), "`blocked` needed one block of keys and one round only"


@pytest.mark.parametrize("requests", range(1, 9))
def test_every_view_of_batches_of_one_to_eight(hot_model: Callable, prompt: Callable, requests: int) -> None:
    """Whole requests and a part of one in each batch; some with history, some without, on up to eight ranks."""
    _, model = hot_model("glm52", torch.float32, 4, TinyShape(index_topk=16))
    lengths = [(40, 3, 17, 64, 1, 33, 16, 15)[number] for number in range(requests)]
    prompts = {f"r{number}": prompt(length, number) for number, length in enumerate(lengths)}
    runs, _ = check_views(
        model,
        prompts,
        dtype="float32",
        index_dtype="fp8",
        page_size=PAGE,
        cp_size=max(2, requests),
        # One token of the last request is left for the second batch.
        chunk_size=max(1, sum(lengths) - 1),
        strategy="interleave" if requests % 2 else "zigzag",
    )
    assert max(len(spec.segments) for spec in runs[0].trace.specs) == requests - (lengths[-1] == 1)


BOUNDARIES = (
    1, PAGE - 1, PAGE, PAGE + 1, CP_SIZE * PAGE - 1, CP_SIZE * PAGE, CP_SIZE * PAGE + 1,
    KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK - 1, 2 * KEY_BLOCK, 2 * KEY_BLOCK + 1,
)  # fmt: skip


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
@pytest.mark.parametrize("history", BOUNDARIES)
def test_every_view_of_a_history_at_a_boundary(
    hot_model: Callable, prompt: Callable, history: int, strategy: str
) -> None:
    """The second batch holds `history` tokens of one request behind it, and all of another one."""
    _, model = hot_model("glm5", torch.float32, 4, SMALL)
    chunk = max(120, history)
    filler = {"filler": prompt(chunk - history, 1)} if chunk > history else {}
    runs, _ = check_views(
        model,
        filler | {"target": prompt(history + 37, 2), "other": prompt(50, 3)},
        dtype="fp8",
        index_dtype="fp8",
        page_size=PAGE,
        cp_size=CP_SIZE,
        chunk_size=chunk,
        strategy=strategy,  # type: ignore[arg-type]
    )
    second = runs[0].trace.specs[1].segments
    assert [(segment.request_id, segment.start) for segment in second] == [("target", history), ("other", 0)]


def test_a_small_scratch_changes_the_view_and_no_bit(hot_model: Callable, prompt: Callable) -> None:
    """The planner falls back to `blocked` where a layer's history does not fit, and refuses what nothing fits."""
    _, model = hot_model("glm5", torch.float32, 4, SMALL)
    prompts = {"long": prompt(1200)}

    def run(view: KvView, scratch_bytes: int | None) -> tuple[ThreadedRanks, PrefillTrace]:
        ranks = ThreadedRanks(
            model,
            model.shape.geometry(PAGE, "float32", "float32"),
            cp_size=CP_SIZE,
            shared=True,
            num_pages=pages_of([1200], PAGE, CP_SIZE),
            options=ViewOptions(key_block_tokens=KEY_BLOCK, round_bytes=20_000),
            scratch_bytes=scratch_bytes,
        )
        return ranks, ranks.prefill(prompts, chunk_size=200, view=view)

    unbounded, expected = run("auto", None)
    assert unbounded.counters[0].batches == {"current": 1, "mixed": 5}
    fixed, blocked = run("blocked", None)
    limit = fixed.counters[0].scratch_bytes
    assert limit < unbounded.counters[0].scratch_bytes
    bounded, trace = run("auto", limit)
    assert set(bounded.counters[0].batches) == {"current", "mixed", "blocked"}
    assert bounded.counters[0].scratch_bytes <= bounded.scratches[0].allocated_bytes == limit
    for name, logits in (("fixed", blocked.logits["long"]), ("bounded", trace.logits["long"])):
        assert_same_bits(logits, expected.logits["long"], f"logits with a {name} scratch")
    with pytest.raises(CapacityError, match=r"the scratch has 1000; raise --scratch-bytes to \d+"):
        run("auto", 1000)
    with pytest.raises(CapacityError, match=f"the scratch has {limit - 1}; raise --scratch-bytes to {limit}"):
        run("blocked", limit - 1)
