"""Prefill, transfer and decode in this process, and what the tokens must be."""

from __future__ import annotations

from pathlib import Path

from cpkv.config import EngineSettings
from cpkv.engine.cluster import Cluster
from cpkv.engine.generation import GenerationResult, generate
from cpkv.engine.request import Request
from cpkv.testing.leaks import nothing_left_behind
from cpkv.testing.recall_model import write_recall_checkpoint
from cpkv.testing.recall_prompt import recall_delta, recall_prompt, recall_vocab_size
from cpkv.testing.reference import ReferenceModel


def settings_of(requests: list[Request], page_size: int, cp_size: int, **options: object) -> EngineSettings:
    """In-process settings with just enough pages for all prompts."""
    pages = sum(-(-len(request.token_ids) // page_size) for request in requests)
    return EngineSettings(
        num_pages=(-(-pages // cp_size) + 1) * cp_size,
        enable_cp_shared_kv=cp_size > 1,
        cp_size=cp_size,
        page_size=page_size,
        transfer="inprocess",
        **options,  # type: ignore[arg-type]
    )


def run(
    checkpoint: Path, settings: EngineSettings, requests: list[Request], *, compare: bool = True
) -> GenerationResult:
    """Generate through the shared pool and, with `compare`, through the replicated one: every bit must be equal."""
    tokens = sum(len(request.token_ids) + request.max_new_tokens for request in requests)
    decode_pages = 2 + len(requests) + tokens // settings.page_size
    with nothing_left_behind(), Cluster(settings, checkpoint, decode_pages=decode_pages, shuffle_seed=5) as cluster:
        shared = generate(cluster, requests, shared=settings.enable_cp_shared_kv)
        if compare:
            assert shared.same_bits(generate(cluster, requests, shared=False)), "shared and replicated differ in a bit"
    return shared


def check_against_reference(checkpoint: Path, requests: list[Request], result: GenerationResult) -> None:
    """Tokens equal and logits within 1e-9 of the float64 reference, which decodes by itself."""
    oracle = ReferenceModel(checkpoint)
    for request in requests:
        tokens, logits = oracle.generate(list(request.token_ids), request.max_new_tokens)
        assert result.tokens[request.request_id] == tokens
        difference = (result.logits[request.request_id] - logits[: request.max_new_tokens]).abs().max()
        assert float(difference) <= 1e-9


def check_recall(folder: Path, family: str, dtype: str, index_dtype: str, lengths: tuple[int, int]) -> None:
    """The recall model answers two prompts right, through either pool."""
    delta, vocab_size = recall_delta(family, min(lengths)), recall_vocab_size(family, max(lengths), 16)
    write_recall_checkpoint(folder, family, vocab_size=vocab_size, delta=delta)
    prompts = [recall_prompt(family, length, 16, 12, 3, vocab_size=vocab_size, delta=delta) for length in lengths]
    requests = [Request(f"r{i}", made.token_ids, 12) for i, made in enumerate(prompts) if made is not None]
    assert len(requests) == 2
    settings = settings_of(requests, 16, 3, chunk_size=max(lengths) * 3 // 8, dtype=dtype, index_dtype=index_dtype)
    result = run(folder, settings, requests)
    for request, made in zip(requests, prompts, strict=True):
        assert made is not None
        assert tuple(result.tokens[request.request_id]) == made.answers
