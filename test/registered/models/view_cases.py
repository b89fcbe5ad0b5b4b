"""Plans that every view must run as a replicated pool does: one of each for every day, all of them for the night."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from allpairspy import AllPairs
from pool_comparison import BLOCKED, FORMATS, FULL, MIXED, UNIFIED, VIEW_KINDS, PoolRun, ViewKind, check_views

from cpkv.config.names import IndexDtype, LatentDtype, SplitStrategy
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.testing.checkpoints import Family, TinyShape

FAMILIES: tuple[Family, ...] = ("glm5", "glm52", "deepseek-v32")
SPLITS: tuple[SplitStrategy, ...] = ("zigzag", "interleave")
SMALL = TinyShape(num_hidden_layers=2, index_topk=16)
PAGE, CP_SIZE, KEY_BLOCK = 16, 4, 512
BOUNDARIES = (
    1, PAGE - 1, PAGE, PAGE + 1, CP_SIZE * PAGE - 1, CP_SIZE * PAGE, CP_SIZE * PAGE + 1,
    KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK - 1, 2 * KEY_BLOCK, 2 * KEY_BLOCK + 1,
)  # fmt: skip


class ThreeRequests(NamedTuple):
    """A long, a short and a one-token prompt, 188 tokens in all.

    Attributes:
        formats: of the model, its latent rows and its index keys.
    """

    formats: tuple[str, LatentDtype, IndexDtype]
    cp_size: int
    page_size: int
    family: Family
    chunk_size: int
    strategy: SplitStrategy

    def __str__(self) -> str:
        """For test ids."""
        return "-".join(map(str, (*self.formats, *self[1:])))

    def check(self, hot_model: Callable, prompt: Callable, kinds: Sequence[ViewKind]) -> None:
        """Hold each view against replicated."""
        model_dtype, dtype, index_dtype = self.formats
        # A layer's index slot is not its number on GLM-5.2. The third layer gets the buffers of the first one again.
        types = ("full", "shared", "full", "shared") if self.family == "glm52" else None
        shape = None if types else TinyShape(num_hidden_layers=3)
        _, model = hot_model(self.family, torch_dtype(model_dtype), shape=shape, indexer_types=types)
        check_views(
            model,
            {"long": prompt(150, 1), "one": prompt(1, 2), "short": prompt(37, 3)},
            kinds,
            dtype=dtype,
            index_dtype=index_dtype,
            page_size=self.page_size,
            cp_size=self.cp_size,
            chunk_size=self.chunk_size,
            strategy=self.strategy,
        )


def daily_three_requests() -> list[ThreeRequests]:
    """Each format and each number of ranks once, each page size, family and split with several; one without history."""
    page_sizes = (1, 3, 16, 64, 16, 64, 1, 3)
    found = [
        ThreeRequests(
            formats,
            number + 1,
            page_sizes[number],
            FAMILIES[number % 3],
            # Four batches, or two where there are many ranks.
            53 if number < 4 else 97,
            # Not in step with what changes from each number of ranks to the next.
            SPLITS[number // 2 % 2],
        )
        for number, formats in enumerate(FORMATS)
    ]
    return [*found, ThreeRequests(FORMATS[-1], 3, 3, "glm52", 301, "zigzag")]


def daily_kinds(case: ThreeRequests) -> tuple[ViewKind, ...]:
    """Every view; with and without prefetch, and one of the kinds of `auto` after another, in turn."""
    ahead, auto = case.cp_size % 2 == 0, [kind for kind in VIEW_KINDS if kind.view == "auto"]
    views = (MIXED._replace(prefetch=ahead), FULL._replace(prefetch=not ahead), UNIFIED, BLOCKED)
    return (auto[case.cp_size % len(auto)], *views)


def pairs_of_three_requests() -> list[tuple[ViewKind, ThreeRequests]]:
    """Every pair of view, format, ranks, page size, family, chunk size and split occurs; about 75."""
    values: tuple[Sequence[object], ...] = (
        VIEW_KINDS, FORMATS, range(1, 9), (1, 3, 16, 64), FAMILIES, (33, 77, 301), SPLITS,
    )  # fmt: skip
    return [(kind, ThreeRequests(*rest)) for kind, *rest in AllPairs(values)]


class LongPrompts(NamedTuple):
    """Several blocks of keys and several rounds of rows, behind which others with little or no history come.

    Attributes:
        formats: of the model, its latent rows and its index keys.
        layout: ranks and tokens of a page.
        lengths: tokens of the first prompt and of a chunk.
    """

    formats: tuple[str, LatentDtype, IndexDtype]
    layout: tuple[int, int]
    family: Family
    strategy: SplitStrategy
    lengths: tuple[int, int]

    def __str__(self) -> str:
        """For test ids."""
        return "-".join(map(str, (*self.formats, *self.layout, self.family, self.strategy, *self.lengths)))

    def check(self, hot_model: Callable, prompt: Callable) -> None:
        """Hold every view against replicated."""
        types = ("full", "shared") if self.family == "glm52" else None
        _, model = hot_model(self.family, torch_dtype(self.formats[0]), 4, SMALL, indexer_types=types)
        (cp_size, page_size), (tokens, chunk_size) = self.layout, self.lengths
        runs, _ = check_views(
            model,
            {"long": prompt(tokens, 1), "one": prompt(1, 2), "short": prompt(90, 3)},
            dtype=self.formats[1],
            index_dtype=self.formats[2],
            page_size=page_size,
            cp_size=cp_size,
            chunk_size=chunk_size,
            strategy=self.strategy,
        )
        check_what_ran(runs)


LONG_FORMATS = tuple(
    formats for formats in FORMATS if formats[2] == "fp8" and formats[:2] != ("float32", "float32")
) + (FORMATS[0],)
LONG_LAYOUTS = ((2, 16), (3, 5), (8, 16), (4, 64))
LONG_LENGTHS = ((700, 333), (1290, 600))


def daily_long_prompts() -> list[LongPrompts]:
    """Each format, layout, family, split and length."""
    families: tuple[Family, ...] = ("glm5", "glm52", "deepseek-v32", "glm52")
    lengths = (LONG_LENGTHS[0], LONG_LENGTHS[1], LONG_LENGTHS[0], LONG_LENGTHS[0])
    return [
        LongPrompts(formats, layout, family, SPLITS[number % 2], length)
        for number, (formats, layout, family, length) in enumerate(
            zip(LONG_FORMATS, LONG_LAYOUTS, families, lengths, strict=True)
        )
    ]


def pairs_of_long_prompts() -> list[LongPrompts]:
    """Every pair of format, layout, family, split and length occurs."""
    values: tuple[Sequence[object], ...] = (LONG_FORMATS, LONG_LAYOUTS, FAMILIES, SPLITS, LONG_LENGTHS)
    return [LongPrompts(*row) for row in AllPairs(values)]


def check_what_ran(runs: Sequence[PoolRun]) -> None:
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


def check_history(
    hot_model: Callable,
    prompt: Callable,
    history: int,
    strategy: SplitStrategy,
    kinds: Sequence[ViewKind] = VIEW_KINDS,
) -> None:
    """The second batch holds `history` tokens of one request behind it, and all of another one."""
    _, model = hot_model("glm5", torch_dtype("float32"), 4, SMALL)
    chunk = max(120, history)
    filler = {"filler": prompt(chunk - history, 1)} if chunk > history else {}
    runs, _ = check_views(
        model,
        filler | {"target": prompt(history + 37, 2), "other": prompt(50, 3)},
        kinds,
        dtype="fp8",
        index_dtype="fp8",
        page_size=PAGE,
        cp_size=CP_SIZE,
        chunk_size=chunk,
        strategy=strategy,
    )
    second = runs[0].trace.specs[1].segments
    assert [(segment.request_id, segment.start) for segment in second] == [("target", history), ("other", 0)]
