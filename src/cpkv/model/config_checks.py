"""Sizes of a configuration that could never be served, found before anything is built from them."""

from __future__ import annotations

from typing import Any

from cpkv.errors import CheckpointError

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "max_position_embeddings",
)


ROPE_TYPES = ("default", "yarn")


def check_config(config: Any, source: str) -> None:
    """Refuse sizes below 1 and lists of layers that do not fit the number of layers.

    Args:
        config: a transformers configuration of a supported model type.
        source: where it comes from, for the message.

    Raises:
        CheckpointError: naming the entry and its value.
    """
    for name in SIZES:
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{source} says {name} {value!r}; it must be a whole number from 1 on")
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > config.index_head_dim:
        raise CheckpointError(
            f"{source} says qk_rope_head_dim {config.qk_rope_head_dim}; it must be even and at most index_head_dim "
            f"{config.index_head_dim}"
        )
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"{source} says rope_type {rope_type!r}, whose frequencies cpkv does not follow; "
            f"use {' or '.join(ROPE_TYPES)}"
        )
    types = getattr(config, "indexer_types", None)
    if types is None:
        return
    if len(types) != config.num_hidden_layers or set(types) - {"full", "shared"}:
        raise CheckpointError(
            f"{source} says indexer_types {types!r}; it must hold 'full' or 'shared' for each of "
            f"{config.num_hidden_layers} layers"
        )
    if types[0] != "full":
        raise CheckpointError(
            f"{source} says that layer 0 shares the choice of an earlier layer, and there is none; "
            "the first of indexer_types must be 'full'"
        )
