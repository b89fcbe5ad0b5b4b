"""Rotary positions. Frequencies come from transformers' module; in float64 from the same formulas in float64.

interleaved pairs (MLA everywhere, GLM's indexer)    (x0 x1) (x2 x3) ...      pair i turns by pos * frequency i
halves (DeepSeek-V3.2's indexer)                     (x0 x_h) (x1 x_h+1) ...  h = dims / 2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines [tokens, rope_dim / 2] of some positions."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, values: torch.Tensor, layout: Literal["interleaved", "halves"]) -> torch.Tensor:
        """Rotate values [tokens, ..., rope_dim], keeping their layout and dtype."""
        shape = (self.cos.shape[0],) + (1,) * (values.dim() - 2) + (self.cos.shape[1],)
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        if layout == "interleaved":
            first, second = values[..., 0::2], values[..., 1::2]
        else:
            first, second = values.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        rotated = torch.stack(turned, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(turned, dim=-1)
        return rotated.to(values.dtype)


def float64_frequencies(rope: dict[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies float64 [dim / 2] and the factor on cosines and sines, for default and yarn (arXiv 2309.00071).

    Other types are refused when the configuration is read.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    plain = rope["rope_theta"] ** -exponents
    if rope.get("rope_type", "default") == "default":
        return plain, 1.0
    factor, theta = rope["factor"], rope["rope_theta"]
    original = rope["original_max_position_embeddings"]

    def dim_of_turns(turns: float) -> float:
        return float(dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)))

    low, high = dim_of_turns(rope.get("beta_fast") or 32), dim_of_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high > low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    frequencies = plain / factor * interpolated + plain * (1 - interpolated)
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale(1.0)


class RotaryPositions:
    """Makes rotations for positions.

    Args:
        config: a transformers configuration with `rope_parameters`.
        module: transformers' rotary module of the model, the source of frequencies below float64.
        compute_dtype: float32 or float64.
        device: of positions and rotations.
    """

    def __init__(self, config: Any, module: Any, compute_dtype: torch.dtype, device: torch.device) -> None:
        if compute_dtype == torch.float64:
            self._frequencies, self._factor = float64_frequencies(config.rope_parameters, config.qk_rope_head_dim)
        else:
            self._frequencies, self._factor = module.inv_freq.float(), float(module.attention_scaling)
        self._frequencies = self._frequencies.to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of int64 positions [tokens], positions in the request."""
        angles = positions.to(self._frequencies.dtype).unsqueeze(1) * self._frequencies
        return Rotation(angles.cos() * self._factor, angles.sin() * self._factor)
