"""The constructed recall model against transformers: right where it should be, wrong where a fault is planted."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recall_runs import (
    NEW,
    PLANTED,
    answer,
    assert_right,
    check_planted,
    count_right,
    decode,
    dsa_module,
    load,
    prefill,
    prompt_of,
)
from safetensors.torch import load_file

from cpkv.errors import ConfigError, PromptError
from cpkv.testing.recall_model import write_recall_checkpoint
from cpkv.testing.recall_prompt import (
    EOS,
    PAD,
    RECALL_FAMILIES,
    RecallPrompt,
    recall_delta,
    recall_prompt,
    recall_vocab_size,
)
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=17, suite="unit")

# ---- the prompt ----


def links_of(prompt: RecallPrompt) -> dict[int, tuple[int, int]]:
    """Key -> (name it points to, position of the value), read from the tokens alone."""
    names = prompt.vocab_size // 2
    values = [p for p, token in enumerate(prompt.token_ids) if token >= names]
    links = {prompt.token_ids[p - prompt.delta]: (prompt.token_ids[p] - names, p) for p in values}
    assert len(links) == len(values)
    return links


def check_prompt(prompt: RecallPrompt, tokens: int, page_size: int) -> None:
    ids, delta = prompt.token_ids, prompt.delta
    links = links_of(prompt)
    assert len(ids) == tokens
    assert all(token == PAD for token in ids[:delta])
    assert not {PAD, EOS} & set(ids[delta:])
    assert all(2 * delta <= place <= tokens - 2 for _, place in links.values())
    name, walk = ids[-1], []
    for _ in range(3 * len(prompt.answers)):
        name = links[name][0]
        walk.append(name)
    assert tuple(walk[2::3]) == prompt.answers
    start, seen = ids[-1], set()
    while start not in seen:
        seen.add(start)
        start = links[start][0]
    assert (start, seen) == (ids[-1], set(links)), "the links are not one cycle"
    assert all(ids.count(key) == (2 if key == ids[-1] else 1) for key in links)
    if page_size >= 16:
        fed = sorted(place // page_size for _, place in links.values())
        assert fed == list(range(-(-2 * delta // page_size), (tokens - 2) // page_size + 1))
    else:
        pages = (tokens - 1) // page_size - -(-2 * delta // page_size)
        assert len(links) == max(1, pages // -(-16 // page_size))


@pytest.mark.parametrize("family", RECALL_FAMILIES)
def test_every_length_is_one_cycle_over_its_pages_or_no_prompt(family: str) -> None:
    for tokens, page_size in itertools.product([*range(1, 300, 7), 512, 513, 1000, 5000], [1, 3, 8, 16, 17, 64, 128]):
        prompt = recall_prompt(family, tokens, page_size, NEW, seed=tokens)
        delta = recall_delta(family, tokens)
        whole = [p for p in range(2 * delta, tokens - page_size) if p % page_size == 0]
        assert (prompt is not None) == (delta >= 2 and bool(whole))
        if prompt is not None:
            assert prompt.vocab_size == recall_vocab_size(family, tokens, page_size)
            assert len(prompt.answers) == min(NEW, delta - 1)
            check_prompt(prompt, tokens, page_size)


def test_a_prompt_longer_than_its_names_has_a_link_for_several_pages() -> None:
    prompt = prompt_of("deepseek-v32", 200_000, 16)
    links = links_of(prompt)
    assert 1500 < len(links) < prompt.vocab_size // 2
    assert set(prompt.answers) < set(links)


def test_delta_and_vocabulary_follow_the_length() -> None:
    assert [recall_delta("glm5", n) for n in (40, 3999, 4000, 20_000)] == [10, 999, 1000, 1000]
    assert [recall_delta("deepseek-v32", n) for n in (40, 400, 20_000)] == [10, 100, 100]
    sizes = [recall_vocab_size("glm52", n, 64) for n in (1000, 4000, 20_000)]
    assert sizes == sorted(set(sizes))


def test_the_seed_decides_the_prompt() -> None:
    assert prompt_of("glm5", 600, 64, seed=3) == prompt_of("glm5", 600, 64, seed=3)
    assert prompt_of("glm5", 600, 64, seed=3).token_ids != prompt_of("glm5", 600, 64, seed=4).token_ids


def test_sizes_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="glm5, glm52, deepseek-v32"):
        recall_delta("llama", 1000)
    with pytest.raises(PromptError, match="8 links .* vocabulary of 40: .* between 52 and 3846"):
        recall_prompt("glm5", 1000, 64, NEW, 0, vocab_size=40)
    with pytest.raises(ConfigError, match="pages of 0"):
        recall_prompt("glm5", 1000, 0, NEW, 0)
    with pytest.raises(ConfigError, match="even number from 4 to 3846"):
        write_recall_checkpoint(tmp_path, "glm5", vocab_size=3848, delta=10)
    with pytest.raises(ConfigError, match="at least 1"):
        write_recall_checkpoint(tmp_path, "glm5", vocab_size=64, delta=0)


def test_the_prompt_needs_no_torch() -> None:
    code = "import sys, cpkv.testing.recall_prompt; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the model ----


@pytest.mark.parametrize(
    ("family", "tokens", "page_size"),
    [
        ("glm5", 40, 8),
        ("glm5", 600, 64),
        ("glm52", 193, 64),
        ("glm52", 1000, 1),
        ("deepseek-v32", 193, 64),
        ("deepseek-v32", 600, 64),
    ],
)
def test_every_answer_is_right(tmp_path: Path, family: str, tokens: int, page_size: int) -> None:
    prompt = prompt_of(family, tokens, page_size)
    assert_right(answer(load(tmp_path, family, prompt), prompt), prompt)


@pytest.mark.parametrize("family", RECALL_FAMILIES)
def test_every_answer_is_right_in_bf16_with_fp8_index_keys(tmp_path: Path, family: str) -> None:
    prompt = prompt_of(family, 600, 64, seed=1)
    assert_right(answer(load(tmp_path, family, prompt, torch.bfloat16), prompt, fp8_keys=True), prompt, atol=0.25)


def test_every_answer_is_right_with_all_names_in_use(tmp_path: Path) -> None:
    """Past 961 names the first half of a code may be a negated word, which |q . k| must not take for the word."""
    prompt = prompt_of("glm52", 1000, 16, vocab_size=3846)
    assert_right(answer(load(tmp_path, "glm52", prompt), prompt), prompt)


def test_prompts_of_different_lengths_share_a_checkpoint(tmp_path: Path) -> None:
    lengths = (200, 450, 1000)
    shared = {"delta": recall_delta("glm52", min(lengths)), "vocab_size": recall_vocab_size("glm52", max(lengths), 16)}
    prompts = [prompt_of("glm52", n, 16, **shared) for n in lengths]
    model = load(tmp_path, "glm52", prompts[0])
    for prompt in prompts:
        check_prompt(prompt, len(prompt.token_ids), 16)
        assert_right(answer(model, prompt), prompt)


def names_said(prompt: RecallPrompt) -> list[int]:
    """What each prompt row should say: the name three links on, by the links whose values lie at or before the row."""
    names, links, said = prompt.vocab_size // 2, links_of(prompt), []
    for row, token in enumerate(prompt.token_ids):
        name = token if token < names else PAD
        for _ in range(3):
            to, place = links.get(name, (PAD, 0))
            name = to if place <= row else PAD
        said.append(name)
    return said


@pytest.mark.parametrize("family", RECALL_FAMILIES)
def test_no_row_depends_on_the_chunks_or_on_ties(tmp_path: Path, family: str) -> None:
    prompt = prompt_of(family, 600, 16)
    model = load(tmp_path, family, prompt)
    (cache, rows), (other_cache, other_rows) = (prefill(model, prompt.token_ids, chunk) for chunk in (512, 128))
    torch.testing.assert_close(rows, other_rows, rtol=0, atol=1e-4)
    logits, other = (decode(model, c, r[-1], NEW) for c, r in ((cache, rows), (other_cache, other_rows)))
    torch.testing.assert_close(logits, other, rtol=0, atol=2e-5)
    assert rows.argmax(-1).tolist() == names_said(prompt)


@pytest.mark.parametrize("names", [3, 60, 962, 1923])
def test_no_two_names_look_alike(tmp_path: Path, names: int) -> None:
    write_recall_checkpoint(tmp_path, "glm5", vocab_size=2 * names, delta=10)
    codes = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"][:names, 64:128]
    dots = codes @ codes.T
    assert dots.diagonal().unique().tolist() == [64]
    assert dots.fill_diagonal_(0).abs().max() <= 32
    assert not dots[PAD].any()


@pytest.mark.parametrize("family", RECALL_FAMILIES)
def test_the_eps_of_the_latent_norms_does_not_show(tmp_path: Path, family: str) -> None:
    prompt = prompt_of(family, 300, 64)
    model = load(tmp_path, family, prompt)
    right = answer(model, prompt)
    norms = [module for name, module in model.named_modules() if name.endswith("_a_layernorm")]
    assert norms
    for norm in norms:
        norm.variance_epsilon = 1e-5
    torch.testing.assert_close(answer(model, prompt), right, rtol=0, atol=5e-5)


# ---- what it exposes ----


@pytest.mark.parametrize("rows", ["latent rows", "index keys"])
def test_every_page_past_two_delta_feeds_an_answer(tmp_path: Path, rows: str) -> None:
    prompt = prompt_of("glm52", 500, 32)
    model = load(tmp_path, "glm52", prompt)
    cache, logits = prefill(model, prompt.token_ids)
    walk = -(-len(links_of(prompt)) // 3)
    for start in range(-(-2 * prompt.delta // 32) * 32, 499, 32):
        hurt = copy.deepcopy(cache)
        for layer in hurt.layers:
            if rows == "latent rows":
                layer.keys[:, :, start : start + 32] = 0
            elif layer.is_indexer_initialized:
                layer.indexer_keys[:, start : start + 32] = 0
        said = decode(model, hurt, logits[-1], walk + 1)[1:].argmax(-1).tolist()
        assert said != list(prompt.answers[1 : walk + 1]), f"page at {start}"


@pytest.mark.parametrize(("family", "fault"), PLANTED)
def test_a_planted_fault_leaves_no_answer_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, fault: str
) -> None:
    check_planted(family, fault, 600, tmp_path, monkeypatch)


def test_half_an_answer_from_a_wrong_row_is_a_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer alone is wrong: it copies the second half of the name from where hop 2 looked."""
    prompt = prompt_of("glm52", 1000, 64, seed=5)
    model = load(tmp_path, "glm52", prompt)
    attention = dsa_module("glm52")[0].GlmMoeDsaAttention
    forward = attention.forward
    kept: list[Any] = [None]

    def faulty(self: Any, *args: Any, prev_topk_indices: Any = None, **kwargs: Any) -> Any:
        result = forward(self, *args, prev_topk_indices=kept[0] if self.layer_idx == 5 else prev_topk_indices, **kwargs)
        if self.layer_idx == 2:
            kept[0] = result[2]
        return result

    monkeypatch.setattr(attention, "forward", faulty)
    assert count_right(answer(model, prompt), prompt) == 0
