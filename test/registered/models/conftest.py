"""Models that several tests of one file share: each checkpoint is written, prepared and mapped once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.testing.checkpoints import Family, TinyShape, write_hot_checkpoint

ModelMaker = Callable[..., tuple[Path, DsaModel]]


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_rank() -> None:
    """Ranks are threads here; one compute thread each keeps them from fighting over the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def hot_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """A function that makes a hot model of a family, once per set of arguments: its folder, and the engine's model."""
    made: dict[tuple[object, ...], tuple[Path, DsaModel]] = {}

    def make(
        family: Family, dtype: torch.dtype, index_heads: int = 16, shape: TinyShape | None = None
    ) -> tuple[Path, DsaModel]:
        key = (family, dtype, index_heads, shape)
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            checkpoint = write_hot_checkpoint(folder / "checkpoint", family, index_heads=index_heads, shape=shape)
            prepared = folder / "weights.safetensors"
            prepare_weights(checkpoint, prepared, dtype)
            made[key] = checkpoint, DsaModel.load(read_config(checkpoint), prepared, 1e-6)
        return made[key]

    return make


@pytest.fixture(scope="session")
def prompt() -> Callable[[int, int], list[int]]:
    """A function that draws a prompt of some tokens by a seed; shorter prompts are prefixes of longer ones."""

    def draw(tokens: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(512) for _ in range(tokens)]

    return draw
