"""Models and references that several tests of one file share: each checkpoint is written, prepared and mapped once."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from covering import LONG, Case
from reference_checks import RuledOracle

from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.testing.checkpoints import Family, TinyShape, write_hot_checkpoint
from cpkv.testing.oracle import TransformersOracle
from cpkv.testing.reference import ReferenceModel, ReferenceResult

ModelMaker = Callable[..., tuple[Path, DsaModel]]
PromptMaker = Callable[..., list[int]]


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_rank() -> None:
    """Ranks are threads here; one compute thread each keeps them from fighting over the cores."""
    torch.set_num_threads(1)


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces of other processes on the machine are not ones that this test leaves behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def hot_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """A function that makes a hot model of a family, once per set of arguments: its folder, and the engine's model."""
    made: dict[tuple[object, ...], tuple[Path, DsaModel]] = {}

    def make(
        family: Family,
        dtype: torch.dtype,
        index_heads: int | None = None,
        shape: TinyShape | None = None,
        *,
        indexer_types: tuple[str, ...] | None = None,
    ) -> tuple[Path, DsaModel]:
        key = (family, dtype, index_heads, shape, indexer_types)
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            checkpoint = write_hot_checkpoint(
                folder / "checkpoint", family, index_heads=index_heads, shape=shape, indexer_types=indexer_types
            )
            prepared = folder / "weights.safetensors"
            prepare_weights(checkpoint, prepared, dtype)
            made[key] = checkpoint, DsaModel.load(read_config(checkpoint), prepared, 1e-6)
        return made[key]

    return make


@pytest.fixture(scope="session")
def prompt() -> PromptMaker:
    """A function that draws a prompt of some tokens by a seed; shorter prompts are prefixes of longer ones."""

    def draw(tokens: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(512) for _ in range(tokens)]

    return draw


@pytest.fixture(scope="module")
def reference_model() -> Callable[[Path], ReferenceModel]:
    """The float64 reference on a checkpoint, loaded once."""
    return lru_cache(maxsize=None)(ReferenceModel)


@pytest.fixture(scope="module")
def reference(hot_model: ModelMaker, prompt: PromptMaker) -> Callable[[Case], ReferenceResult]:
    """The float64 reference of a case. One run per family, heads and shape: shorter prompts are prefixes."""
    known: dict[tuple[object, ...], ReferenceResult] = {}

    def run(case: Case) -> ReferenceResult:
        key = (case.family, case.index_heads, case.shape)
        if key not in known:
            checkpoint, _ = hot_model(case.family, torch.float64, index_heads=case.index_heads, shape=case.shape)
            length = LONG if case.tokens == LONG else 701
            known[key] = ReferenceModel(checkpoint).forward(prompt(length), record_indices=True)
        full = known[key]
        width = min(full.indices[0].shape[1], case.tokens)
        indices = [layer[: case.tokens, layer.shape[1] - width :] for layer in full.indices]
        return ReferenceResult(full.logits[: case.tokens], indices)

    return run


@pytest.fixture(scope="module")
def oracle(hot_model: ModelMaker) -> Callable[..., RuledOracle]:
    """transformers in float32 on a hot model, loaded once; arguments as of `hot_model`, without the dtype."""
    known: dict[Path, RuledOracle] = {}

    def load(family: Family, index_heads: int, shape: TinyShape | None = None) -> RuledOracle:
        checkpoint, _ = hot_model(family, torch.float32, index_heads=index_heads, shape=shape)
        if checkpoint not in known:
            known[checkpoint] = RuledOracle(TransformersOracle(checkpoint))
        return known[checkpoint]

    return load
