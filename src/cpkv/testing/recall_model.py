"""A checkpoint whose weights are written down, not trained, that follows links in a prompt, right at any length.

Layer 0 fetches, at every row p, the token at p - delta. Three hops then follow links: a hop looks for the row that
fetched the name asked for, and takes that row's payload as the next name. See recall_prompt.py for prompts.

The residual stream is seven blocks of 64:

    const | id | payload | fetched | hop 1 | hop 2 | hop 3
      8     a name's code: +1 or -1 in every place                (const: one entry of 8, since 8^2 = 64 * 1^2)

    token         id             payload
    name t        code(t)        code(pad)
    value t       code(pad)      code(t)

Every filled block has the square norm 64, so whatever is projected into a latent comes out of its RMSNorm as the same
+1s and -1s (and the constant as 8), whichever the layer. MLPs are zero.

The code. A name is a pair (a, b) of words of 32 places, code = [A_a | B_b]. Words are rows of the 32 x 32 Hadamard
matrix and, in the first half, their negatives. Two different words have dot product 0 (or -32), so

    code(s) . code(t) = 64 if s = t, else at most 32;    code(pad) . code(t) = 0 for t != pad

since pad is row 0 in both halves, and no other name uses row 0. The pairs fill a grid: with one half of an answer
wrong, the other half still fits as many names as the grid is wide, and the code read is pad's or another name's.

Fetch (layer 0). With rope's frequencies f_i, a query turned back by delta against a constant key gives

    q_i = (cos delta f_i, -sin delta f_i), k_i = (1, 0):    q(p) . k(s) = sum_i cos((p - delta - s) f_i)

which peaks at s = p - delta, F at the peak and less by sum_i (1 - cos f_i) > 0.7 beside it. Only f_i >= 1e-4 are
used: slower ones tell no two tokens apart and would make the peak of a wrong rope layout broader. The indexer and the
attention both fetch so; they differ in where pair i lies (half-split or interleaved in the indexer, by family;
interleaved in the attention).

Hop h. With x the code of hop h - 1 (of the row's own id in hop 1), query x + beta pad against the fetched code of
every row, beta = 3/4:

    the row that fetched x: 64        rows that fetched padding: 48 (the sink)        all others: at most 32

The sink makes every row of a recall prompt well conditioned: where nothing matches, the answer is pad and depends on
no tie, as all rows that fetched padding carry the payload pad, and so do all rows that fetched a filler.

The indexer's score must not be linear: heads come in pairs with queries q and -q and equal weights,

    sum_h w relu(q_h . k) = w (relu(q . k) + relu(-q . k)) = w |q . k|

which is 0 everywhere if the ReLU is left out. No other row reaches |q . k| = 64 in a hop, as |dot| <= 32 for names.
Index keys go through LayerNorm: each half of a key is the negative of the other, so the mean is 0 and the variance 1
exactly (a hop's query is zero in the rope half). All entries are then +1 or -1 and survive fp8.

GLM-5.2. Layers 3 and 5 share the choice of layers 2 and 4. There a hop takes two layers: the full one copies the first
half of the payload, the shared one the second, so a shared layer with a wrong choice says a wrong name.

    family               0      1      2           3          4           5
    glm5, deepseek-v32   fetch  hop 1  hop 2       hop 3
    glm52                fetch  hop 1  hop 2 [A|   hop 2 |B]  hop 3 [A|   hop 3 |B]
    (indexer, glm52)     full   full   full        shared     full        shared

What it cannot show: experts (all MLPs are zero), attention that reads more rows than were chosen, and rows of layer 0
lost after the prefill, as what was fetched lives on in the other layers. Text that is no recall prompt ties everywhere.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from cpkv.errors import ConfigError
from cpkv.testing.recall_prompt import EOS, MAX_NAMES, PAD, RECALL_FAMILIES

_CODE: Final = 64
_HALF: Final = _CODE // 2
_CONST, _ID, _PAYLOAD, _FETCHED, _HOP = 0, 1, 2, 3, 4
_HOPS: Final = 3
_HIDDEN: Final = (_HOP + _HOPS) * _CODE
_UNIT: Final = math.sqrt(_CODE)  # the constant: one entry with the square norm of a code
_HEADS: Final = 4
_V_DIM: Final = _CODE // _HEADS
_NOPE: Final = _CODE
_ROPE: Final = 64
_Q_RANK: Final = 2 * _CODE  # code asked for | constant
_KV_RANK: Final = 2 * _CODE  # code to match | code to copy
_INDEX_HEADS: Final = 4
_INDEX_DIM: Final = _ROPE + _CODE
_INDEX_TOPK: Final = 32
# Latents leave their projections this much larger, so that the eps of the norms behind them does not show in a logit.
_LATENT_GAIN: Final = 8.0
_SINK: Final = 0.75
# Attention logits: at the peak of the fetch per frequency, and at a hop's match. The next best is lower by more than
# 0.7 * 30 and by (1 - _SINK) * 96: softmax weights below 1e-9, and margins that bf16 keeps.
_FETCH_LOGIT: Final = 30.0
_MATCH_LOGIT: Final = 96.0
_SLOWEST: Final = 1e-4
# A right answer's logit is 32, the next one 16.
_HEAD_GAIN: Final = 0.5


@dataclass(frozen=True)
class _Family:
    architecture: str
    model_type: str
    rope_theta: float
    rms_norm_eps: float
    half_split_indexer: bool
    split_hops: frozenset[int]
    """Hops that take two layers, the second of which shares the choice of the first."""


@dataclass(frozen=True)
class _Layer:
    hop: int
    """0 fetches; h >= 1 is hop h."""
    heads: range
    """The attention heads whose output is kept; head n copies places 16 n to 16 n + 15 of the code."""
    shared: bool

    @property
    def asked(self) -> int:
        """Block of the code asked for."""
        return _ID if self.hop <= 1 else _HOP + self.hop - 2

    @property
    def target(self) -> int:
        """Block that is filled."""
        return _FETCHED if self.hop == 0 else _HOP + self.hop - 1


def write_recall_checkpoint(path: Path, family: str, *, vocab_size: int, delta: int, seed: int = 0) -> None:
    """Write config.json and model.safetensors (float32) of the recall model into the folder `path`.

    `vocab_size` and `delta` are those of the prompts (RecallPrompt); `seed` deals the codes to the names. transformers
    loads the folder. A right answer's logit is 32 and leads by 16. Raises ConfigError for sizes out of range.
    """
    if vocab_size % 2 or not 4 <= vocab_size <= 2 * MAX_NAMES:
        raise ConfigError(
            f"a recall model of vocabulary {vocab_size} does not exist: the code has {MAX_NAMES} names, each with a "
            f"value; pass an even number from 4 to {2 * MAX_NAMES}"
        )
    if delta < 1:
        raise ConfigError(f"delta {delta} fetches no earlier token: pass at least 1")
    spec = _family(family)
    layers = _layers(spec)
    codes = _codes(vocab_size // 2, seed)
    weights = _ends(codes)
    for number, layer in enumerate(layers):
        for name, weight in _layer_weights(spec, layer, codes[PAD], delta).items():
            weights[f"model.layers.{number}.{name}"] = weight
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_config(spec, layers, vocab_size), indent=1) + "\n")


def _family(name: str) -> _Family:
    glm = ("GlmMoeDsaForCausalLM", "glm_moe_dsa")
    match name:
        case "glm5":
            return _Family(*glm, 1e6, 1e-5, False, frozenset())
        case "glm52":
            return _Family(*glm, 8e6, 1e-5, False, frozenset({2, 3}))
        case "deepseek-v32":
            return _Family("DeepseekV32ForCausalLM", "deepseek_v32", 1e4, 1e-6, True, frozenset())
    raise ConfigError(f"no recall model of family {name!r}: the families are {', '.join(RECALL_FAMILIES)}")


def _layers(spec: _Family) -> list[_Layer]:
    layers = []
    for hop in range(_HOPS + 1):
        if hop in spec.split_hops:
            layers += [_Layer(hop, range(_HEADS // 2), False), _Layer(hop, range(_HEADS // 2, _HEADS), True)]
        else:
            layers.append(_Layer(hop, range(_HEADS), False))
    return layers


def _codes(names: int, seed: int) -> Tensor:
    """Codes of +1 and -1, [names, 64]: pad first, the others dealt to the cells of a grid as square as it can be."""
    rows = torch.ones(1, 1)
    while rows.shape[0] < _HALF:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    second = rows[1:]
    first = torch.cat([second, -second])
    width = min(len(second), math.isqrt(max(names - 2, 0)) + 1)
    cells = torch.randperm(names - 1, generator=torch.Generator().manual_seed(seed))
    dealt = torch.cat([first[cells // width], second[cells % width]], 1)
    return torch.cat([torch.ones(1, _CODE), dealt])


def _block(number: int) -> slice:
    return slice(number * _CODE, (number + 1) * _CODE)


def _ends(codes: Tensor) -> dict[str, Tensor]:
    """Embedding and head, both [vocab, hidden]. The head leans to pad as a hop's query does."""
    names = len(codes)
    embed = torch.zeros(2 * names, _HIDDEN)
    head = torch.zeros(2 * names, _HIDDEN)
    embed[:, _CONST] = _UNIT
    embed[:, _block(_ID)] = torch.cat([codes, codes[PAD].expand_as(codes)])
    embed[:, _block(_PAYLOAD)] = torch.cat([codes[PAD].expand_as(codes), codes])
    head[:names, _block(_HOP + _HOPS - 1)] = codes * _HEAD_GAIN
    head[PAD] *= 1 + _SINK
    return {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": torch.ones(_HIDDEN)}


def _layer_weights(spec: _Family, layer: _Layer, pad: Tensor, delta: int) -> dict[str, Tensor]:
    frequencies = spec.rope_theta ** -(torch.arange(0, _ROPE, 2) / _ROPE)
    used = (frequencies >= _SLOWEST).float()
    turned = torch.stack([(delta * frequencies).cos(), -(delta * frequencies).sin()]) * used
    weights = _attention_weights(layer, pad, turned, used)
    if not layer.shared:
        weights |= _indexer_weights(layer, pad, turned, used, spec.half_split_indexer)
    weights = {f"self_attn.{name}": weight for name, weight in weights.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{norm}.weight"] = torch.ones(_HIDDEN)
    for name, shape in (("gate", (_CODE, _HIDDEN)), ("up", (_CODE, _HIDDEN)), ("down", (_HIDDEN, _CODE))):
        weights[f"mlp.{name}_proj.weight"] = torch.zeros(shape)
    return weights


def _attention_weights(layer: _Layer, pad: Tensor, turned: Tensor, used: Tensor) -> dict[str, Tensor]:
    """MLA. After their norms the latents are: q [code asked for | 8 | 0 ...], kv [code to match | code to copy]."""
    eye = torch.eye(_CODE)
    loud = eye * _LATENT_GAIN
    match, copy = (_ID, _ID) if layer.hop == 0 else (_FETCHED, _PAYLOAD)
    q_a = torch.zeros(_Q_RANK, _HIDDEN)
    q_a[:_CODE, _block(layer.asked)] = loud
    q_a[_CODE, _CONST] = _LATENT_GAIN
    kv_a = torch.zeros(_KV_RANK + _ROPE, _HIDDEN)
    kv_a[:_CODE, _block(match)] = loud
    kv_a[_CODE:_KV_RANK, _block(copy)] = loud

    q_b = torch.zeros(_HEADS, _NOPE + _ROPE, _Q_RANK)
    kv_b = torch.zeros(_HEADS, _NOPE + _V_DIM, _KV_RANK)
    softmax_scale = (_NOPE + _ROPE) ** -0.5
    if layer.hop == 0:
        size = math.sqrt(_FETCH_LOGIT / softmax_scale)
        q_b[:, _NOPE:, _CODE] = _pairs(turned, half_split=False) * size / _UNIT
        # No norm follows this projection: undo the gain of the input norm, of whose seven blocks three are filled.
        gain = math.sqrt(_HIDDEN / (3 * _CODE))
        kv_a[_KV_RANK:, _CONST] = _pairs(torch.stack([used, 0 * used]), half_split=False) * size / (_UNIT * gain)
    else:
        size = _MATCH_LOGIT / (_CODE * softmax_scale)
        q_b[:, :_NOPE, :_CODE] = eye * size
        q_b[:, :_NOPE, _CODE] = pad * size * _SINK / _UNIT
        kv_b[:, :_NOPE, :_CODE] = eye

    out = torch.zeros(_HIDDEN, _HEADS, _V_DIM)
    for head in range(_HEADS):
        places = slice(head * _V_DIM, (head + 1) * _V_DIM)
        kv_b[head, _NOPE:, _CODE:] = eye[places]
        if head in layer.heads:
            out[_block(layer.target), head] = eye[:, places]
    return {
        "q_a_proj.weight": q_a,
        "q_a_layernorm.weight": torch.ones(_Q_RANK),
        "q_b_proj.weight": q_b.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": kv_a,
        "kv_a_layernorm.weight": torch.ones(_KV_RANK),
        "kv_b_proj.weight": kv_b.flatten(0, 1),
        "o_proj.weight": out.flatten(1),
    }


def _indexer_weights(layer: _Layer, pad: Tensor, turned: Tensor, used: Tensor, half_split: bool) -> dict[str, Tensor]:
    """The lightning indexer, whose score here is |q . k|. Queries read the same latent as the attention's."""
    query = torch.zeros(_INDEX_DIM, _Q_RANK)
    key = torch.zeros(_INDEX_DIM, _HIDDEN)
    if layer.hop == 0:
        query[:_ROPE, _CODE] = _pairs(turned, half_split) / _UNIT
        key[:_ROPE, _CONST] = _pairs(torch.stack([used, 0 * used]), half_split)
        key[_ROPE : _ROPE + len(used), _CONST] = -used
    else:
        query[_ROPE:, :_CODE] = torch.eye(_CODE)
        query[_ROPE:, _CODE] = pad * _SINK / _UNIT
        key[_ROPE:, _block(_FETCHED)] = torch.eye(_CODE)
        key[:_ROPE, _block(_FETCHED)] = -torch.eye(_CODE)
    weigh = torch.zeros(_INDEX_HEADS, _HIDDEN)
    weigh[:, _CONST] = 1.0
    return {
        "indexer.wq_b.weight": torch.cat([query, -query] * (_INDEX_HEADS // 2)),
        "indexer.wk.weight": key,
        "indexer.k_norm.weight": torch.ones(_INDEX_DIM),
        "indexer.k_norm.bias": torch.zeros(_INDEX_DIM),
        "indexer.weights_proj.weight": weigh,
    }


def _pairs(pairs: Tensor, half_split: bool) -> Tensor:
    """[2, 32] first and second places of rope's pairs -> [64]: all first places first, or one pair after another."""
    return pairs.flatten() if half_split else pairs.T.flatten()


def _config(spec: _Family, layers: list[_Layer], vocab_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [spec.architecture],
        "model_type": spec.model_type,
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _CODE,
        "num_hidden_layers": len(layers),
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "kv_lora_rank": _KV_RANK,
        "q_lora_rank": _Q_RANK,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _V_DIM,
        "index_topk": _INDEX_TOPK,
        "index_head_dim": _INDEX_DIM,
        "index_n_heads": _INDEX_HEADS,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "max_position_embeddings": 1 << 20,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": PAD,
        "eos_token_id": EOS,
        # Every layer is dense; these only keep readers of the expert settings from meeting the real model's sizes.
        "mlp_layer_types": ["dense"] * len(layers),
        "first_k_dense_replace": len(layers),
        "moe_intermediate_size": _CODE,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    if spec.model_type == "glm_moe_dsa":
        config["indexer_types"] = ["shared" if layer.shared else "full" for layer in layers]
    return config
