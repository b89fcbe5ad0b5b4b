"""The float64 reference against transformers, and the random checkpoints that both read."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from cpkv.testing.checkpoints import (
    Family,
    TinyShape,
    parameter_shapes,
    write_block_fp8,
    write_hot_checkpoint,
)
from cpkv.testing.oracle import TransformersOracle, stable_topk
from cpkv.testing.reference import ReferenceModel
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="unit")

FAMILIES: tuple[Family, ...] = ("glm5", "glm52", "deepseek-v32")
# Of the logits' deviation. transformers computes rope angles in float32, whose error grows with the position; of the
# two, DeepSeek's theta of 1e4 leaves more pairs that turn fast.
FP32_TOLERANCE = {"glm5": 5e-5, "glm52": 5e-5, "deepseek-v32": 1e-4}


def prompt(tokens: int, *, vocab: int = 512, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=tokens)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hot_checkpoint(tmp_path_factory.mktemp("checkpoint") / family, family)


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceModel:
    return ReferenceModel(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> TransformersOracle:
    return TransformersOracle(folder)


def rewrite(
    folder: Path, *, config: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Change some settings and weights of a checkpoint in place."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | (config or {})))
    tensors = load_file(folder / "model.safetensors") | (weights or {})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_choice(expected: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    """Equal sets per layer and query, but for one row in 400: float32 may decide a near-tie of scores otherwise."""
    differing = [int((ours != theirs).any(-1).sum()) for ours, theirs in zip(expected, got, strict=True)]
    rows = sum(len(choice) for choice in expected)
    assert sum(differing) <= rows // 400, f"rows of each layer with another choice: {differing}"


def assert_same(reference: ReferenceModel, oracle: TransformersOracle, ids: list[int], tolerance: float) -> None:
    expected = reference.forward(ids, record_indices=True)
    got = oracle.trace(ids, replay=expected.indices)
    assert_same_choice(expected.indices, got.indices)
    assert (expected.logits - got.logits.double()).abs().max() < tolerance * expected.logits.std()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200, 500])
def test_reference_equals_transformers(
    reference: ReferenceModel, oracle: TransformersOracle, family: Family, tokens: int
) -> None:
    assert_same(reference, oracle, prompt(tokens), FP32_TOLERANCE[family])


def test_reference_equals_transformers_without_replay(
    reference: ReferenceModel, oracle: TransformersOracle, family: Family
) -> None:
    expected, got = reference.forward(prompt(200), record_indices=True), oracle.trace(prompt(200))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(expected.indices, got.indices, strict=True))
    assert (expected.logits - got.logits.double()).abs().max() < FP32_TOLERANCE[family] * expected.logits.std()
    assert torch.equal(expected.logits.argmax(-1), got.logits.argmax(-1))


@pytest.mark.parametrize("eps", [1e-5, 1e-1])
def test_latent_norm_eps_reaches_both(folder: Path, reference: ReferenceModel, family: Family, eps: float) -> None:
    other = ReferenceModel(folder, latent_norm_eps=eps)
    assert_same(other, TransformersOracle(folder, latent_norm_eps=eps), prompt(100), FP32_TOLERANCE[family])
    assert not torch.equal(other.forward(prompt(20)).logits, reference.forward(prompt(20)).logits)


def test_shared_layers_between_full_ones(tmp_path: Path) -> None:
    write_hot_checkpoint(tmp_path, "glm52", indexer_types=["full", "shared", "full", "shared"])
    assert_same(ReferenceModel(tmp_path), TransformersOracle(tmp_path), prompt(150), 5e-5)


def test_yarn_attention_factor_other_than_one(tmp_path: Path) -> None:
    write_hot_checkpoint(tmp_path, "deepseek-v32")
    yarn = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
    rewrite(tmp_path, config={"rope_scaling": yarn | {"mscale": 0.6, "mscale_all_dim": 0.9}})
    assert_same(ReferenceModel(tmp_path), TransformersOracle(tmp_path), prompt(150), 1e-4)


def test_rows_of_real_size(tmp_path: Path) -> None:
    write_hot_checkpoint(tmp_path, "glm5", shape=TinyShape.real_rows(), topk=256)
    assert_same(ReferenceModel(tmp_path), TransformersOracle(tmp_path), prompt(400), 5e-5)


def test_generate_equals_forward(reference: ReferenceModel, oracle: TransformersOracle) -> None:
    ids = prompt(90)
    tokens, logits = reference.generate(ids, 6)
    assert logits.shape == (7, 512)
    one_shot = reference.forward(ids + tokens).logits[len(ids) - 1 :]
    assert (logits - one_shot).abs().max() < 1e-12
    assert tokens == one_shot[:-1].argmax(-1).tolist()
    oracle_tokens, oracle_logits = oracle.generate(ids, 6, chunk_size=40)
    assert oracle_tokens == tokens
    assert (oracle_logits.double() - logits).abs().max() < 1e-4


def test_no_new_tokens(reference: ReferenceModel, oracle: TransformersOracle) -> None:
    for tokens, logits in (reference.generate(prompt(3), 0), oracle.generate(prompt(3), 0)):
        assert tokens == []
        assert logits.shape == (1, 512)


@pytest.mark.parametrize("chunk_size", [17, 64, 65])
def test_oracle_does_not_depend_on_chunks(oracle: TransformersOracle, chunk_size: int) -> None:
    one_shot = oracle.trace(prompt(150), 150)
    chunked = oracle.trace(prompt(150), chunk_size, replay=one_shot.indices)
    assert_same_choice(one_shot.indices, chunked.indices)
    assert (one_shot.logits - chunked.logits).abs().max() < 5e-5


def test_replaying_the_own_choice_changes_nothing(reference: ReferenceModel, oracle: TransformersOracle) -> None:
    ids = prompt(150)
    logits, indices = reference.forward(ids, record_indices=True)
    assert torch.equal(reference.forward(ids, replay=indices).logits, logits)
    own = oracle.trace(ids, 64)
    assert torch.equal(oracle.forward(ids, 64, replay=own.indices), own.logits)
    itself = [torch.arange(150, dtype=torch.int32)[:, None] for _ in indices]
    alone = oracle.forward(ids, 64, replay=itself)
    assert (alone - own.logits).abs().max() > 0.1
    assert (alone.double() - reference.forward(ids, replay=itself).logits).abs().max() < 1e-4
    assert torch.equal(oracle.generate(ids, 0, 64)[1][0], own.logits[-1]), "the replay ends with the call"


def test_one_wrong_position_shows(reference: ReferenceModel, oracle: TransformersOracle) -> None:
    ids = prompt(300)
    logits, indices = reference.forward(ids, record_indices=True)
    for layer in range(len(indices)):
        wrong = [choice.clone() for choice in indices]
        left_out = min(set(range(300)) - set(wrong[layer][-1].tolist()))
        wrong[layer][-1, 0] = left_out
        changes = [reference.forward(ids, replay=wrong).logits]
        if reference.indexer_types[layer] == "full" and layer + 1 == reference.indexer_types.count("full"):
            changes.append(oracle.forward(ids, replay=wrong).double())
        for changed in changes:
            assert (changed[-1] - logits[-1]).abs().max() > 0.01, f"layer {layer}"
            assert (changed[:-1] - logits[:-1]).abs().max() < 1e-4, "only the last query was given another choice"


@pytest.mark.parametrize("family", ["glm5", "deepseek-v32"])
def test_ties_go_to_the_lowest_position(tmp_path: Path, family: Family) -> None:
    # With one index head about half of the scores are exactly 0, and few distinct tokens plant equal keys.
    write_hot_checkpoint(tmp_path, family, index_heads=1)
    ids = prompt(300, vocab=6)
    reference, oracle = ReferenceModel(tmp_path), TransformersOracle(tmp_path)
    expected = reference.forward(ids, record_indices=True).indices
    for chunk_size in (300, 64):
        assert_same_choice(expected, oracle.trace(ids, chunk_size, replay=expected).indices)

    class HighestPosition(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.sort and "stable" in (kwargs or {}):
                flipped = args[0].flip(-1).sort(**kwargs)
                return torch.return_types.sort((flipped.values, args[0].shape[-1] - 1 - flipped.indices))
            return func(*args, **(kwargs or {}))

    with HighestPosition():
        other = reference.forward(ids, record_indices=True).indices
    assert (other[0] != expected[0]).any(-1).float().mean() > 0.1, "ties at the boundary are what this test is about"


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_all_scores_equal(tmp_path: Path, sign: float) -> None:
    # Every key is the same unit vector, so all scores of a query are equal bit for bit: positive, negative, or zero.
    write_hot_checkpoint(tmp_path, "glm5", index_heads=1)
    at = "model.layers.0.self_attn.indexer."
    unit = torch.zeros(32)
    unit[-1] = 1.0
    rewrite(
        tmp_path,
        weights={
            at + "wk.weight": torch.zeros(32, 128),
            at + "k_norm.bias": unit,
            at + "weights_proj.weight": sign * load_file(tmp_path / "model.safetensors")[at + "weights_proj.weight"],
        },
    )
    ids = prompt(100)
    choices = (
        ReferenceModel(tmp_path).forward(ids, record_indices=True).indices[0],
        *(TransformersOracle(tmp_path).indices(ids, chunk_size)[0] for chunk_size in (100, 33)),
    )
    for choice in choices:
        for query in range(100):
            assert choice[query][choice[query] >= 0].tolist() == list(range(min(query + 1, 64)))


def test_stable_topk_orders_by_value_then_position() -> None:
    dice = random.Random(0)
    pool = [-math.inf, -1.0, -0.0, 0.0, 1.0, 2.0]
    for _ in range(100):
        row = dice.choices(pool, k=9)
        k = dice.randint(1, 9)
        expected = sorted(range(9), key=lambda position: (-row[position], position))[:k]
        values, positions = stable_topk(torch.tensor([row, row[::-1]]), k)
        assert positions[0].tolist() == sorted(expected)
        assert values[0].tolist() == [row[position] for position in sorted(expected)]
    with pytest.raises(ValueError, match="last dimension"):
        stable_topk(torch.zeros(3, 3), 1, dim=0)


def test_stable_choice_stays_inside_the_oracle(folder: Path) -> None:
    oracle = TransformersOracle(folder)
    original = torch.Tensor.topk

    def fail(*_: object) -> None:
        assert torch.tensor([1.0, 2.0]).topk(2).indices.tolist() == [0, 1], "the stable rule is on in here"
        raise RuntimeError("planted")

    oracle.model.model.layers[0].self_attn.indexer.k_norm.forward = fail
    with pytest.raises(RuntimeError, match="planted"):
        oracle.forward(prompt(5))
    assert torch.Tensor.topk is original
    assert torch.tensor([1.0, 2.0]).topk(2).indices.tolist() == [1, 0]
    # A second oracle is untouched by what was done to the first.
    assert torch.isfinite(TransformersOracle(folder).forward(prompt(5))).all()


def test_block_fp8_folder(tmp_path: Path, folder: Path, reference: ReferenceModel) -> None:
    quantised = write_block_fp8(folder, tmp_path / "fp8")
    tensors = load_file(quantised / "model.safetensors")
    plain: dict[str, torch.Tensor] = {}
    for name, stored in load_file(folder / "model.safetensors").items():
        if stored.ndim == 1 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            assert torch.equal(tensors[name], stored), name
        elif name.endswith("weights_proj.weight"):
            assert torch.equal(tensors[name], stored), name
        else:
            assert tensors[name].dtype == torch.float8_e4m3fn, name
            assert tensors[name].float().abs().max() == 448, name
            scale = tensors[name + "_scale_inv"]
            assert scale.dtype == torch.float32
            assert scale.shape == tuple(math.ceil(size / 128) for size in stored.shape)
            rows, columns = (torch.arange(size) // 128 for size in stored.shape)
            plain[name] = tensors[name].double() * scale[rows][:, columns].double()
            # e4m3 keeps four significant bits, or a fixed step near zero.
            error = (plain[name] - stored).abs()
            assert (error <= stored.abs() / 16 + scale[rows][:, columns] * 2**-9).all(), name
    assert json.loads((quantised / "config.json").read_text())["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    dequantised = tmp_path / "plain"
    dequantised.mkdir()
    (dequantised / "config.json").write_text((folder / "config.json").read_text())
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    save_file(kept | plain, dequantised / "model.safetensors")
    ids = prompt(80)
    logits = ReferenceModel(quantised).forward(ids).logits
    assert torch.equal(logits, ReferenceModel(dequantised).forward(ids).logits)
    assert (logits - reference.forward(ids).logits).abs().max() > 0.01


@pytest.mark.parametrize("family", ["glm52", "deepseek-v32"])
def test_every_parameter_matters(tmp_path: Path, family: Family) -> None:
    write_hot_checkpoint(tmp_path, family, shape=TinyShape(num_hidden_layers=2))
    model, ids = ReferenceModel(tmp_path), prompt(90)
    expected = model.forward(ids).logits
    for name, weight in list(model.weights.items()):
        model.weights[name] = weight.roll(1, 0)
        assert (model.forward(ids).logits - expected).abs().max() > 0.01, f"{name} has no effect"
        model.weights[name] = weight


def test_transformers_finds_every_parameter(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()} == (
        parameter_shapes(config)
    )
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def test_weights_are_the_same_everywhere(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tensors = load_file(write_hot_checkpoint(tmp_path / name, "glm5", seed=seed) / "model.safetensors")
        digest = hashlib.sha256()
        for tensor in sorted(tensors):
            digest.update(tensors[tensor].numpy().tobytes())
        digests.append(digest.hexdigest())
    assert digests[0] == digests[1] != digests[2]
    assert digests[0].startswith("354449b6c8f2d2d1")
    embedding = tensors["model.embed_tokens.weight"]
    assert abs(embedding.std() * math.sqrt(128) - 1) < 0.01
    assert abs(embedding.mean()) < 1e-3
