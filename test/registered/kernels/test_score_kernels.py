"""The indexer's fp8 scores, by the kernel and by the reference, against float64 of the decoded values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from poison import poisoned_outputs

from cpkv.ops.reference import indexer as reference
from cpkv.ops.triton import indexer
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=8, suite="kernels")
register_cuda_ci(est_time=30, suite="kernels", num_gpus=1)

DIM = 128
NEG_INF = float("-inf")
# Of the sum of magnitudes. The fp8 tensor cores of Hopper add products with about 13 bits behind the largest.
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-3}


@dataclass(frozen=True)
class ScoreInputs:
    """What is scored, by the names of the kernel's arguments."""

    queries: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    key_scales: torch.Tensor
    limits: torch.Tensor

    def to(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        parts = (self.queries, self.weights, self.keys, self.key_scales, self.limits)
        return tuple(part.to(device) for part in parts)


def make_inputs(queries: int, heads: int, tokens: int) -> ScoreInputs:
    generator = torch.Generator().manual_seed(queries * heads + tokens)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    limits = torch.randint(0, tokens + 1, (queries,), generator=generator)
    limits[0] = tokens
    return ScoreInputs(
        (values(queries, heads, DIM) * 4).to(torch.float8_e4m3fn),
        values(queries, heads),
        (values(tokens, DIM) * 40).to(torch.float8_e4m3fn),
        values(tokens).exp(),
        limits,
    )


def in_float64(inputs: ScoreInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and the sums of the magnitudes of all products that went into them."""
    queries, keys = inputs.queries.double(), inputs.keys.double()
    heads = torch.einsum("qhd,td->qht", queries, keys).relu()
    scores = torch.einsum("qh,qht->qt", inputs.weights.double(), heads) * inputs.key_scales
    magnitudes = torch.einsum("qhd,td->qht", queries.abs(), keys.abs())
    sizes = torch.einsum("qh,qht->qt", inputs.weights.double().abs(), magnitudes) * inputs.key_scales
    hidden = torch.arange(len(keys)) >= inputs.limits.unsqueeze(1)
    return scores.masked_fill(hidden, NEG_INF), sizes


def scores_of(inputs: ScoreInputs, device: torch.device) -> torch.Tensor:
    with poisoned_outputs():
        return indexer.fp8_indexer_scores(*inputs.to(device)).cpu()


def check_scores(scores: torch.Tensor, inputs: ScoreInputs, tolerance: float) -> None:
    wanted, sizes = in_float64(inputs)
    assert scores.shape == wanted.shape and scores.dtype == torch.float32
    hidden = wanted == NEG_INF
    assert torch.equal(scores == NEG_INF, hidden), "what a query may not see is -inf, and nothing else"
    off = ((scores.double() - wanted).abs() / sizes)[~hidden]
    assert bool((off <= tolerance).all()), f"off by {off.max()} of the sum of magnitudes"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs along the keys of a short context."""
    monkeypatch.setattr(indexer, "KEYS_PER_PROGRAM", 2 * indexer.BLOCK_KEYS)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("queries", [1, 5, 8, 9])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 257, 700])
@pytest.mark.usefixtures("small")
def test_scores_are_those_of_float64(device: torch.device, heads: int, queries: int, tokens: int) -> None:
    """Any number of queries and of keys, any limit, weights of either sign."""
    inputs = make_inputs(queries, heads, tokens)
    assert queries == 1 or bool((inputs.weights < 0).any() and (inputs.weights > 0).any())
    check_scores(reference.fp8_indexer_scores(*inputs.to(torch.device("cpu"))), inputs, 1e-5)
    check_scores(scores_of(inputs, device), inputs, TOLERANCE[device.type])


def test_scores_over_more_than_one_program_as_it_is(device: torch.device) -> None:
    inputs = make_inputs(2, 32, indexer.KEYS_PER_PROGRAM + 131)
    check_scores(scores_of(inputs, device), inputs, TOLERANCE[device.type])


