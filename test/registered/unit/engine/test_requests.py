"""Requests are checked, tokens drawn repeatably, traces put together again, and runs compared bit for bit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from cpkv.config.settings import EngineSettings
from cpkv.engine.generation import GenerationResult
from cpkv.engine.prefill import PrefillReport
from cpkv.engine.request import Request, check_request
from cpkv.engine.sampling import check_sampling, sample_token
from cpkv.engine.tensors import bytes_tensor, tensor_bytes
from cpkv.engine.trace_files import read_trace
from cpkv.errors import ConfigError, PlanError, PromptError
from cpkv.model.shape import ModelShape
from cpkv.protocol.messages import Sampling
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

SETTINGS = EngineSettings(num_pages=12, enable_cp_shared_kv=True, cp_size=3, page_size=4)
SHAPE = ModelShape(
    model_type="glm_moe_dsa",
    vocab_size=50,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    q_lora_rank=4,
    kv_lora_rank=4,
    nope_dim=2,
    rope_dim=2,
    value_dim=2,
    index_heads=1,
    index_dim=4,
    topk=4,
    indexer_rope="interleaved",
    has_indexer=(True, False),
    softmax_scale=0.5,
    norm_eps=1e-5,
    latent_norm_eps=1e-6,
    max_positions=40,
)


# Nine of the twelve pages can be allocated: 36 tokens.
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 35, 36])
def test_requests_that_fit_are_taken(tokens: int) -> None:
    check_request(Request("r", (49,) * tokens, 4), SHAPE, SETTINGS)
    check_request(Request("r", (0,), 39), SHAPE, SETTINGS)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("r", (), 1), "request r has an empty prompt"),
        (Request("r", (1,), 0), "asks for 0 new tokens"),
        (Request("r", (1,), -3), "asks for -3 new tokens"),
        (Request("r", (1, 50), 1), "holds token id 50, and the model knows 0 to 49"),
        (Request("r", (-1, 2), 1), "holds token id -1, and the model knows 0 to 49"),
        (Request("r", (1,) * 30, 11), r"30 \+ 11 tokens, and the model knows 40 positions; shorten the prompt to 29"),
        (Request("r", (1,) * 37, 1), "37 tokens and needs 10 pages, and the prefill pool holds 9.*--num-pages to 15"),
    ],
)
def test_requests_that_do_not_fit_are_refused(request_: Request, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        check_request(request_, SHAPE, SETTINGS)


# Sampling.


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    logits = torch.tensor([0.5, 2.0, -math.inf, 2.0])
    assert {sample_token(logits, Sampling(seed=seed, top_p=0.1), step) for seed in range(3) for step in range(3)} == {1}


@given(seed=st.integers(0, 2**31 - 1), step=st.integers(0, 4095))
@hypothesis_settings(max_examples=25)
def test_draws_are_repeatable(seed: int, step: int) -> None:
    logits = torch.linspace(-1, 1, 300)
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=seed)
    state = torch.random.get_rng_state()
    drawn = {sample_token(logits, sampling, step) for _ in range(3)}
    assert len(drawn) == 1
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"


def test_seeds_and_steps_draw_differently() -> None:
    logits = torch.zeros(1000)
    for draws in (
        [sample_token(logits, Sampling(temperature=1.0, seed=seed), 0) for seed in range(40)],
        [sample_token(logits, Sampling(temperature=1.0, seed=3), step) for step in range(40)],
    ):
        assert len(set(draws)) > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_distribution(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0], dtype=dtype)
    drawn = [sample_token(logits, Sampling(temperature=2.0, seed=11), step) for step in range(3000)]
    for token, probability in enumerate((logits / 2).softmax(-1).tolist()):
        # Five deviations of a binomial distribution.
        margin = 5 * math.sqrt(probability * (1 - probability) / len(drawn))
        assert drawn.count(token) / len(drawn) == pytest.approx(probability, abs=margin)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for top_p, kept in ((0.05, {0}), (0.39, {0}), (0.6, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        drawn = {sample_token(logits, Sampling(temperature=1.0, top_p=top_p, seed=1), step) for step in range(200)}
        assert drawn == kept, f"top_p {top_p}"


def test_a_small_temperature_is_nearly_greedy() -> None:
    logits = torch.tensor([1.0, 1.1, 0.9])
    assert {sample_token(logits, Sampling(temperature=1e-3, seed=2), step) for step in range(50)} == {1}


def test_sampling_that_cannot_be_drawn_from_is_refused() -> None:
    for temperature in (-0.1, math.nan):
        with pytest.raises(ConfigError, match="temperature is .*; it must be 0"):
            check_sampling(Sampling(temperature=temperature))
    for top_p in (0.0, 1.1, -1.0, math.nan):
        with pytest.raises(ConfigError, match="top_p is .*; it must be above 0"):
            check_sampling(Sampling(top_p=top_p))
    check_sampling(Sampling(temperature=5.0, top_p=1.0))


def test_large_seeds_are_refused_or_work() -> None:
    sampling = Sampling(temperature=1.0, seed=2**50)
    try:
        check_sampling(sampling)
    except ConfigError:
        return
    sample_token(torch.zeros(4), sampling, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_tensors_survive_as_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 255, (3, 16), dtype=torch.uint8).view(dtype)
    assert_same_bits(bytes_tensor(tensor_bytes(tensor.t()), dtype), tensor.t().reshape(-1), str(dtype))


# Traces.


def write_batch(folder: Path, batch: int, rank: int, requests: list[str], rows: list[tuple[int, int]]) -> None:
    """A trace of (segment, position) rows, each with logits and choices that tell where they belong."""
    segments, positions = (torch.tensor([row[part] for row in rows], dtype=torch.int64) for part in (0, 1))
    names = [requests[segment] for segment, _ in rows]
    marks = torch.tensor([mark(name, position) for name, (_, position) in zip(names, rows, strict=True)])
    save_file(
        {
            "segments": segments,
            "positions": positions,
            "logits": marks.view(-1, 1) + torch.zeros(1, 3),
            "choices.0": marks.view(-1, 1).to(torch.int32),
            "choices.2": -marks.view(-1, 1).to(torch.int32),
        },
        folder / f"batch{batch}-rank{rank}.safetensors",
        metadata={"requests": msgspec.json.encode(requests).decode()},
    )


def mark(name: str, position: int) -> float:
    return 1000.0 * (ord(name) - ord("a") + 1) + position


def test_a_trace_is_put_together_by_request_and_position(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, 0, ["a"], [(0, 0), (0, 3)])
    write_batch(tmp_path, 0, 1, ["a"], [(0, 1), (0, 2)])
    write_batch(tmp_path, 1, 0, ["a", "b"], [(0, 4), (1, 1)])
    write_batch(tmp_path, 1, 1, ["a", "b"], [(1, 0)])
    # Eleven steps, so that numbers and names sort differently; b has ended after two.
    for step in range(11):
        requests = ["b", "a"] if step < 2 else ["a"]
        tensor = torch.tensor([[mark(name, 100 + step)] for name in requests], dtype=torch.int32)
        save_file(
            {"choices.0": tensor, "choices.2": -tensor},
            tmp_path / f"decode{step}.safetensors",
            metadata={"requests": msgspec.json.encode(requests).decode()},
        )
    for name, tokens, steps in (("a", 5, 11), ("b", 2, 2)):
        trace = read_trace(tmp_path, name, tokens)
        assert trace.logits is not None
        assert trace.logits[:, 0].tolist() == [mark(name, position) for position in range(tokens)]
        expected = [mark(name, position) for position in [*range(tokens), *range(100, 100 + steps)]]
        assert list(trace.choices) == [0, 2]
        assert trace.choices[0].flatten().tolist() == expected
        assert trace.choices[2].flatten().tolist() == [-value for value in expected]


def test_a_position_that_two_ranks_computed_is_refused(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, 0, ["a"], [(0, 0), (0, 1)])
    write_batch(tmp_path, 0, 1, ["a"], [(0, 1)])
    with pytest.raises(PlanError, match="request a: position 1 was computed twice"):
        read_trace(tmp_path, "a", 2)


def test_a_position_that_nobody_computed_is_refused(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, 0, ["a"], [(0, 0), (0, 2)])
    with pytest.raises(PlanError, match="request a: .* of 1 positions is missing"):
        read_trace(tmp_path, "a", 3)


# Comparison of two runs.


def result_of(logits: torch.Tensor) -> GenerationResult:
    return GenerationResult({"a": [1, 2]}, {"a": logits}, {"a": ("0f", "1e")}, PrefillReport(), [], 100)


def test_every_part_of_a_run_is_compared() -> None:
    logits = torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    run = result_of(logits)
    assert run.same_bits(result_of(logits.clone()))
    for other in (
        dataclasses.replace(run, tokens={"a": [1, 3]}),
        dataclasses.replace(run, row_digests={"a": "1f"}),
        dataclasses.replace(run, logits={"b": logits}),
        dataclasses.replace(run, logits={"a": logits + torch.tensor([0.0, 2**-22])}),
    ):
        assert not run.same_bits(other)


def test_minus_zero_is_another_bit() -> None:
    assert not result_of(torch.tensor([0.0])).same_bits(result_of(torch.tensor([-0.0])))
