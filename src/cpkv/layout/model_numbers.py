"""The numbers of a DSA model that its cache depends on, read from a config.json without torch or transformers.

layers with an indexer, by the fields that there are, first match:

    indexer_types            ["full", "shared", ...]     one entry per layer
    index_topk_pattern       "FSSF..." or such a list    GLM
    index_topk_freq = f,     full where max(i - offset + 1, 0) % f == 0     GLM; f = 1 without the field
    index_skip_topk_offset
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpkv.config.names import IndexDtype, LatentDtype
from cpkv.errors import CheckpointError
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.query_blocks import QueryBlocks
from cpkv.layout.row_format import RowFormat
from cpkv.layout.view_costs import ViewCosts, ViewOptions

DSA_MODEL_TYPES = ("glm_moe_dsa", "deepseek_v32")
MAX_LAYERS = 4096
KINDS = {"F": "full", "S": "shared"}


@dataclass(frozen=True)
class ModelNumbers:
    """Sizes of a DSA model's cache.

    Attributes:
        layers: layers, each with a latent row per token.
        has_indexer: per layer, whether it stores an index key per token and chooses itself.
        kv_lora_rank: latent values of a row.
        rope_dim: rope values of a row.
        index_dim: values of an index key.
        index_heads: heads of the indexer.
        topk: keys chosen per query.
        max_positions: tokens of the longest context that the model was made for.
    """

    layers: int
    has_indexer: tuple[bool, ...]
    kv_lora_rank: int
    rope_dim: int
    index_dim: int
    index_heads: int
    topk: int
    max_positions: int

    @classmethod
    def from_config_json(cls, path: Path) -> ModelNumbers:
        """Read a config.json in Hugging Face's form, or the one in a folder.

        Raises:
            CheckpointError: no such file, no JSON object, no DSA model, or a field that is missing or out of range.
        """
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} does not exist; give a folder with a config.json, or a config.json"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; give a config.json") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is no JSON: {error}; fetch the file again") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} holds {type(raw).__name__}, not a JSON object; give a model's config.json")
        return cls.from_mapping(raw, str(path))

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], source: str) -> ModelNumbers:
        """Read the fields of a config.json; `source` names it in messages.

        Raises:
            CheckpointError: no DSA model, or a field that is missing or out of range.
        """
        model_type = raw.get("model_type")
        if model_type not in DSA_MODEL_TYPES:
            raise CheckpointError(
                f"{source} says model_type {model_type!r}, which has no DeepSeek Sparse Attention; "
                f"use a model of type {' or '.join(DSA_MODEL_TYPES)}"
            )
        layers = _size(raw, "num_hidden_layers", source)
        if layers > MAX_LAYERS:
            raise CheckpointError(f"{source} says num_hidden_layers {layers}; cpkv serves at most {MAX_LAYERS}")
        return cls(
            layers=layers,
            has_indexer=_has_indexer(raw, layers, source),
            kv_lora_rank=_size(raw, "kv_lora_rank", source),
            rope_dim=_size(raw, "qk_rope_head_dim", source),
            index_dim=_size(raw, "index_head_dim", source),
            index_heads=_size(raw, "index_n_heads", source),
            topk=_size(raw, "index_topk", source),
            max_positions=_size(raw, "max_position_embeddings", source),
        )

    def geometry(self, page_size: int, latent_dtype: LatentDtype, index_dtype: IndexDtype) -> PoolGeometry:
        """The pool that this model's KV needs."""
        row_format = RowFormat(latent_dtype, self.kv_lora_rank, self.rope_dim, index_dtype, self.index_dim)
        return PoolGeometry(row_format, page_size, index_slots(self.has_indexer))

    def view_costs(self, geometry: PoolGeometry, item_bytes: int, options: ViewOptions) -> ViewCosts:
        """What views of this model's KV cost; `item_bytes` of a value while it is computed with."""
        queries = QueryBlocks(self.topk, geometry.row_format.latent_width, self.index_heads, item_bytes)
        return ViewCosts(geometry, queries, options)


def model_presets() -> dict[str, ModelNumbers]:
    """Public architecture numbers by name, a fresh mapping at each call."""
    common = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048}
    glm = common | {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "index_n_heads": 32}
    configs: dict[str, dict[str, Any]] = {
        "deepseek-v3.2": common
        | {
            "model_type": "deepseek_v32",
            "num_hidden_layers": 61,
            "index_n_heads": 64,
            "max_position_embeddings": 163_840,
        },
        "glm-5": glm | {"max_position_embeddings": 202_752},
        "glm-5.2": glm | {"index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1_048_576},
    }
    return {name: ModelNumbers.from_mapping(config, name) for name, config in configs.items()}


def model_numbers(model: str) -> ModelNumbers:
    """The numbers of a preset, of a config.json, or of a folder with one; a path that exists wins over a preset.

    Raises:
        CheckpointError: it is none of them, or the file cannot be used.
    """
    presets = model_presets()
    path = Path(model)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # too long for a path, or with a zero in it
        exists = False
    if exists:
        return ModelNumbers.from_config_json(path)
    if model in presets:
        return presets[model]
    raise CheckpointError(
        f"{model} is no file, no folder and no preset; give a folder with a config.json, a config.json, "
        f"or one of {', '.join(presets)}"
    )


def _number(raw: Mapping[str, Any], name: str, source: str, least: int) -> int:
    value = raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"{source} says {name} {value!r}; it must be a whole number from {least} on")
    return value


def _size(raw: Mapping[str, Any], name: str, source: str) -> int:
    if name not in raw:
        raise CheckpointError(f"{source} has no {name}; add it: the size of the cache follows from it")
    return _number(raw, name, source, 1)


def _has_indexer(raw: Mapping[str, Any], layers: int, source: str) -> tuple[bool, ...]:
    types = raw.get("indexer_types")
    name = "indexer_types"
    if types is None and raw["model_type"] == "glm_moe_dsa":
        name = "index_topk_pattern"
        types = raw.get(name)
        if isinstance(types, str):
            types = [KINDS.get(letter, letter) for letter in types]
        if types is None:
            return _by_frequency(raw, layers, source)
    if types is None:
        return (True,) * layers
    if not isinstance(types, list) or len(types) != layers or any(kind not in KINDS.values() for kind in types):
        raise CheckpointError(
            f"{source} says {name} {raw[name]!r}; it must hold 'full' or 'shared' for each of {layers} layers"
        )
    if types[0] != "full":
        raise CheckpointError(
            f"{source} says by {name} that layer 0 shares the choice of an earlier layer, and there is none; "
            "its first entry must be 'full'"
        )
    return tuple(kind == "full" for kind in types)


def _by_frequency(raw: Mapping[str, Any], layers: int, source: str) -> tuple[bool, ...]:
    freq = _number({"index_topk_freq": 1} | dict(raw), "index_topk_freq", source, 0) or 1
    offset = _number({"index_skip_topk_offset": 2} | dict(raw), "index_skip_topk_offset", source, 0)
    if offset == 0 and freq > 1:
        raise CheckpointError(
            f"{source} says index_skip_topk_offset 0 with index_topk_freq {freq}: layer 0 would share the choice of an "
            "earlier layer, and there is none; index_skip_topk_offset must be 1 or more"
        )
    return tuple(max(layer - offset + 1, 0) % freq == 0 for layer in range(layers))
