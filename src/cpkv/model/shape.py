"""The numbers of a DSA model that the cache and the attention need, read from its transformers configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from cpkv.config.names import IndexDtype, LatentDtype
from cpkv.errors import CheckpointError
from cpkv.layout.model_numbers import DSA_MODEL_TYPES, ModelNumbers
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.view_costs import ViewCosts, ViewOptions


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a DSA model.

    Attributes:
        indexer_rope: DeepSeek-V3.2 rotates indexer dims in halves, GLM in interleaved pairs.
        has_indexer: per layer, whether it chooses keys itself; GLM-5.2's other layers reuse the last choice.
        softmax_scale: qk_head_dim^-0.5, times mscale^2 where yarn sets mscale_all_dim.
        norm_eps: eps of input, post-attention and final norm.
        latent_norm_eps: eps of q_a_layernorm and kv_a_layernorm; transformers fixes it at 1e-6, serving engines use
            norm_eps.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    topk: int
    indexer_rope: Literal["interleaved", "halves"]
    has_indexer: tuple[bool, ...]
    softmax_scale: float
    norm_eps: float
    latent_norm_eps: float
    max_positions: int

    @classmethod
    def from_config(cls, config: Any, latent_norm_eps: float) -> ModelShape:
        """Read a transformers configuration.

        Raises:
            CheckpointError: the model has no DSA indexer that cpkv knows.
        """
        if config.model_type not in DSA_MODEL_TYPES:
            raise CheckpointError(
                f"model_type is {config.model_type!r}, which has no DeepSeek Sparse Attention; "
                f"use a model of type {' or '.join(DSA_MODEL_TYPES)}"
            )
        types = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            nope_dim=config.qk_nope_head_dim,
            rope_dim=config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
            index_heads=config.index_n_heads,
            index_dim=config.index_head_dim,
            topk=config.index_topk,
            indexer_rope="halves" if config.model_type == "deepseek_v32" else "interleaved",
            has_indexer=tuple(kind == "full" for kind in types),
            softmax_scale=_softmax_scale(config),
            norm_eps=config.rms_norm_eps,
            latent_norm_eps=latent_norm_eps,
            max_positions=config.max_position_embeddings,
        )

    @property
    def numbers(self) -> ModelNumbers:
        """What the cache depends on."""
        return ModelNumbers(
            layers=self.num_layers,
            has_indexer=self.has_indexer,
            kv_lora_rank=self.kv_lora_rank,
            rope_dim=self.rope_dim,
            index_dim=self.index_dim,
            index_heads=self.index_heads,
            topk=self.topk,
            max_positions=self.max_positions,
        )

    def geometry(self, page_size: int, latent_dtype: LatentDtype, index_dtype: IndexDtype) -> PoolGeometry:
        """The pool that this model's KV needs."""
        return self.numbers.geometry(page_size, latent_dtype, index_dtype)

    def view_costs(self, geometry: PoolGeometry, item_bytes: int, options: ViewOptions) -> ViewCosts:
        """What views of this model's KV cost; `item_bytes` of a value while it is computed with."""
        return self.numbers.view_costs(geometry, item_bytes, options)


def _softmax_scale(config: Any) -> float:
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    all_dim = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") != "default" and all_dim and rope["factor"] > 1:
        scale *= (0.1 * all_dim * math.log(rope["factor"]) + 1.0) ** 2
    return float(scale)