@pytest.mark.parametrize("limits", [[0, 0, 0], [0, 1, 0], [128, 127, 129], [256, 0, 257], [600, 600, 600]])
@pytest.mark.usefixtures("small")
def test_limits_at_every_edge_of_a_tile(device: torch.device, limits: list[int]) -> None:
    """Also where no query sees anything, or nothing of a program's keys."""
    inputs = replace(make_inputs(3, 64, 600), limits=torch.tensor(limits))
    check_scores(reference.fp8_indexer_scores(*inputs.to(torch.device("cpu"))), inputs, 1e-5)
    check_scores(scores_of(inputs, device), inputs, TOLERANCE[device.type])


@pytest.mark.parametrize("furthest", [1, 100, 128, 300])
@pytest.mark.usefixtures("small")
def test_keys_beyond_every_limit_and_around_the_context_change_no_bit(device: torch.device, furthest: int) -> None:
    """Unwritten keys and scales are bytes 0xFF, and NaN as both."""
    inputs = make_inputs(5, 32, 400)
    inputs = replace(inputs, limits=inputs.limits.clamp(max=furthest))
    alone = scores_of(inputs, device)
    keys, scales = torch.full((440, DIM), 0xFF, dtype=torch.uint8), torch.full((440,), float("nan"))
    keys[20 : 20 + furthest] = inputs.keys[:furthest].view(torch.uint8)
    scales[20 : 20 + furthest] = inputs.key_scales[:furthest]
    buffers = keys.view(torch.float8_e4m3fn).to(device), scales.to(device)
    queries, weights, _, _, limits = inputs.to(device)
    with poisoned_outputs():
        scores = indexer.fp8_indexer_scores(queries, weights, buffers[0][20:420], buffers[1][20:420], limits)
    assert_same_bits(scores.cpu(), alone, f"NaN keys from {furthest} on")
    rest = replace(inputs, keys=keys.view(torch.float8_e4m3fn)[20:420], key_scales=scales[20:420])
    clean = reference.fp8_indexer_scores(*inputs.to(torch.device("cpu")))
    assert_same_bits(reference.fp8_indexer_scores(*rest.to(torch.device("cpu"))), clean, "the reference's")


@pytest.mark.parametrize("at", [0, 11, 130])
def test_a_nan_key_that_a_query_sees_reaches_its_score_and_no_other(device: torch.device, at: int) -> None:
    """Kind 8: the ReLU does not hide the poison of a key that should not be read."""
    inputs = replace(make_inputs(3, 32, 140), limits=torch.tensor([140, at + 1, at]))
    good = inputs.keys[at].clone()
    inputs.keys.view(torch.uint8)[at] = 0xFF
    found = [reference.fp8_indexer_scores(*inputs.to(torch.device("cpu")))]
    if device.type == "cuda":
        # To the interpreter these bytes are -480.
        found.append(scores_of(inputs, device))
    inputs.keys[at] = good
    inputs.key_scales[at] = float("nan")
    found.append(scores_of(inputs, device))
    inputs.key_scales[at] = 1.0
    inputs.weights[:, 5] = float("nan")
    assert torch.equal(scores_of(inputs, device).isnan(), torch.arange(140) < inputs.limits.unsqueeze(1))
    for scores in found:
        assert scores.isnan().nonzero().tolist() == [[0, at], [1, at]]


def test_no_queries_and_no_keys_make_no_scores(device: torch.device) -> None:
    """Kind 21: a rank without a token."""
    for queries, tokens in ((0, 9), (3, 0), (0, 0)):
        inputs = ScoreInputs(
            torch.zeros(queries, 32, DIM).to(torch.float8_e4m3fn),
            torch.zeros(queries, 32),
            torch.zeros(tokens, DIM).to(torch.float8_e4m3fn),
            torch.zeros(tokens),
            torch.zeros(queries, dtype=torch.int64),
        )
        for scores in (scores_of(inputs, device), reference.fp8_indexer_scores(*inputs.to(torch.device("cpu")))):
            assert scores.shape == (queries, tokens)
