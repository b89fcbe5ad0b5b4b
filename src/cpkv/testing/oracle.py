"""transformers as an oracle: an independent implementation of the same checkpoint, made to choose without chance.

Among equal scores torch.topk takes any, and another one when the shape changes; behind the indexer's ReLU equal
scores are common. So the oracle's indexers choose by the rule of this project: score descending, then the lowest
position. Nothing is patched outside of the oracle's own model: each of its indexers is wrapped, and the wrapper puts a
`TorchFunctionMode` around the original forward, which replaces `Tensor.topk` for this thread and this call only
and is left on an exception too. Other models of the same classes, in this process or thread, keep torch.topk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging


class OracleTrace(NamedTuple):
    """Logits [tokens, vocab] and the chosen positions per layer: int32 [tokens, min(topk, tokens)].

    Each query's positions are sorted; unused places hold -1 and so come first. Shared layers repeat the last choice.
    """

    logits: Tensor
    indices: list[Tensor]


class StableTopK(TorchFunctionMode):
    """While entered, `Tensor.topk` over the last dimension prefers the lowest position among equal values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer `topk` by the stable rule and let everything else through."""
        if func is torch.Tensor.topk or func is torch.topk:
            return stable_topk(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def stable_topk(values: Tensor, k: int, dim: int = -1) -> torch.return_types.topk:
    """The `k` largest of `values` [..., n] along the last dimension, positions ascending; equal values by position.

    All that is above the k-th largest value, then the lowest positions of those equal to it (-0.0 equals +0.0).
    This costs a few passes, where a stable sort of every row would dominate the time of the whole model.
    """
    if dim not in (-1, values.ndim - 1):
        raise ValueError(f"stable_topk works on the last dimension, not on {dim}")
    kth = torch.topk(values, k, dim=-1).values[..., -1:]
    above, equal = values > kth, values == kth
    missing = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    positions = chosen.nonzero()[:, -1].view(*values.shape[:-1], k)
    return torch.return_types.topk((values.gather(-1, positions), positions))


class TransformersOracle:
    """A checkpoint folder run by transformers, eager attention and eager experts, on the CPU.

    Args:
        path: a folder with plain (not quantised) weights.
        dtype: of weights and activations; norms, softmax and router are float32 in transformers, whatever this is.
        latent_norm_eps: of q_a_layernorm and kv_a_layernorm, which transformers fixes at 1e-6.
    """

    def __init__(self, path: Path | str, dtype: torch.dtype = torch.float32, latent_norm_eps: float = 1e-6) -> None:
        with _quiet():
            self.model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            ).eval()
        # The argument was renamed between the versions of transformers that are supported.
        named = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"
        self._chosen: dict[int, Tensor] = {}
        self._replay: dict[int, Tensor] = {}
        for number, layer in enumerate(self.model.model.layers):
            attention = layer.self_attn
            attention.q_a_layernorm.variance_epsilon = latent_norm_eps
            attention.kv_a_layernorm.variance_epsilon = latent_norm_eps
            if attention.indexer is not None:
                attention.indexer.forward = self._stable(number, attention.indexer.forward)

    def forward(self, ids: list[int], chunk_size: int = 256, *, replay: list[Tensor] | None = None) -> Tensor:
        """Logits [tokens, vocab] of a prompt fed in chunks, in the model's dtype.

        Smaller chunks are faster and need less memory: [heads, chunk, tokens] of attention weights per layer.
        With `replay`, in the form of `OracleTrace.indices`, those positions are attended to; a shared layer of GLM-5.2
        takes the ones given for the full layer before it.
        """
        return self.trace(ids, chunk_size, replay=replay).logits

    def indices(self, ids: list[int], chunk_size: int = 256) -> list[Tensor]:
        """Per layer the chosen positions of each query, in the form of `OracleTrace.indices`."""
        return self.trace(ids, chunk_size).indices

    @torch.no_grad()
    def trace(self, ids: list[int], chunk_size: int = 256, *, replay: list[Tensor] | None = None) -> OracleTrace:
        """Logits and chosen positions of one pass over a prompt; arguments as in `forward`.

        With `replay`, the indices are what each layer would have chosen by itself, after the given choices of the
        layers before it: then one near-tie decided otherwise does not bring about others further up.
        """
        cache = DynamicCache(config=self.model.config)
        logits: list[Tensor] = []
        chosen: list[dict[int, Tensor]] = []
        try:
            for start in range(0, len(ids), chunk_size):
                rows = slice(start, start + chunk_size)
                self._chosen = {}
                self._replay = {layer: indices[rows] for layer, indices in enumerate(replay or [])}
                logits.append(self._step(ids[rows], cache))
                chosen.append(self._chosen)
        finally:
            self._replay = {}
        return OracleTrace(torch.cat(logits), self._per_layer(chosen, len(ids)))

    @torch.no_grad()
    def generate(self, ids: list[int], max_new_tokens: int, chunk_size: int = 256) -> tuple[list[int], Tensor]:
        """Greedy tokens and logits [1 + max_new_tokens, vocab]: of the last prompt token, then of each new token.

        The prompt is fed in chunks, new tokens one at a time. It does not stop at an end token.
        """
        cache = DynamicCache(config=self.model.config)
        for start in range(0, len(ids), chunk_size):
            last = self._step(ids[start : start + chunk_size], cache)[-1]
        tokens: list[int] = []
        logits = [last]
        for _ in range(max_new_tokens):
            tokens.append(int(logits[-1].argmax()))
            logits.append(self._step(tokens[-1:], cache)[-1])
        return tokens, torch.stack(logits)

    def _step(self, ids: list[int], cache: DynamicCache) -> Tensor:
        with _quiet():
            return self.model(input_ids=torch.tensor([ids]), use_cache=True, **{self._cache_name: cache}).logits[0]

    def _stable(self, layer: int, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The indexer's forward with the stable choice, or with the replayed one in its place."""

        def choose(*args: Any, **kwargs: Any) -> Tensor:
            with StableTopK():
                chosen = forward(*args, **kwargs)
            self._chosen[layer] = chosen[0]
            if layer not in self._replay:
                return chosen
            # The caller only opens a mask at these positions, so repeating one is as good as leaving it out.
            given = self._replay[layer]
            return given.where(given >= 0, given.amax(-1, keepdim=True))[None]

        return choose

    def _per_layer(self, chunks: list[dict[int, Tensor]], tokens: int) -> list[Tensor]:
        """Join the chunks' choices; drop the future positions that fill up the rows of the first queries."""
        width = min(self.model.config.index_topk, tokens)
        joined: list[Tensor] = []
        for layer in range(self.model.config.num_hidden_layers):
            if layer not in chunks[0]:
                joined.append(joined[-1])
                continue
            indices = torch.full((tokens, width), -1, dtype=torch.int32)
            start = 0
            for chosen in (chunk[layer].int() for chunk in chunks):
                queries = torch.arange(start, start + len(chosen))
                indices[queries, : chosen.shape[1]] = chosen.where(chosen <= queries[:, None], -1)
                start += len(chosen)
            joined.append(indices.sort(-1).values)
        return joined


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings, and put its settings back."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
