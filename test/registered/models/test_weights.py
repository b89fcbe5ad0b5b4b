"""Checkpoints that cannot be served are refused by name, and the ranks of a host share one mapping of the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpkv.errors import CheckpointError
from cpkv.model.checkpoint import map_weights, prepare_weights, quiet_transformers, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.model.rope import float64_frequencies
from cpkv.model.router import feed_forward, route_tokens
from cpkv.testing.checkpoints import Family, write_block_fp8, write_hot_checkpoint
from cpkv.testing.ranks import ThreadedRanks
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=9, suite="models")

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


def cut_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm')


def list_for_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[1, 2]")


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:30])


def first_layer_without_indexer(folder: Path) -> None:
    change_config(folder, indexer_types=["shared", "full", "full", "full"])


def fp8_without_scale(folder: Path) -> None:
    write_block_fp8(folder, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, path, metadata={"format": "pt"})


def fp8_without_blocks(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})


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
        (cut_index, "model.safetensors.index.json is damaged"),
        (list_for_an_index, "model.safetensors.index.json is damaged"),
        (cut_header, "model.safetensors is damaged"),
        (fp8_without_scale, "model.layers.0.self_attn.o_proj.weight in fp8, and no file .*_scale_inv"),
        (fp8_without_blocks, "quantised by 'fp8' .weight_block_size None"),
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


class Mapping(NamedTuple):
    """One mapping of a file into this process; `copied` counts the bytes that a write has made the process's own."""

    low: int
    high: int
    permissions: str
    copied: int


def mappings_of(file: Path) -> list[Mapping]:
    """The mappings of a file, from /proc/self/smaps."""
    found, ours = list[Mapping](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):
            ours = len(fields) > 5 and fields[5] == os.fspath(file)
            if ours:
                low, high = (int(bound, 16) for bound in fields[0].split("-"))
                found.append(Mapping(low, high, fields[1], -1))
        elif ours and fields[0] == "Anonymous:":
            found[-1] = found[-1]._replace(copied=1024 * int(fields[1]))
    return found


def test_the_prepared_file_is_mapped_and_not_copied(checkpoint: Path, tmp_path: Path) -> None:
    """The weights lie inside a private mapping of the file that a prefill never writes to: ranks share its pages."""
    prepared = tmp_path / "weights.safetensors"
    prepare_weights(checkpoint, prepared, torch.float32)
    before = prepared.read_bytes()
    weights = map_weights(prepared)
    mappings = mappings_of(prepared)
    assert mappings, "the prepared file is not mapped"
    for name, tensor in weights.items():
        address = tensor.data_ptr()
        assert any(part.low <= address < part.high for part in mappings), f"{name} is a copy"
    model = DsaModel(read_config(checkpoint), weights, 1e-6)
    geometry = model.shape.geometry(16, "float32", "float32")
    ranks = ThreadedRanks(model, geometry, cp_size=2, shared=True, num_pages=16)
    ranks.prefill({"r": list(range(100))}, chunk_size=60)
    for part in mappings_of(prepared):
        assert part.permissions.endswith("p"), "a shared mapping: a write would reach the file"
        assert part.copied == 0, f"{part.copied} bytes were written to, and so are no longer shared"
    assert prepared.read_bytes() == before


def test_every_model_of_a_file_maps_it_anew(checkpoint: Path, tmp_path: Path) -> None:
    """Two ranks on one host: two mappings of one file, no weight in memory of their own."""
    prepared = tmp_path / "weights.safetensors"
    prepare_weights(checkpoint, prepared, torch.float32)
    models = [DsaModel.load(read_config(checkpoint), prepared, 1e-6) for _ in range(2)]
    mappings = mappings_of(prepared)
    assert len(mappings) >= 2
    embedded = [model.embed(torch.arange(512)) for model in models]
    assert torch.equal(*embedded)
    assert sum(part.copied for part in mappings_of(prepared)) == 0


def rotary_module(config: Any) -> Any:
    """transformers' rotary module of a configuration."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        return AutoModelForCausalLM.from_config(config).model.rotary_emb


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_frequencies_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """Default and yarn, against transformers' float32 module."""
    config = read_config(write_hot_checkpoint(tmp_path / "checkpoint", family))
    module = rotary_module(config)
    frequencies, factor = float64_frequencies(config.rope_parameters, config.qk_rope_head_dim)
    assert frequencies.dtype == torch.float64
    assert torch.allclose(frequencies.float(), module.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"mscale": 0.6, "mscale_all_dim": 0.9}, id="a factor on cosines and sines"),
        pytest.param({"mscale": 1.0, "mscale_all_dim": 0.0}, id="the paper's own factor"),
        pytest.param({"factor": 8, "beta_fast": 16, "beta_slow": 2}, id="another ramp"),
        pytest.param({"attention_factor": 1.25}, id="a factor that is given"),
    ],
)
def test_yarn_settings_mean_the_same_as_in_transformers(settings: dict[str, Any], checkpoint: Path) -> None:
    """What a checkpoint may say beyond the released ones."""
    write_hot_checkpoint(checkpoint, "deepseek-v32")
    scaling = json.loads((checkpoint / "config.json").read_text())["rope_scaling"]
    change_config(checkpoint, rope_scaling=scaling | settings)
    config = read_config(checkpoint)
    module = rotary_module(config)
    frequencies, factor = float64_frequencies(config.rope_parameters, config.qk_rope_head_dim)
    assert torch.allclose(frequencies.float(), module.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)


def test_another_rope_type_is_refused(checkpoint: Path) -> None:
    """Frequencies that change with the length would be frozen silently."""
    change_config(checkpoint, rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0})
    with pytest.raises(CheckpointError, match="rope_type 'linear', whose frequencies cpkv does not follow"):
        read_config(checkpoint)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_feed_forward_layers_equal_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """The dense layer, and routed with shared experts."""
    from transformers import AutoModelForCausalLM

    folder = write_hot_checkpoint(tmp_path / "checkpoint", family)
    with quiet_transformers():
        layers = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").model.layers
    hidden = torch.randn(70, 128, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for layer in layers:
            assert torch.allclose(layer.mlp(hidden[None])[0], feed_forward(layer.mlp, hidden), rtol=1e-5, atol=1e-5)
