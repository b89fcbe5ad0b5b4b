"""From prefill to decoded tokens, through the transfer: ranks and decode worker as threads of this process."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from decode_runs import check_against_reference, check_recall, run, settings_of
from safetensors.torch import load_file, save_file

from cpkv.config import EngineSettings
from cpkv.engine.cluster import Cluster
from cpkv.engine.request import Request
from cpkv.errors import CheckpointError
from cpkv.protocol.messages import Sampling
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.checkpoints import TinyShape, write_block_fp8, write_hot_checkpoint
from cpkv.testing.leaks import nothing_left_behind
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="models")

FAMILIES = ("glm5", "glm52", "deepseek-v32")
SMALL = TinyShape(num_hidden_layers=2, index_topk=8)

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_requests_decodes_like_the_reference(family: str, tmp_path: Path) -> None:
    """Requests of different lengths, decoded together until each has its tokens, pages shuffled (kind 12)."""
    checkpoint = write_hot_checkpoint(tmp_path / "checkpoint", family, index_heads=4)  # type: ignore[arg-type]
    rng = random.Random(1)
    requests = [
        Request(f"r{length}", tuple(rng.randrange(512) for _ in range(length)), new)
        for length, new in ((97, 5), (64, 8), (9, 2), (1, 1))
    ]
    settings = settings_of(requests, 8, 3, chunk_size=70, dtype="float64", index_dtype="float64")
    check_against_reference(checkpoint, requests, run(checkpoint, settings, requests))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_length_up_to_three_pages_and_one(family: str, tmp_path: Path) -> None:
    """Kind 13: one page too many or too few, with and without the token just sampled; pools are poisoned first."""
    checkpoint = write_hot_checkpoint(tmp_path / "checkpoint", family, index_heads=4, shape=SMALL)  # type: ignore[arg-type]
    rng = random.Random(2)
    requests = [
        Request(f"r{length}", tuple(rng.randrange(512) for _ in range(length)), 6) for length in range(1, 3 * 4 + 2)
    ]
    settings = settings_of(requests, 4, 2, chunk_size=7, dtype="float64", index_dtype="float64", debug=True)
    check_against_reference(checkpoint, requests, run(checkpoint, settings, requests))


@pytest.mark.parametrize(
    ("family", "dtype", "index_dtype"),
    [
        ("glm5", "float32", "float32"),
        ("glm5", "bfloat16", "bfloat16"),
        ("glm52", "float32", "fp8"),
        ("deepseek-v32", "bfloat16", "fp8"),
    ],
)
def test_the_recall_model_answers_right(family: str, dtype: str, index_dtype: str, tmp_path: Path) -> None:
    """Answers come from pages all over the cache, so a page of another position or owner gives a wrong one."""
    check_recall(tmp_path / "checkpoint", family, dtype, index_dtype, (500, 300))


def dequantised_copy(quantised: Path, folder: Path) -> Path:
    """The folder's weights as plain float32, each e4m3 value times the scale of its 128 x 128 block."""
    stored, plain = load_file(quantised / "model.safetensors"), {}
    for name, weight in stored.items():
        scale = stored.get(f"{name}_scale_inv")
        if scale is not None:
            rows, columns = weight.shape
            plain[name] = weight.float() * scale.kron(torch.ones(128, 128))[:rows, :columns]
        elif not name.endswith("_scale_inv"):
            plain[name] = weight
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_block_fp8_weights_are_served_dequantised(family: str, tmp_path: Path) -> None:
    """A block-fp8 folder equals the reference, which dequantises by itself, and its plain copy bit for bit."""
    quantised = write_block_fp8(
        write_hot_checkpoint(tmp_path / "plain", family, index_heads=4),  # type: ignore[arg-type]
        tmp_path / "fp8",
    )
    rng = random.Random(3)
    requests = [Request("r", tuple(rng.randrange(512) for _ in range(90)), 3)]
    settings = settings_of(requests, 16, 2, chunk_size=50, dtype="float64", index_dtype="float64")
    check_against_reference(quantised, requests, run(quantised, settings, requests))
    settings = settings_of(requests, 16, 2, chunk_size=50)
    ours = run(quantised, settings, requests, compare=False)
    plain = run(dequantised_copy(quantised, tmp_path / "dequantised"), settings, requests, compare=False)
    assert ours.same_bits(plain), "block-fp8 weights are not those of their plain copy"


