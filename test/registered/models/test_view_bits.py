"""Every view over the same plans equals replicated bit for bit: long prompts, full batches, histories of every length.

The replicated run of a plan is made once and every view is held against it. Pools and scratch start poisoned.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from pool_comparison import BLOCKED, FULL, MIXED, UNIFIED, ViewKind, check_views
from reference_checks import pages_of
from view_cases import (
    BOUNDARIES,
    CP_SIZE,
    KEY_BLOCK,
    PAGE,
    SMALL,
    SPLITS,
    LongPrompts,
    check_history,
    daily_long_prompts,
)

from cpkv.config.names import KvView, SplitStrategy
from cpkv.errors import CapacityError
from cpkv.layout.view_costs import ViewOptions
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.ranks import PrefillTrace, ThreadedRanks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=26, suite="models")

# `auto` is one of these in a batch with history.
WITH_HISTORY = (MIXED, FULL._replace(prefetch=False), UNIFIED, BLOCKED)


@pytest.mark.parametrize("case", daily_long_prompts(), ids=str)
def test_every_view_of_long_prompts(hot_model: Callable, prompt: Callable, case: LongPrompts) -> None:
    """Several blocks of keys and several rounds of rows, behind which others with little or no history come."""
    case.check(hot_model, prompt)


@pytest.mark.parametrize("requests", range(1, 9))
def test_every_view_of_batches_of_one_to_eight(hot_model: Callable, prompt: Callable, requests: int) -> None:
    """Whole requests and a part of one in each batch; some with history, some without, on up to eight ranks."""
    _, model = hot_model("glm52", torch.float32, 4, SMALL, indexer_types=("full", "shared"))
    lengths = [(40, 3, 17, 64, 2, 33, 16, 15)[number] for number in range(requests)]
    prompts = {f"r{number}": prompt(length, number) for number, length in enumerate(lengths)}
    runs, _ = check_views(
        model,
        prompts,
        (ViewKind(), *WITH_HISTORY),
        dtype="float32",
        index_dtype="fp8",
        page_size=PAGE,
        cp_size=max(2, requests),
        # One token of the last request is left for the second batch.
        chunk_size=max(1, sum(lengths) - 1),
        strategy="interleave" if requests % 2 else "zigzag",
    )
    assert max(len(spec.segments) for spec in runs[0].trace.specs) == requests - (lengths[-1] == 1)


# The split changes from one to the next; the nights have both with each.
@pytest.mark.parametrize(("history", "strategy"), list(zip(BOUNDARIES, cycle(SPLITS))))
def test_every_view_of_a_history_at_a_boundary(
    hot_model: Callable, prompt: Callable, history: int, strategy: SplitStrategy
) -> None:
    """The second batch holds `history` tokens of one request behind it, and all of another one."""
    check_history(hot_model, prompt, history, strategy, WITH_HISTORY)


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
