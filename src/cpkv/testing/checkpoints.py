"""Random checkpoints for tests: small DSA models whose every parameter matters.

The weights are "hot": their standard deviation is 1 / sqrt(fan in), so that one wrong position among a query's
chosen ones moves the logits by far more than rounding does. With the usual initial deviation of 0.02 attention is
nearly uniform and such a fault disappears in the noise.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Family = Literal["glm5", "glm52", "deepseek-v32"]

FP8_MAX = 448.0
FP8_BLOCK = 128
# Kept in full precision by the released block-fp8 folders; norms and biases are left alone for having one dimension.
UNQUANTISED = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "indexer.weights_proj.weight")


@dataclass(frozen=True)
class TinyShape:
    """The sizes of a test model, named as in config.json. The defaults give about 1.2 million parameters."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    num_attention_heads: int = 8
    n_routed_experts: int = 4
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    kv_lora_rank: int = 64
    q_lora_rank: int = 96
    qk_rope_head_dim: int = 16
    qk_nope_head_dim: int = 32
    v_head_dim: int = 32
    index_n_heads: int = 16
    index_head_dim: int = 32
    index_topk: int = 64

    @classmethod
    def real_rows(cls) -> TinyShape:
        """Sizes whose stored rows and top-k are those of the released models: 512 + 64 latent, 128 index, 2048."""
        return cls(
            num_hidden_layers=2,
            num_attention_heads=4,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            index_n_heads=16,
            index_head_dim=128,
            index_topk=2048,
        )


def write_hot_checkpoint(
    path: Path,
    family: Family,
    *,
    shape: TinyShape | None = None,
    vocab_size: int | None = None,
    index_heads: int | None = None,
    topk: int | None = None,
    indexer_types: Sequence[str] | None = None,
    seed: int = 0,
) -> Path:
    """Write config.json and model.safetensors (float32, experts one by one) of a random model; return `path`.

    Args:
        path: the folder; it is made where it does not exist, and the two files are overwritten.
        family: `glm5`, `glm52` (some layers reuse the choice of an earlier one) or `deepseek-v32`.
        shape: the sizes; `TinyShape()` where absent.
        vocab_size, index_heads, topk: override that one size of `shape`.
        indexer_types: `full` or `shared` per layer, for glm52 only; by default the second half of the layers is
            shared, [full, full, shared, shared] with four. With [full, shared, full, shared] the index slot of a
            layer differs from the number of the layer.
        seed: the weights depend, bit for bit, on this number, the parameter's name and its shape alone.
    """
    given = {"vocab_size": vocab_size, "index_n_heads": index_heads, "index_topk": topk}
    sizes = replace(shape or TinyShape(), **{name: size for name, size in given.items() if size is not None})
    config = _config(sizes, family, indexer_types)
    weights = {name: _hot_parameter(name, dims, seed) for name, dims in parameter_shapes(config).items()}
    path.mkdir(parents=True, exist_ok=True)
    _write_folder(path, config, weights)
    return path


def write_block_fp8(path_in: Path, path_out: Path) -> Path:
    """Write the checkpoint at `path_in` again with block-fp8 projections; return `path_out`.

    Every two-dimensional projection [out, in] becomes float8_e4m3fn beside `<name>_scale_inv`, a float32 tensor
    [ceil(out / 128), ceil(in / 128)]; the weight is the product of the two. The router, the indexer's
    `weights_proj`, the embedding and the head stay as they are, and so do all norms and biases.
    """
    config = json.loads((path_in / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "activation_scheme": "dynamic",
    }
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path_in / "model.safetensors").items():
        if weight.ndim == 2 and not name.endswith(UNQUANTISED):
            weights[name], weights[f"{name}_scale_inv"] = _quantise_blocks(weight)
        else:
            weights[name] = weight
    path_out.mkdir(parents=True, exist_ok=True)
    _write_folder(path_out, config, weights)
    return path_out


def parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The name and shape of each parameter of a checkpoint with this config.json, experts one by one."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    types = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
    for layer, indexer_type in enumerate(types):
        prefix = f"model.layers.{layer}."
        parts = _attention_shapes(config)
        if indexer_type == "full":
            parts |= _indexer_shapes(config)
        parts |= _mlp_shapes(config, dense=layer < config["first_k_dense_replace"])
        shapes |= {prefix + name: dims for name, dims in parts.items()}
    return shapes


def _attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }


def _indexer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    return {
        "self_attn.indexer.wq_b.weight": (heads * dim, config["q_lora_rank"]),
        "self_attn.indexer.wk.weight": (dim, config["hidden_size"]),
        "self_attn.indexer.k_norm.weight": (dim,),
        "self_attn.indexer.k_norm.bias": (dim,),
        "self_attn.indexer.weights_proj.weight": (heads, config["hidden_size"]),
    }


def _mlp_shapes(config: dict[str, Any], *, dense: bool) -> dict[str, tuple[int, ...]]:
    hidden, experts, width = config["hidden_size"], config["n_routed_experts"], config["moe_intermediate_size"]
    if dense:
        return _gated_shapes("mlp.", hidden, config["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    for expert in range(experts):
        shapes |= _gated_shapes(f"mlp.experts.{expert}.", hidden, width)
    return shapes | _gated_shapes("mlp.shared_experts.", hidden, width * config["n_shared_experts"])


def _gated_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    up, down = (width, hidden), (hidden, width)
    return {f"{prefix}gate_proj.weight": up, f"{prefix}up_proj.weight": up, f"{prefix}down_proj.weight": down}


def _config(shape: TinyShape, family: Family, indexer_types: Sequence[str] | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        **asdict(shape),
        "num_key_value_heads": shape.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    if family == "deepseek-v32":
        # Spelt as in the released folder, where rope settings still have their older names.
        yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
        return config | {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "n_group": 2,
            "topk_group": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0},
        }
    config |= {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    }
    if family == "glm52":
        full = math.ceil(shape.num_hidden_layers / 2)
        shared = shape.num_hidden_layers - full
        config["indexer_types"] = list(indexer_types or ["full"] * full + ["shared"] * shared)
    return config


def _hot_parameter(name: str, dims: tuple[int, ...], seed: int) -> torch.Tensor:
    noise = _near_normal(name, math.prod(dims), seed)
    if name.endswith("norm.weight"):
        noise = 1.0 + 0.1 * noise
    elif name.endswith("bias"):
        noise = 0.1 * noise
    else:
        noise = noise / math.sqrt(dims[-1])
    return torch.from_numpy(noise.astype(np.float32)).reshape(dims)


def _near_normal(name: str, count: int, seed: int) -> np.ndarray:
    """Float64 values [count] of mean 0 and deviation 1, equal on every machine and with every version of numpy.

    A library's normal distribution promises no fixed stream, but the raw output of this generator does. The sum of
    its four 16-bit parts is close to normal, and stays in integers up to the one multiplication.
    """
    raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(count)
    parts = np.stack([raw >> np.uint64(shift) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]).astype(np.int64)
    return (2 * parts.sum(0) - 4 * 0xFFFF) * (math.sqrt(3) / 2**17)


def _quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 values and float32 scales (amax / 448) of the 128 x 128 blocks of `weight` [out, in]."""
    rows, columns = weight.shape
    scales = torch.ones(math.ceil(rows / FP8_BLOCK), math.ceil(columns / FP8_BLOCK), dtype=torch.float32)
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (
                slice(row * FP8_BLOCK, (row + 1) * FP8_BLOCK),
                slice(column * FP8_BLOCK, (column + 1) * FP8_BLOCK),
            )
            largest = weight[block].abs().max()
            if largest > 0:
                scales[row, column] = largest / FP8_MAX
            quantised[block] = (weight[block] / scales[row, column]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return quantised, scales


def _write_folder(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