def test_another_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    """The message names the method."""
    checkpoint = write_hot_checkpoint(tmp_path / "checkpoint", "glm5")
    config = checkpoint / "config.json"
    method = '"quantization_config": {"quant_method": "gptq", "bits": 4}, '
    config.write_text(config.read_text().replace("{", "{" + method, 1))
    requests = [Request("r", (1, 2, 3), 1)]
    with nothing_left_behind(), pytest.raises(CheckpointError, match="quantised by 'gptq'"):
        Cluster(settings_of(requests, 16, 2), checkpoint, decode_pages=4)


def test_sampling_is_repeatable_and_the_same_in_both_modes(tmp_path: Path) -> None:
    """Temperature and top-p: the same seed draws the same tokens, another seed others, a tiny top-p is greedy."""
    checkpoint = write_hot_checkpoint(tmp_path / "checkpoint", "glm5", index_heads=4, shape=SMALL)
    ids = tuple(random.Random(4).randrange(512) for _ in range(40))
    requests = [
        Request("greedy", ids, 8),
        Request("narrow", ids, 8, Sampling(temperature=1.0, top_p=1e-6, seed=1)),
        Request("one", ids, 8, Sampling(temperature=1.5, top_p=0.95, seed=1)),
        Request("two", ids, 8, Sampling(temperature=1.5, top_p=0.95, seed=2)),
        Request("again", ids, 8, Sampling(temperature=1.5, top_p=0.95, seed=1)),
    ]
    result = run(checkpoint, settings_of(requests, 16, 2, chunk_size=60), requests)
    assert result.tokens["narrow"] == result.tokens["greedy"]
    assert result.tokens["one"] == result.tokens["again"]
    assert result.tokens["one"] != result.tokens["two"]
    assert_same_bits(result.logits["narrow"], result.logits["greedy"], "logits of two requests with one prompt")


def nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> set[int]:
    """The smallest set of most probable tokens whose probability reaches `top_p`."""
    best = (logits.double() / temperature).softmax(-1).sort(descending=True)
    return set(best.indices[: int((best.values.cumsum(0) < top_p).sum()) + 1].tolist())


def test_drawn_tokens_lie_in_the_nucleus(tmp_path: Path) -> None:
    """Top-p is respected by the first token, which the prefill draws, and by decoded ones; temperature alone is not."""
    checkpoint = write_hot_checkpoint(tmp_path / "checkpoint", "glm52", index_heads=4, shape=SMALL)
    ids = tuple(random.Random(5).randrange(512) for _ in range(30))
    requests = [Request(f"p{seed}", ids, 6, Sampling(1.3, 0.3, seed)) for seed in range(6)]
    requests += [Request(f"t{seed}", ids, 6, Sampling(1.3, 1.0, seed)) for seed in range(6)]
    result = run(checkpoint, settings_of(requests, 16, 2, chunk_size=100), requests)
    inside = {
        name: [token in nucleus(row, 1.3, 0.3) for token, row in zip(tokens, result.logits[name], strict=True)]
        for name, tokens in result.tokens.items()
    }
    assert all(all(drawn) for name, drawn in inside.items() if name.startswith("p"))
    assert not all(all(drawn) for name, drawn in inside.items() if name.startswith("t"))
    drawn = {tuple(result.tokens[f"p{seed}"]) for seed in range(6)}
    assert len(drawn) > 1, "every seed draws the same"


def test_requests_wait_for_pages(tmp_path: Path) -> None:
    """A pool that holds one prompt at a time serves three, one after the other, and ends with every page free."""
    checkpoint = write_hot_checkpoint(tmp_path / "checkpoint", "glm5", index_heads=4, shape=SMALL)
    rng = random.Random(6)
    requests = [Request(f"r{i}", tuple(rng.randrange(512) for _ in range(30)), 2) for i in range(3)]
    settings = EngineSettings(
        num_pages=12, enable_cp_shared_kv=True, cp_size=2, page_size=4, chunk_size=20, transfer="inprocess",
        dtype="float64", index_dtype="float64",
    )  # fmt: skip
    check_against_reference(checkpoint, requests, run(checkpoint, settings, requests))
