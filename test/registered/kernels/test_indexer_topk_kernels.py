"""The choice straight from fp8 queries and keys: against the reference where sums are exact, and the kernels apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from poison import poisoned_outputs
from topk_cases import MISLEADING, TOKENS, K, sampled_places

from cpkv.errors import NumericsError
from cpkv.ops.reference import indexer_topk as reference
from cpkv.ops.triton import indexer, indexer_topk, topk
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=35, suite="kernels")
register_cuda_ci(est_time=180, suite="kernels", num_gpus=1)

DIM = 128
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ChoiceInputs:
    """What is chosen from, by the names of the kernel's arguments."""

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    key_scales: torch.Tensor
    limits: torch.Tensor

    @property
    def position_rows(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return 3 * torch.randperm(len(self.keys) + 2, generator=generator).to(torch.int32) + 7

    def to(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        parts = (self.queries, self.weights, self.keys, self.key_scales, self.limits)
        return tuple(part.to(device) for part in parts)


def drawn_limits(queries: int, tokens: int) -> torch.Tensor:
    """From 0 to all; the queries of a program see more or less at will."""
    limits = torch.randint(0, tokens + 1, (queries,), generator=torch.Generator().manual_seed(queries + tokens))
    limits[-1] = tokens
    return limits


def exact_inputs(queries: int, heads: int, tokens: int) -> ChoiceInputs:
    """Integers and powers of two: whoever adds them, and in whatever order, has the same bits; many scores tie."""
    generator = torch.Generator().manual_seed(queries * heads + tokens)

    def drawn(values: list[float], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), shape, generator=generator)]

    sparse = [0.0] * 9 + [1.0, -1.0, 2.0]
    return ChoiceInputs(
        drawn(sparse, queries, heads, DIM).to(torch.float8_e4m3fn),
        drawn([1.0, -1.0, 0.5, 0.25], queries, heads),
        drawn(sparse, tokens, DIM).to(torch.float8_e4m3fn),
        drawn([0.5, 1.0, 1.0, 2.0], tokens),
        drawn_limits(queries, tokens),
    )


def normal_inputs(queries: int, heads: int, tokens: int) -> ChoiceInputs:
    generator = torch.Generator().manual_seed(queries * heads + tokens)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return ChoiceInputs(
        (values(queries, heads, DIM) * 4).to(torch.float8_e4m3fn),
        values(queries, heads),
        (values(tokens, DIM) * 40).to(torch.float8_e4m3fn),
        values(tokens).exp(),
        drawn_limits(queries, tokens),
    )


def inputs_with_scores(scores: torch.Tensor, limits: list[int]) -> ChoiceInputs:
    """Every query has these scores: products of 1, weights that add up to 1, and the scores as scales of the keys."""
    queries, keys = torch.zeros(len(limits), 32, DIM), torch.zeros(len(scores), DIM)
    queries[:, :, 3] = keys[:, 3] = 1.0
    return ChoiceInputs(
        queries.to(torch.float8_e4m3fn),
        torch.full((len(limits), 32), 1 / 32),
        keys.to(torch.float8_e4m3fn),
        scores,
        torch.tensor(limits),
    )


