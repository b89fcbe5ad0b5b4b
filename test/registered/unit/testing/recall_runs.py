"""The constructed recall model in transformers, and faults planted into it."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cpkv.testing.recall_model import write_recall_checkpoint
from cpkv.testing.recall_prompt import RECALL_FAMILIES, RecallPrompt, recall_prompt

NEW = 16


def load(path: Path, family: str, prompt: RecallPrompt, dtype: torch.dtype = torch.float32) -> Any:
    write_recall_checkpoint(path, family, vocab_size=prompt.vocab_size, delta=prompt.delta)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, experts_implementation="eager", attn_implementation="eager"
    ).eval()


def as_fp8(keys: torch.Tensor) -> torch.Tensor:
    """Through e4m3 with one power-of-two scale per key, as the published kernels store index keys."""
    wide = keys.float()
    scale = torch.exp2(torch.ceil(torch.log2(wide.abs().amax(-1, keepdim=True) / 448)))
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(keys.dtype)


def step(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """The logits of these rows [tokens, vocab]. The argument had another name in older versions of transformers."""
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=ids, use_cache=True, **{named: cache}).logits[0]


@torch.no_grad()
def prefill(model: Any, ids: tuple[int, ...], chunk: int = 512, fp8_keys: bool = False) -> tuple[Any, torch.Tensor]:
    """The cache, and the logits of every row [tokens, vocab]."""
    cache = DynamicCache(config=model.config)
    if fp8_keys:
        update = cache.update_indexer
        cache.update_indexer = lambda keys, layer: update(as_fp8(keys), layer)
    parts = [step(model, part, cache) for part in torch.tensor([ids]).split(chunk, 1)]
    return cache, torch.cat(parts)


@torch.no_grad()
def decode(model: Any, cache: Any, row: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy decoding after the last prompt row's logits: the logits that chose each token [new, vocab]."""
    rows = [row]
    while len(rows) < new:
        rows.append(step(model, rows[-1].argmax().view(1, 1), cache)[-1])
    return torch.stack(rows).float()


def answer(model: Any, prompt: RecallPrompt, **how: Any) -> torch.Tensor:
    cache, rows = prefill(model, prompt.token_ids, **how)
    return decode(model, cache, rows[-1], len(prompt.answers))


def count_right(logits: torch.Tensor, prompt: RecallPrompt) -> int:
    return sum(int(a == b) for a, b in zip(logits.argmax(-1).tolist(), prompt.answers, strict=True))


def assert_right(logits: torch.Tensor, prompt: RecallPrompt, atol: float = 1e-2) -> None:
    """The right tokens, with the logits that the derivation gives: 32, and 16 for the next best."""
    assert logits.argmax(-1).tolist() == list(prompt.answers)
    torch.testing.assert_close(
        logits.topk(2).values, torch.tensor([[32.0, 16.0]]).expand(len(logits), 2), rtol=0, atol=atol
    )


def prompt_of(family: str, tokens: int, page_size: int, seed: int = 0, **shared: int) -> RecallPrompt:
    prompt = recall_prompt(family, tokens, page_size, NEW, seed, **shared)
    assert prompt is not None
    return prompt


def dsa_module(family: str) -> tuple[ModuleType, str]:
    """The transformers module of a family, and the prefix of its classes."""
    folder, prefix = ("deepseek_v32", "DeepseekV32") if family == "deepseek-v32" else ("glm_moe_dsa", "GlmMoeDsa")
    return import_module(f"transformers.models.{folder}.modeling_{folder}"), prefix


def plant_wrong_rope(patch: pytest.MonkeyPatch, family: str) -> None:
    module, _ = dsa_module(family)
    deepseek, _ = dsa_module("deepseek-v32")
    half_split, interleaved = deepseek.apply_rotary_pos_emb, deepseek.apply_rotary_pos_emb_interleave
    if family == "deepseek-v32":
        patch.setattr(module, "apply_rotary_pos_emb", interleaved)
        # Same layout for the attention, whose name it is too.
        patch.setattr(module, "apply_rotary_pos_emb_interleave", interleaved)
        return

    def by_caller(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        # Only the indexer has its heads in dimension 2.
        return (half_split if unsqueeze_dim == 2 else interleaved)(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    patch.setattr(module, "apply_rotary_pos_emb_interleave", by_caller)


def plant_index_off_by_one(patch: pytest.MonkeyPatch, family: str) -> None:
    module, prefix = dsa_module(family)
    indexer = getattr(module, f"{prefix}Indexer")
    forward = indexer.forward
    patch.setattr(indexer, "forward", lambda self, *a, **k: (forward(self, *a, **k) - 1).clamp(min=0))


def plant_no_relu(patch: pytest.MonkeyPatch, family: str) -> None:
    class Functional:
        """torch.nn.functional, but relu lets all through."""

        relu = staticmethod(lambda x: x)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.nn.functional, name)

    patch.setattr(dsa_module(family)[0], "F", Functional())


def plant_reuse_of_layer_1(patch: pytest.MonkeyPatch, family: str) -> None:
    attention = dsa_module(family)[0].GlmMoeDsaAttention
    forward = attention.forward
    kept: list[Any] = [None]

    def faulty(self: Any, *args: Any, prev_topk_indices: Any = None, **kwargs: Any) -> Any:
        result = forward(self, *args, prev_topk_indices=kept[0] if self.skip_topk else prev_topk_indices, **kwargs)
        if self.layer_idx == 1:
            kept[0] = result[2]
        return result

    patch.setattr(attention, "forward", faulty)


FAULTS = {
    "wrong indexer rope": plant_wrong_rope,
    "index off by one": plant_index_off_by_one,
    "no relu": plant_no_relu,
    "layer 1's choice reused": plant_reuse_of_layer_1,
}
# Only GLM-5.2 has shared layers.
PLANTED = [
    (family, fault) for family in RECALL_FAMILIES for fault in FAULTS if family == "glm52" or "reuse" not in fault
]


def check_planted(family: str, fault: str, tokens: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """With the fault no answer is right."""
    prompt = prompt_of(family, tokens, 64, seed=2)
    model = load(folder, family, prompt)
    FAULTS[fault](patch, family)
    assert count_right(answer(model, prompt), prompt) == 0
