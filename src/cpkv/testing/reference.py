"""The float64 reference of the DSA families: what a checkpoint means, written to be read and not to be fast.

It shares no code with the engine or transformers: it reads the folder's files itself and follows the publications
(MLA: arXiv 2405.04434; sparse attention: DeepSeek-V3.2, arXiv 2512.02556; reused choices: arXiv 2603.12201; yarn: arXiv
2309.00071), all in float64, rope included. MLA is not absorbed: latents are expanded to keys and values per head, and
attention is dense under a mask, unlike an engine that gathers rows. In shapes, T counts all tokens seen, B a block's
queries.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import layer_norm, silu

BLOCK = 64  # queries worked on together: bounds the memory at [heads, BLOCK, T] for a prompt of any length
Indices = list[Tensor]  # per layer


class ReferenceResult(NamedTuple):
    """Logits [tokens, vocab] and, where recorded, the chosen positions per layer: int32 [tokens, min(topk, tokens)].

    Each query's positions are sorted; unused places hold -1 and so come first. Shared layers repeat the last choice.
    """

    logits: Tensor
    indices: Indices


class ReferenceModel:
    """A checkpoint folder (plain or block-fp8) of GLM-5, GLM-5.2 or DeepSeek-V3.2.

    `latent_norm_eps` is that of q_a_layernorm and kv_a_layernorm: 1e-6 in transformers, `rms_norm_eps` in servers.
    """

    def __init__(self, path: Path | str, latent_norm_eps: float = 1e-6) -> None:
        self.config = json.loads((Path(path) / "config.json").read_text())
        self.weights = _load_weights(Path(path), self.config)
        self.latent_norm_eps = latent_norm_eps
        self.indexer_types = self.config.get("indexer_types") or ["full"] * self.config["num_hidden_layers"]
        self.inv_freq, self.rope_factor, self.softmax_scale = _rope_settings(self.config)

    def forward(
        self, ids: list[int], *, record_indices: bool = False, replay: Indices | None = None
    ) -> ReferenceResult:
        """Logits of every token of a prompt. With `replay`, in the form of the recorded indices, no choice is made."""
        logits, indices = self._run(ids, {}, replay)
        return ReferenceResult(logits, indices if record_indices else [])

    def generate(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy tokens, past any end token, and logits [1 + new, vocab] of the last prompt token and each new one."""
        cache, tokens = dict[str, Tensor](), list[int]()
        logits = [self._run(ids, cache)[0][-1]]
        for _ in range(max_new_tokens):
            tokens.append(int(logits[-1].argmax()))
            logits.append(self._run(tokens[-1:], cache)[0][-1])
        return tokens, torch.stack(logits)

    @torch.no_grad()
    def _run(self, ids: list[int], cache: dict[str, Tensor], replay: Indices | None = None) -> tuple[Tensor, Indices]:
        """Logits of `ids`, which follow the tokens in `cache`, and the choices per layer."""
        indices: Indices = []
        x, eps = self.weights["model.embed_tokens.weight"][torch.tensor(ids)], self.config["rms_norm_eps"]
        for layer, indexer_type in enumerate(self.indexer_types):
            at = f"model.layers.{layer}."
            chosen = replay[layer] if replay else indices[-1] if indexer_type == "shared" else None
            out, chosen = self._attention(at + "self_attn.", self._rms(x, at + "input_layernorm", eps), cache, chosen)
            x = x + out
            x = x + self._mlp(at + "mlp.", self._rms(x, at + "post_attention_layernorm", eps))
            indices.append(chosen)
        return self._linear(self._rms(x, "model.norm", eps), "lm_head"), indices

    def _attention(self, at: str, x: Tensor, cache: dict[str, Tensor], chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sparse MLA of normed states [tokens, hidden]: the output, and the choice where `chosen` brings none."""
        c, rank, nope = self.config, self.config["kv_lora_rank"], self.config["qk_nope_head_dim"]
        start = len(cache.get(at + "rows", ()))
        pos = torch.arange(start, start + len(x))
        q_latent = self._rms(self._linear(x, at + "q_a_proj"), at + "q_a_layernorm", self.latent_norm_eps)
        q = self._linear(q_latent, at + "q_b_proj").view(len(x), c["num_attention_heads"], -1)
        q = torch.cat([q[..., :nope], self._rope(q[..., nope:], pos, interleaved=True)], -1).transpose(0, 1)
        # What is stored of a token: its normed latent, then one rotated key for all heads.
        latent, k_rope = self._linear(x, at + "kv_a_proj_with_mqa").split([rank, c["qk_rope_head_dim"]], -1)
        latent = self._rms(latent, at + "kv_a_layernorm", self.latent_norm_eps)
        k_rope = self._rope(k_rope[:, None], pos, interleaved=True)[:, 0]
        rows = _append(cache, at + "rows", torch.cat([latent, k_rope], -1))  # [T, rank + rope]
        if chosen is None:
            chosen = self._choose(at + "indexer.", x, q_latent, pos, cache)
        expanded = self._linear(rows[:, :rank], at + "kv_b_proj").view(len(rows), q.shape[0], -1).transpose(0, 1)
        keys = torch.cat([expanded[..., :nope], rows[:, rank:].expand(q.shape[0], -1, -1)], -1)  # [heads, T, qk]
        values = expanded[..., nope:]  # [heads, T, v]
        output = []
        for block in (pos - start).split(BLOCK):
            seen = start + int(block[-1]) + 1
            # True at the chosen positions, none of them later than the query's; -1 goes to a spare last column.
            allowed = torch.zeros(len(block), len(rows) + 1, dtype=torch.bool)
            allowed = allowed.scatter(1, chosen[block].long() % (len(rows) + 1), True).tril(seen - len(block))[:, :seen]
            scores = q[:, block] @ keys[:, :seen].mT * self.softmax_scale  # [heads, B, T]
            weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
            output.append((weights @ values[:, :seen]).transpose(0, 1).flatten(1))
        return self._linear(torch.cat(output), at + "o_proj"), chosen

    def _choose(self, at: str, x: Tensor, q_latent: Tensor, pos: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """The indexer: for each query the `index_topk` best positions up to its own, as in `ReferenceResult`."""
        c, dim, rope = self.config, self.config["index_head_dim"], self.config["qk_rope_head_dim"]
        key_norm = (self.weights[at + "k_norm.weight"], self.weights[at + "k_norm.bias"], 1e-6)
        k = layer_norm(self._linear(x, at + "wk"), (dim,), *key_norm)[:, None]
        q = self._linear(q_latent, at + "wq_b").view(len(x), -1, dim)
        # The one difference between the families' layouts: GLM rotates interleaved pairs here, DeepSeek halves.
        glm = c["model_type"] == "glm_moe_dsa"
        q, k = (torch.cat([self._rope(y[..., :rope], pos, interleaved=glm), y[..., rope:]], -1) for y in (q, k))
        keys = _append(cache, at + "keys", k[:, 0])  # [T, dim]
        weights = self._linear(x, at + "weights_proj") * (q.shape[1] * dim) ** -0.5  # [tokens, heads], of any sign
        chosen = torch.full((len(x), min(c["index_topk"], len(keys))), -1, dtype=torch.int32)
        for block in (pos - pos[0]).split(BLOCK):
            seen = int(pos[block[-1]]) + 1
            scores = (weights[block, None] @ (q[block] @ keys[:seen].T).relu())[:, 0]  # [B, T]
            # Many scores are exactly 0 behind the ReLU. Among equals a stable sort keeps the lowest position first;
            # adding 0.0 makes +0.0 of -0.0. Positions after the query's own are worst, and dropped if they get in.
            scores = (scores + 0.0).masked_fill(torch.arange(seen) > pos[block, None], -math.inf)
            best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : chosen.shape[1]]
            chosen[block, : best.shape[1]] = best.where(best <= pos[block, None], -1).int()
        return chosen.sort(-1).values

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        """The dense layer, or the routed experts plus the shared one."""
        c = self.config
        if at + "gate_proj.weight" in self.weights:
            return self._gated(x, at)
        affinity = self._linear(x, at + "gate").sigmoid()  # [tokens, experts]
        # The bias only steers the choice. Groups compete by the sum of their two best experts.
        biased = (affinity + self.weights[at + "gate.e_score_correction_bias"]).view(len(x), c["n_group"], -1)
        kept = biased.topk(2).values.sum(-1).topk(c["topk_group"]).indices
        ruled_out = torch.ones(len(x), c["n_group"], 1, dtype=torch.bool).scatter(1, kept[..., None], False)
        experts = biased.masked_fill(ruled_out, -math.inf).flatten(1).topk(c["num_experts_per_tok"]).indices
        weights = affinity.gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True) if c["norm_topk_prob"] else weights
        weights = torch.zeros_like(affinity).scatter(1, experts, weights * c["routed_scaling_factor"])
        routed = [weights[:, e, None] * self._gated(x, f"{at}experts.{e}.") for e in range(c["n_routed_experts"])]
        return sum(routed, self._gated(x, at + "shared_experts."))

    def _gated(self, x: Tensor, at: str) -> Tensor:
        return self._linear(silu(self._linear(x, at + "gate_proj")) * self._linear(x, at + "up_proj"), at + "down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def _rms(self, x: Tensor, name: str, eps: float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weights[name + ".weight"]

    def _rope(self, x: Tensor, pos: Tensor, *, interleaved: bool) -> Tensor:
        """Rotate [tokens, heads, rope]: the pairs are (0, 1), (2, 3) ... or (0, rope/2), (1, rope/2 + 1) ..."""
        angle = pos[:, None, None].double() * self.inv_freq
        cos, sin = angle.cos() * self.rope_factor, angle.sin() * self.rope_factor
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        rotated = (a * cos - b * sin, b * cos + a * sin)
        return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


def _append(cache: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
    cache[name] = torch.cat([cache.get(name, new[:0]), new])
    return cache[name]


def _rope_settings(config: dict[str, Any]) -> tuple[Tensor, float, float]:
    """The angle per position of each pair [rope / 2], the factor on cos and sin, and the softmax scale."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    dim, theta, kind = config["qk_rope_head_dim"], rope["rope_theta"], rope.get("rope_type") or rope.get("type")
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scale = (config["qk_nope_head_dim"] + dim) ** -0.5
    if kind in (None, "default"):
        return inv_freq, 1.0, scale
    if kind != "yarn":
        raise ValueError(f"the reference knows default and yarn rope, not {kind!r}")
    # Pairs that turn often in the original context keep their angle, those that turn seldom are slowed down by the
    # factor, with a ramp from the pair that turns beta_fast times to the one that turns beta_slow times.
    original, betas = rope["original_max_position_embeddings"], (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
    fast, slow = (dim * math.log(original / (math.tau * turns)) / (2 * math.log(theta)) for turns in betas)
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
    slowed = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    growth = 0.1 * math.log(rope["factor"])
    m, m_all = (growth * rope.get(name, 0) + 1 for name in ("mscale", "mscale_all_dim"))
    factor = m / m_all if m > 1 and m_all > 1 else growth + 1
    return inv_freq * (slowed / rope["factor"] + 1 - slowed), rope.get("attention_factor", factor), scale * m_all**2


def _load_weights(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of the folder; a block-fp8 weight is multiplied by the scale of each of its blocks."""
    stored = {name: tensor.double() for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        rows, columns = config["quantization_config"]["weight_block_size"]
        scale = stored.pop(name).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        weight = stored[name.removesuffix("_scale_inv")]
        weight *= scale[: weight.shape[0], : weight.shape[1]]
    return stored
