"""A DSA model over the tokens of one rank: transformers' modules, cpkv's rows and attention inputs.

token ids -> embed -> per layer: project -> (rows to store, queries) ... attention ... -> finish -> logits
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from cpkv.attention.choice import AttentionInputs, IndexInputs
from cpkv.errors import CheckpointError
from cpkv.model.checkpoint import map_weights, quiet_transformers
from cpkv.model.norms import compute_dtype_of, layer_norm, rms_norm
from cpkv.model.rope import RotaryPositions, Rotation
from cpkv.model.router import feed_forward
from cpkv.model.shape import ModelShape

INDEX_KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class LayerProjections:
    """What one layer makes of this rank's tokens before attention.

    Attributes:
        attention: queries and indexer inputs.
        latent: [tokens, kv_lora_rank] normed latents, to be stored.
        rope_key: [tokens, rope_dim] rotated keys, to be stored.
        index_keys: [tokens, index_dim] rotated index keys, to be stored; None on a layer without an indexer.
    """

    attention: AttentionInputs
    latent: torch.Tensor
    rope_key: torch.Tensor
    index_keys: torch.Tensor | None


class DsaModel:
    """The model of one rank. Weights are read, never written; several ranks may share one instance.

    Args:
        config: transformers configuration.
        weights: state dict with the names of the model in memory (`prepare_weights`).
        latent_norm_eps: see `ModelShape`.

    Attributes:
        device: where the weights are.

    Raises:
        CheckpointError: weights are missing or of another shape.
    """

    def __init__(self, config: Any, weights: dict[str, torch.Tensor], latent_norm_eps: float) -> None:
        from transformers import AutoModelForCausalLM

        self.shape = ModelShape.from_config(config, latent_norm_eps)
        with quiet_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        try:
            model.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            raise CheckpointError(f"the prepared weights do not fit the model: {error}") from error
        self._body = model.model
        self._head = model.lm_head
        self.dtype: torch.dtype = self._body.embed_tokens.weight.dtype
        self.device: torch.device = self._body.embed_tokens.weight.device
        self.compute_dtype = compute_dtype_of(self.dtype)
        rotary_module = type(self._body.rotary_emb)(config)
        self._rotary = RotaryPositions(config, rotary_module, self.compute_dtype, self.device)

    @classmethod
    def load(cls, config: Any, prepared: Path, latent_norm_eps: float, device: torch.device | str = "cpu") -> DsaModel:
        """Map a prepared file (`prepare_weights`), or copy it to a GPU."""
        weights = {name: values.to(device) for name, values in map_weights(prepared).items()}
        return cls(config, weights, latent_norm_eps)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [tokens] to hidden states [tokens, hidden_size]."""
        return functional.embedding(token_ids, self._body.embed_tokens.weight)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """The rotation of positions int64 [tokens] in their requests."""
        return self._rotary.at(positions)

    def project(self, layer: int, hidden: torch.Tensor, rotation: Rotation) -> LayerProjections:
        """Queries, latent rows and index keys of one layer for tokens [tokens, hidden_size]."""
        shape = self.shape
        attention = self._body.layers[layer].self_attn
        normed = rms_norm(hidden, self._body.layers[layer].input_layernorm.weight, shape.norm_eps)
        query_latent = rms_norm(attention.q_a_proj(normed), attention.q_a_layernorm.weight, shape.latent_norm_eps)
        latent, rope_key = attention.kv_a_proj_with_mqa(normed).split([shape.kv_lora_rank, shape.rope_dim], dim=-1)
        index, index_keys = None, None
        if shape.has_indexer[layer]:
            index, index_keys = self._index(attention.indexer, normed, query_latent, rotation)
        return LayerProjections(
            attention=AttentionInputs(self._absorbed_queries(attention, query_latent, rotation), index),
            latent=rms_norm(latent, attention.kv_a_layernorm.weight, shape.latent_norm_eps),
            rope_key=rotation.apply(rope_key, "interleaved"),
            index_keys=index_keys,
        )

    def _up_projection(self, attention: Any) -> torch.Tensor:
        """kv_b_proj as [heads, nope_dim + value_dim, kv_lora_rank] in the compute dtype."""
        weight = attention.kv_b_proj.weight.view(self.shape.num_heads, -1, self.shape.kv_lora_rank)
        return weight.to(self.compute_dtype)

    def _absorbed_queries(self, attention: Any, query_latent: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[tokens, heads, latent_width] in the compute dtype: q_nope W_UK beside the rotated q_rope."""
        shape = self.shape
        queries = attention.q_b_proj(query_latent).view(-1, shape.num_heads, shape.nope_dim + shape.rope_dim)
        nope, rope = queries.to(self.compute_dtype).split([shape.nope_dim, shape.rope_dim], dim=-1)
        up = self._up_projection(attention)[:, : shape.nope_dim]
        absorbed = torch.bmm(nope.transpose(0, 1), up).transpose(0, 1)
        return torch.cat([absorbed, rotation.apply(rope, "interleaved")], dim=-1)

    def _index(
        self, indexer: Any, normed: torch.Tensor, query_latent: torch.Tensor, rotation: Rotation
    ) -> tuple[IndexInputs, torch.Tensor]:
        shape, wide = self.shape, self.compute_dtype

        def rotate(values: torch.Tensor) -> torch.Tensor:
            rope, rest = values.split([shape.rope_dim, shape.index_dim - shape.rope_dim], dim=-1)
            return torch.cat([rotation.apply(rope, shape.indexer_rope), rest], dim=-1)

        queries = indexer.wq_b(query_latent).view(-1, shape.index_heads, shape.index_dim).to(wide)
        keys = layer_norm(indexer.wk(normed), indexer.k_norm.weight, indexer.k_norm.bias, INDEX_KEY_NORM_EPS)
        weights = functional.linear(normed.to(wide), indexer.weights_proj.weight.to(wide))
        scaled = weights * (shape.index_heads**-0.5 * shape.index_dim**-0.5)
        return IndexInputs(rotate(queries), scaled), rotate(keys)

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Value projection, output projection, feed-forward and both residuals.

        Args:
            layer: the layer.
            hidden: [tokens, hidden_size] as it entered the layer.
            attended: [tokens, heads, kv_lora_rank] from sparse attention.
        """
        decoder = self._body.layers[layer]
        up = self._up_projection(decoder.self_attn)[:, self.shape.nope_dim :]
        values = torch.bmm(attended.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1).flatten(1)
        hidden = hidden + decoder.self_attn.o_proj(values.to(self.dtype))
        normed = rms_norm(hidden, decoder.post_attention_layernorm.weight, self.shape.norm_eps)
        return hidden + feed_forward(decoder.mlp, normed)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocab_size] in the compute dtype."""
        normed = rms_norm(hidden, self._body.norm.weight, self.shape.norm_eps)
        return functional.linear(normed, self._head.weight).to(self.compute_dtype)
