"""Drawing tokens: greedy, or temperature and top-p by transformers' own warpers, repeatable per request and step."""

from __future__ import annotations

import torch

from cpkv.errors import ConfigError
from cpkv.protocol.messages import Sampling

# The generator takes 64 bits; the step of the token has the lower 20.
MAX_SEED = 2**43 - 1


def check_sampling(sampling: Sampling) -> None:
    """Refuse what cannot be drawn from.

    Raises:
        ConfigError: temperature below 0, top_p outside (0, 1], or a seed of more than 43 bits.
    """
    if not sampling.temperature >= 0:
        raise ConfigError(f"temperature is {sampling.temperature}; it must be 0 (greedy) or more")
    if not 0 <= sampling.seed <= MAX_SEED:
        raise ConfigError(f"the sampling seed is {sampling.seed}; it must be from 0 to {MAX_SEED}")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")


def sample_token(logits: torch.Tensor, sampling: Sampling, step: int) -> int:
    """Draw one token from logits [vocab_size].

    Args:
        logits: of one request.
        sampling: how.
        step: number of the token in the request's output; the same seed and step draw the same token.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    scores = logits.unsqueeze(0).to(torch.float64)
    scores = TemperatureLogitsWarper(float(sampling.temperature))(torch.empty(0), scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(float(sampling.top_p))(torch.empty(0), scores)
    generator = torch.Generator().manual_seed((sampling.seed << 20) + step)
    return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator))