def choose(
    inputs: ChoiceInputs, k: int, device: torch.device, *, debug: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    with poisoned_outputs():
        positions, rows = indexer_topk.fp8_indexer_topk(
            *inputs.to(device), k, inputs.position_rows.to(device), debug=debug
        )
    return positions.cpu(), rows.cpu()


def check(inputs: ChoiceInputs, k: int, device: torch.device, *, exact: bool = True) -> None:
    """Equal to the kernels apart bit for bit, and where sums are exact to the reference."""
    found = choose(inputs, k, device)
    rows = inputs.position_rows
    there = inputs.to(device)
    scores = indexer.fp8_indexer_scores(*there)
    apart = topk.topk_rows(scores, there[-1], k, rows.to(device))
    what = f"of limits {inputs.limits.tolist()[:12]}, k {k}"
    for name, ours, theirs in zip(("positions", "view rows"), found, apart, strict=True):
        assert_same_bits(ours, theirs.cpu(), f"{name} {what}")
    if exact:
        wanted = reference.fp8_indexer_topk(*inputs.to(CPU), k, rows)
        for name, ours, theirs in zip(("positions", "view rows"), found, wanted, strict=True):
            assert_same_bits(ours, theirs, f"{name} {what}, the reference's")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with which contexts of a few hundred keys take every path, since the interpreter is slow."""
    sizes = {"CANDIDATES": 512, "MOST_CANDIDATES": 1024, "TILE": 256, "SAMPLE": 256}
    # A program of few queries is split into up to four parts, two are into two.
    for name, size in {**sizes, "PROGRAMS": 4, "LEAST_PART": 256}.items():
        monkeypatch.setattr(indexer_topk, name, size)


@pytest.mark.parametrize(
    ("heads", "queries", "tokens"),
    [(32, 1, 129), (32, 9, 1), (32, 9, 512), (32, 9, 1003), (64, 5, 129), (64, 5, 1003), (8, 3, 512), (8, 3, 1003)],
)
@pytest.mark.usefixtures("small")
def test_the_choice_is_the_reference_s(device: torch.device, heads: int, queries: int, tokens: int) -> None:
    """Any number of queries and keys, any limits side by side in a program, ties at the boundary."""
    check(exact_inputs(queries, heads, tokens), 100, device)


@pytest.mark.parametrize("k", [1, 256, 257, 768, 769, 1100])
@pytest.mark.usefixtures("small")
def test_any_k_on_either_side_of_a_limit(device: torch.device, k: int) -> None:
    """Rows shorter than k end in -1; lists of either size, and more than a list holds."""
    check(replace(exact_inputs(3, 64, 1060), limits=torch.tensor([1060, 600, k % 1060])), k, device)


@pytest.mark.parametrize("edge", ["CANDIDATES", "TILE", "KEYS"])
@pytest.mark.usefixtures("small")
def test_limits_around_the_sizes_of_the_kernels(device: torch.device, edge: str) -> None:
    size = indexer.BLOCK_KEYS if edge == "KEYS" else getattr(indexer_topk, edge)
    limits = torch.tensor([size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 0])
    check(replace(exact_inputs(7, 32, 2 * size + 7), limits=limits), 20, device)


def test_a_choice_at_the_sizes_as_they_are(device: torch.device) -> None:
    """Rows of the list's size, and longer ones, with parts where they are worth a program."""
    tokens = 130_003 if device.type == "cuda" else 4_503
    sizes = [indexer_topk.CANDIDATES, indexer_topk.CANDIDATES + 1, tokens - 1, 0, tokens]
    check(replace(exact_inputs(5, 32, tokens), limits=torch.tensor(sizes)), 2048, device)


@pytest.mark.parametrize("heads", [4, 32, 64])
def test_a_chunk_of_random_queries(device: torch.device, heads: int) -> None:
    """Fused and apart have the same bits, also of scores that no sum makes exact."""
    queries, tokens = (1030, 70_001) if device.type == "cuda" else (2, 4_200)
    inputs = normal_inputs(queries, heads, tokens)
    causal = torch.arange(tokens - queries + 1, tokens + 1)
    check(replace(inputs, limits=causal), 2048, device, exact=False)
    if device.type == "cuda":
        check(inputs, 2048, device, exact=False)


class CaughtLists:
    """Takes the place of the kernel that chooses: the lists that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lists = torch.empty(0)
        self._choose = indexer_topk.choose_from_parts
        monkeypatch.setattr(indexer_topk, "choose_from_parts", self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def choose(*arguments: Any, **options: Any) -> None:
            (self.lists,) = [given for given in arguments if isinstance(given, torch.Tensor) and given.dim() == 4]
            self._choose[grid](*arguments, **options)

        return choose


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
def test_scores_in_lists_have_the_bits_of_scores_apart(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    """Two kernels compute them, and a choice that is merged from blocks must be that of one pass."""
    queries, tokens = (260, indexer_topk.CANDIDATES) if device.type == "cuda" else (3, 150)
    inputs = replace(normal_inputs(queries, heads, tokens), limits=torch.full((queries,), tokens))
    caught = CaughtLists(monkeypatch)
    choose(inputs, 20, device)
    positions, bits = caught.lists[:, 0, :, :tokens].unbind(1)
    assert_same_bits(positions.cpu(), torch.arange(tokens, dtype=torch.int32).expand(queries, -1), "all are listed")
    scores = indexer.fp8_indexer_scores(*inputs.to(device))
    assert_same_bits(bits.cpu().view(torch.float32), scores.cpu(), f"scores of {heads} heads")


@pytest.mark.usefixtures("small")
def test_lists_of_many_parts_keep_to_the_workspace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few heads a program has many queries, so that there are few programs, and parts to fill the device."""
    caught = CaughtLists(monkeypatch)
    for name, value in (("PROGRAMS", 64), ("WORKSPACE_BYTES", 2 * 17 * 8 * 512)):
        monkeypatch.setattr(indexer_topk, name, value)
    check(exact_inputs(17, 8, 900), 100, device)
    assert caught.lists.shape == (17, 2, 2, 512)


@pytest.mark.parametrize(
    ("kind", "programs"),
    [*((kind, 1) for kind in MISLEADING), ("all equal", 4), ("descending", 4), ("best where no sample falls", 4)],
)
@pytest.mark.usefixtures("small")
def test_scores_whose_sample_misleads(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, programs: int
) -> None:
    """Too many exceed the bound, or too few, for one query of a program or for all; whole rows, and parts of them."""
    monkeypatch.setattr(indexer_topk, "PROGRAMS", programs)
    sampled = sampled_places(indexer_topk)
    assert K < len(sampled) < TOKENS // 2
    row = torch.tensor([MISLEADING[kind](at, at in sampled) for at in range(TOKENS)])
    inputs = inputs_with_scores(row, [TOKENS, 700, 511, TOKENS - 9])
    scores = indexer.fp8_indexer_scores(*inputs.to(device))[0].cpu()
    assert_same_bits(scores, row, "the scores are what they should be")
    check(inputs, K, device)


@pytest.mark.usefixtures("small")
def test_queries_in_blocks_that_bound_the_lists(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of a few queries at a time, or scores of them where no list holds the choice."""
    inputs = exact_inputs(11, 32, 900)
    for k, bytes_of_query in ((100, 8 * 512), (800, 4 * 900)):
        monkeypatch.setattr(indexer_topk, "WORKSPACE_BYTES", 4 * bytes_of_query)
        check(inputs, k, device)


@pytest.mark.parametrize("furthest", [1, 100, 600, 700])
@pytest.mark.usefixtures("small")
def test_keys_beyond_every_limit_and_around_the_context_change_nothing(device: torch.device, furthest: int) -> None:
    """Unwritten keys and scales are bytes 0xFF, and NaN as both."""
    inputs = exact_inputs(5, 32, 800)
    inputs = replace(inputs, limits=inputs.limits.clamp(max=furthest))
    alone = choose(inputs, 90, device)
    keys, scales = torch.full((840, DIM), 0xFF, dtype=torch.uint8), torch.full((840,), math.nan)
    keys[20 : 20 + furthest] = inputs.keys[:furthest].view(torch.uint8)
    scales[20 : 20 + furthest] = inputs.key_scales[:furthest]
    buffers = keys.view(torch.float8_e4m3fn).to(device), scales.to(device)
    queries, weights, _, _, limits = inputs.to(device)
    with poisoned_outputs():
        found = indexer_topk.fp8_indexer_topk(
            queries,
            weights,
            buffers[0][20:820],
            buffers[1][20:820],
            limits,
            90,
            inputs.position_rows.to(device),
            debug=True,
        )
    for ours, theirs in zip(found, alone, strict=True):
        assert_same_bits(ours.cpu(), theirs, f"NaN keys from {furthest} on")


@pytest.mark.parametrize(("limit", "at"), [(3, 0), (3, 2), (300, 140), (700, 0), (700, 699)])
@pytest.mark.usefixtures("small")
def test_a_nan_that_a_query_sees_is_an_error_when_looked_for(device: torch.device, limit: int, at: int) -> None:
    """Without being looked for it counts as the best. Beyond the limit it is nobody's."""
    inputs = replace(exact_inputs(3, 32, 720), limits=torch.tensor([0, limit, at]))
    inputs.key_scales[at] = math.nan
    with pytest.raises(NumericsError, match="an indexer score is NaN, so no choice of keys is right"):
        choose(inputs, 5, device, debug=True)
    assert at in choose(inputs, 5, device)[0][1].tolist()
    choose(replace(inputs, limits=torch.tensor([0, at, 0])), 5, device, debug=True)


def test_no_queries_and_no_keys_make_empty_choices(device: torch.device) -> None:
    """Kind 21: a rank without a token."""
    for queries, tokens in ((0, 9), (3, 0), (0, 0)):
        inputs = ChoiceInputs(
            torch.zeros(queries, 32, DIM).to(torch.float8_e4m3fn),
            torch.zeros(queries, 32),
            torch.zeros(tokens, DIM).to(torch.float8_e4m3fn),
            torch.zeros(tokens),
            torch.zeros(queries, dtype=torch.int64),
        )
        for chosen in (
            *choose(inputs, 4, device, debug=True),
            *reference.fp8_indexer_topk(*inputs.to(CPU), 4, inputs.position_rows),
        ):
            assert (chosen.shape, chosen.dtype) == ((queries, min(4, tokens)), torch.int32)


def test_the_reference_takes_queries_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores of all queries are never there at once."""
    inputs = exact_inputs(7, 32, 300)
    whole = reference.fp8_indexer_topk(*inputs.to(CPU), 30, inputs.position_rows)
    monkeypatch.setattr(reference, "SCORE_BYTES", 2 * 4 * 300)
    for ours, theirs in zip(reference.fp8_indexer_topk(*inputs.to(CPU), 30, inputs.position_rows), whole, strict=True):
        assert_same_bits(ours, theirs, "chosen by blocks of two")
