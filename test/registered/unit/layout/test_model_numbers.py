"""The numbers of a model read from a config.json alone, and the presets against transformers' defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpkv.errors import CheckpointError
from cpkv.layout.model_numbers import ModelNumbers, model_numbers, model_presets
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit")

TINY: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 64,
    "max_position_embeddings": 4096,
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({name: value for name, value in (TINY | changes).items() if value != "left out"}))
    return path


@pytest.mark.parametrize("preset", ["deepseek-v3.2", "glm-5", "glm-5.2"])
def test_presets_equal_what_transformers_writes(preset: str, tmp_path: Path) -> None:
    from transformers.models.deepseek_v32 import DeepseekV32Config
    from transformers.models.glm_moe_dsa import GlmMoeDsaConfig

    config = {
        "deepseek-v3.2": lambda: DeepseekV32Config(),
        "glm-5": lambda: GlmMoeDsaConfig(),
        "glm-5.2": lambda: GlmMoeDsaConfig(
            index_topk_freq=4, index_skip_topk_offset=3, max_position_embeddings=1 << 20
        ),
    }[preset]()
    config.save_pretrained(tmp_path)
    assert ModelNumbers.from_config_json(tmp_path) == model_presets()[preset]


def test_a_configuration_of_transformers_and_the_engine_give_the_same_geometry_and_costs(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from cpkv.layout.view_costs import ViewOptions
    from cpkv.model.shape import ModelShape

    written(tmp_path, index_topk_freq=2, index_skip_topk_offset=1)
    shape = ModelShape.from_config(AutoConfig.from_pretrained(tmp_path), 1e-6)
    numbers = ModelNumbers.from_config_json(tmp_path)
    assert numbers.has_indexer == shape.has_indexer == (True, False, True, False)
    assert numbers.max_positions == shape.max_positions
    geometry = numbers.geometry(16, "fp8", "fp8")
    assert geometry == shape.geometry(16, "fp8", "fp8")
    assert numbers.view_costs(geometry, 4, ViewOptions()) == shape.view_costs(geometry, 4, ViewOptions())


def test_glm_52_has_indexers_on_21_layers() -> None:
    numbers = model_presets()["glm-5.2"]
    assert [layer for layer, has in enumerate(numbers.has_indexer) if has] == [0, 1, 2, *range(6, 78, 4)]
    assert all(model_presets()["glm-5"].has_indexer)


def test_presets_are_a_fresh_mapping() -> None:
    model_presets().clear()
    assert len(model_presets()) == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True, True, True, True)),
        ({"indexer_types": ["full", "shared", "shared", "full"], "index_topk_freq": 9}, (True, False, False, True)),
        ({"index_topk_pattern": "FSFS"}, (True, False, True, False)),
        ({"index_topk_pattern": ["full", "full", "shared", "shared"]}, (True, True, False, False)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (True, True, True, False)),
        ({"index_topk_freq": 2}, (True, True, False, True)),
        ({"index_topk_freq": 0}, (True, True, True, True)),
        ({"model_type": "deepseek_v32", "index_topk_freq": 4}, (True, True, True, True)),
    ],
)
def test_layers_with_an_indexer(changes: dict[str, Any], expected: tuple[bool, ...], tmp_path: Path) -> None:
    assert ModelNumbers.from_config_json(written(tmp_path, **changes)).has_indexer == expected


@pytest.mark.parametrize("field", [name for name in TINY if name != "model_type"])
@pytest.mark.parametrize("value", ["left out", None, 0, -1, 1.5, "64", True, [64]])
def test_a_missing_or_odd_field_is_named(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"\b{field}\b") as caught:
        ModelNumbers.from_config_json(written(tmp_path, **{field: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "llama"}, "'llama', which has no DeepSeek Sparse Attention; use a model of type glm_moe_dsa"),
        ({"model_type": "left out"}, "None, which has no DeepSeek Sparse Attention"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000; cpkv serves at most 4096"),
        ({"indexer_types": ["full"]}, "for each of 4 layers"),
        ({"indexer_types": "full"}, "for each of 4 layers"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "'full' or 'shared'"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "its first entry must be 'full'"),
        ({"index_topk_pattern": "FSX."}, "index_topk_pattern 'FSX.'"),
        ({"index_topk_freq": "4"}, "index_topk_freq '4'"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "index_skip_topk_offset must be 1 or more"),
        ({"index_skip_topk_offset": -2}, "index_skip_topk_offset -2"),
    ],
)
def test_what_no_cache_follows_from_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=".*") as caught:
        ModelNumbers.from_config_json(written(tmp_path, **changes))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "is no JSON"),
        (b"", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1]", "holds list, not a JSON object"),
    ],
)
def test_a_damaged_file_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        model_numbers(str(tmp_path))
    assert told in str(caught.value)


def test_a_model_is_a_folder_a_file_or_a_preset(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert model_numbers(str(tmp_path)) == model_numbers(str(path)) == ModelNumbers.from_config_json(path)
    assert model_numbers("glm-5") == model_presets()["glm-5"]


def test_a_path_that_exists_wins_over_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "glm-5").mkdir()
    written(tmp_path / "glm-5")
    monkeypatch.chdir(tmp_path)
    assert model_numbers("glm-5").layers == 4


@pytest.mark.parametrize("model", ["glm-6", "no/such/folder", "", "x" * 5000, "a\0b"])
def test_an_unknown_model_is_refused_with_the_presets(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"deepseek-v3\.2, glm-5, glm-5\.2|config\.json"):
        model_numbers(model)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist; give a folder"):
        model_numbers(str(tmp_path))
