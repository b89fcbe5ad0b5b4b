"""Checkpoints that cannot be served are refused by name, and the ranks of a host share one mapping of the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpkv.errors import CheckpointError
from cpkv.model.checkpoint import map_weights, prepare_weights, quiet_transformers, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.model.rope import float64_frequencies
from cpkv.model.router import route_tokens
from cpkv.testing.checkpoints import Family, write_hot_checkpoint
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=12, suite="models")

FAMILIES: tuple[Family, ...] = ("glm5", "glm52", "deepseek-v32")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sound folder that a test may damage."""
    return write_hot_checkpoint(tmp_path / "checkpoint", "glm5")


def change_config(folder: Path, **values: object) -> None:
    """Overwrite settings of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:40])


def other_architecture(folder: Path) -> None:
    change_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])


def absurd_config(folder: Path) -> None:
    change_config(folder, num_hidden_layers="many")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def garbage_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def missing_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.self_attn.indexer.wk.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def wrong_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.kv_b_proj.weight"] = torch.zeros(8, 8)
    save_file(tensors, path, metadata={"format": "pt"})


def missing_shard(folder: Path) -> None:
    names = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (no_folder, "is no checkpoint: it has no config.json"),
        (no_config, "is no checkpoint: it has no config.json"),
        (cut_config, "config.json is damaged"),
        (other_architecture, "model_type 'llama', which is not supported"),
        (absurd_config, "does not describe a glm_moe_dsa model"),
        (no_weights, "holds no .safetensors file"),
        (cut_weights, "model.safetensors is damaged"),
        (garbage_weights, "model.safetensors is damaged"),
        (missing_tensor, "lacks 1 tensors .* model.layers.2.self_attn.indexer.wk.weight"),
        (wrong_shape, "kv_b_proj"),
        (missing_shard, "model-00002-of-00002.safetensors is missing although"),
    ],
)
def test_a_bad_folder_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], text: str
) -> None:
    """One typed error, and no half-written file that a rank could map."""
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=text):
        prepare_weights(checkpoint, tmp_path / "weights.safetensors", torch.float32)
    assert not (tmp_path / "weights.safetensors").exists()


def test_the_prepared_file_is_mapped_and_not_copied(checkpoint: Path, tmp_path: Path) -> None:
    """The weights lie inside a mapping of the file, so the ranks of a host share its pages."""
    prepared = tmp_path / "weights.safetensors"
    prepare_weights(checkpoint, prepared, torch.float32)
    weights = map_weights(prepared)
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [
        tuple(int(bound, 16) for bound in fields[0].split("-"))
        for fields in maps
        if len(fields) > 5 and fields[5].strip() == os.fspath(prepared)
    ]
    assert ranges, "the prepared file is not mapped"
    for name, tensor in weights.items():
        address = tensor.data_ptr()
        assert any(low <= address < high for low, high in ranges), f"{name} is a copy"
    model = DsaModel(read_config(checkpoint), weights, 1e-6)
    ids = torch.tensor([1, 2, 3])
    assert torch.equal(model.embed(ids), weights["model.embed_tokens.weight"][ids])


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_frequencies_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """Default and yarn, against transformers' float32 module."""
    from transformers import AutoModelForCausalLM

    folder = write_hot_checkpoint(tmp_path / "checkpoint", family)
    config = read_config(folder)
    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    frequencies, factor = float64_frequencies(config.rope_parameters, config.qk_rope_head_dim)
    assert torch.allclose(frequencies.float(), module.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_chooses_like_that_of_transformers(family: Family, tmp_path: Path) -> None:
    """Weights and experts, group-limited in DeepSeek-V3.2."""
    from transformers import AutoModelForCausalLM

    folder = write_hot_checkpoint(tmp_path / "checkpoint", family)
    with quiet_transformers():
        gate = AutoModelForCausalLM.from_pretrained(folder).model.layers[2].mlp.gate
    hidden = torch.randn(200, 128, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        _, weights, experts = gate(hidden)
        our_weights, our_experts = route_tokens(gate, hidden)
    order, our_order = experts.argsort(-1), our_experts.argsort(-1)
    assert torch.equal(experts.gather(-1, order), our_experts.gather(-1, our_order))
    assert torch.allclose(weights.gather(-1, order), our_weights.gather(-1, our_order), rtol=1e-6, atol=1e-7)
