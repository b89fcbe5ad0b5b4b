"""Prefills that hypothesis draws, and what each must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from pool_comparison import FORMATS, VIEW_KINDS, check_same_bits
from reference_checks import assert_same_collectives, check_float64, pages_of
from view_cases import FAMILIES, SMALL, SPLITS

from cpkv.config.names import LatentDtype, SplitStrategy
from cpkv.model.dsa_model import DsaModel
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.testing.checkpoints import Family
from cpkv.testing.ranks import PrefillTrace, ThreadedRanks


class RandomBatch(NamedTuple):
    """Requests of at most 300 tokens in all, and how they are prefilled."""

    prompts: dict[str, list[int]]
    page_size: int
    cp_size: int
    chunk_size: int
    strategy: SplitStrategy

    @classmethod
    def draw(cls, data: st.DataObject, prompt: Callable, *, ranks: int, page_sizes: Sequence[int]) -> RandomBatch:
        """Up to three requests in up to twelve batches, on up to `ranks` ranks."""
        lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=3), "lengths")
        return cls(
            {f"r{i}": prompt(length, i) for i, length in enumerate(lengths)},
            data.draw(st.sampled_from(page_sizes), "page_size"),
            data.draw(st.integers(1, ranks), "cp_size"),
            -(-sum(lengths) // data.draw(st.integers(1, 12), "batches")),
            data.draw(st.sampled_from(SPLITS), "strategy"),
        )

    def prefill(self, data: st.DataObject, model: DsaModel, dtype: LatentDtype) -> PrefillTrace:
        """Through either pool, with and without the reuse of current rows."""
        ranks = ThreadedRanks(
            model,
            model.shape.geometry(self.page_size, dtype, dtype),
            cp_size=self.cp_size,
            shared=data.draw(st.booleans(), "shared"),
            num_pages=pages_of([len(ids) for ids in self.prompts.values()], self.page_size, self.cp_size),
        )
        trace = ranks.prefill(
            self.prompts,
            chunk_size=self.chunk_size,
            strategy=self.strategy,
            current_reuse=data.draw(st.booleans(), "current_reuse"),
        )
        assert_same_collectives(ranks)
        return trace


def check_served_formats(data: st.DataObject, hot_model: Callable, prompt: Callable) -> None:
    """Shared equals replicated in every stored format, with few heads: ties, which float64 would decide otherwise."""
    model_dtype, dtype, index_dtype = data.draw(st.sampled_from(FORMATS), "formats")
    family = data.draw(st.sampled_from(FAMILIES), "family")
    _, model = hot_model(family, torch_dtype(model_dtype), 4, SMALL)
    batch = RandomBatch.draw(data, prompt, ranks=8, page_sizes=(1, 3, 16, 64))
    kind = data.draw(st.sampled_from(VIEW_KINDS), "view")
    check_same_bits(model, dtype=dtype, index_dtype=index_dtype, kind=kind, **batch._asdict())


def check_both_pools_and_reference(
    data: st.DataObject, family: Family, hot_model: Callable, prompt: Callable, reference_model: Callable
) -> None:
    """float64: both pools to the bit, and the reference within 1e-9."""
    checkpoint, model = hot_model(family, torch.float64, data.draw(st.sampled_from((1, 4, 16)), "heads"), SMALL)
    batch = RandomBatch.draw(data, prompt, ranks=8, page_sizes=(1, 3, 16, 64))
    kind = data.draw(st.sampled_from(VIEW_KINDS), "view")
    shared, _ = check_same_bits(model, dtype="float64", index_dtype="float64", kind=kind, **batch._asdict())
    for name, ids in batch.prompts.items():
        check_float64(shared.trace, name, reference_model(checkpoint).forward(ids, record_indices=True))


def check_either_pool_and_reference(
    data: st.DataObject, family: Family, hot_model: Callable, prompt: Callable, reference_model: Callable
) -> None:
    """float64 with few index heads (ties): either pool, within 1e-9 of the reference."""
    heads = data.draw(st.sampled_from((1, 4)), "heads")
    checkpoint, model = hot_model(family, torch.float64, heads, SMALL)
    batch = RandomBatch.draw(data, prompt, ranks=4, page_sizes=(1, 3, 16))
    ours = batch.prefill(data, model, "float64")
    for name, ids in batch.prompts.items():
        check_float64(ours, name, reference_model(checkpoint).forward(ids, record_indices=True))


def check_either_pool_and_transformers(
    data: st.DataObject, family: Family, hot_model: Callable, prompt: Callable, oracle: Callable
) -> None:
    """float32: either pool, against transformers by the rule for choices."""
    heads = data.draw(st.sampled_from((4, 16)), "heads")
    _, model = hot_model(family, torch.float32, heads, SMALL)
    batch = RandomBatch.draw(data, prompt, ranks=4, page_sizes=(1, 3, 16))
    ours = batch.prefill(data, model, "float32")
    for name, ids in batch.prompts.items():
        oracle(family, heads, SMALL).check(ours, name, ids, sets_equal=False)
