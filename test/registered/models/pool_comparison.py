"""Runs the same plans through a shared and a replicated pool, in one process, and compares every bit."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from reference_checks import assert_same_collectives, pages_of

from cpkv.config.names import IndexDtype, LatentDtype, SplitStrategy
from cpkv.layout.plan import BatchSpec
from cpkv.model.dsa_model import DsaModel
from cpkv.pool.page_pool import POISON_BYTE
from cpkv.testing.bits import StoredRequest, assert_same_bits, assert_same_rows
from cpkv.testing.ranks import PrefillTrace, ThreadedRanks


class PoolRun(NamedTuple):
    """Ranks after a prefill, their pages still allocated, and what they computed."""

    ranks: ThreadedRanks
    trace: PrefillTrace


def run_pool(
    model: DsaModel,
    prompts: dict[str, list[int]],
    *,
    shared: bool,
    dtype: LatentDtype,
    index_dtype: IndexDtype,
    page_size: int,
    cp_size: int,
    chunk_size: int,
    strategy: SplitStrategy,
    current_reuse: bool = True,
) -> PoolRun:
    """Prefill through one kind of pool, poisoned and with shuffled pages; the ranks' collectives must be equal."""
    lengths = [len(ids) for ids in prompts.values()]
    ranks = ThreadedRanks(
        model,
        model.shape.geometry(page_size, dtype, index_dtype),
        cp_size=cp_size,
        shared=shared,
        num_pages=pages_of(lengths, page_size, cp_size if shared else 1),
    )
    trace = ranks.prefill(prompts, chunk_size=chunk_size, strategy=strategy, current_reuse=current_reuse)
    assert_same_collectives(ranks)
    return PoolRun(ranks, trace)


def check_same_bits(
    model: DsaModel,
    prompts: dict[str, list[int]],
    *,
    dtype: LatentDtype,
    index_dtype: IndexDtype,
    page_size: int,
    cp_size: int,
    chunk_size: int,
    strategy: SplitStrategy,
    current_reuse: bool = True,
) -> tuple[PoolRun, PoolRun]:
    """Run both kinds of pool and compare everything; returns the shared and the replicated run.

    In the order in which a fault spreads: plans, stored bytes, choices by layer, logits.
    """
    shared, replicated = (
        run_pool(
            model,
            prompts,
            shared=is_shared,
            dtype=dtype,
            index_dtype=index_dtype,
            page_size=page_size,
            cp_size=cp_size,
            chunk_size=chunk_size,
            strategy=strategy,
            current_reuse=current_reuse,
        )
        for is_shared in (True, False)
    )
    assert plan_of(shared.trace.specs) == plan_of(replicated.trace.specs), "the two runs did not have the same plans"
    for name in prompts:
        check_same_pages(shared, replicated, name)
        for layer, chosen in shared.trace.choices[name].items():
            assert_same_bits(chosen, replicated.trace.choices[name][layer], f"choice of {name} in layer {layer}")
        assert_same_bits(shared.trace.logits[name], replicated.trace.logits[name], f"logits of {name}")
        assert not shared.trace.logits[name].isnan().any(), f"logits of {name} hold NaN"
        assert_same_bits(shared.trace.last_logits[name], replicated.trace.last_logits[name], f"last logits of {name}")
    check_nothing_else_written(shared)
    check_nothing_else_written(replicated)
    return shared, replicated


def plan_of(specs: list[BatchSpec]) -> list[object]:
    """What two runs of the same plans have in common: all but the page numbers and the view."""
    return [
        (spec.batch_number, spec.strategy, [(s.request_id, s.start, s.token_ids, s.is_last) for s in spec.segments])
        for spec in specs
    ]


def check_same_pages(shared: PoolRun, replicated: PoolRun, name: str) -> None:
    """A request's pages, whole, from the rank that owns each, against every replica.

    Behind the last token both hold the poison that nobody wrote over.
    """
    ours = stored_request(shared, name)
    latent, index = owners_pages(ours)
    copies = list(replicated.trace.pages[name])
    for rank, replica in enumerate(replicated.ranks.pools):
        what = f"stored rows of {name}, owners against the replica of rank {rank}"
        if not (torch.equal(latent, replica.latent[copies]) and torch.equal(index, replica.index[copies])):
            assert_same_rows(ours, replace(stored_request(replicated, name), pools=[replica]), what)
        assert_same_bits(latent, replica.latent[copies], f"{what} [page position, layer, row, byte]")
        assert_same_bits(index, replica.index[copies], f"{what} [page position, index slot, byte]")


def stored_request(run: PoolRun, name: str) -> StoredRequest:
    """A request's rows in the pools of a run."""
    return StoredRequest(run.ranks.pools, run.ranks.placement, run.trace.pages[name], len(run.trace.logits[name]))


def owners_pages(request: StoredRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole pages by position, each from its owner: latent [pages, layers, page_size, row] and index keys."""
    placement = request.placement
    places = [(request.pools[placement.owner(page)], placement.local_page(page)) for page in request.pages]
    latent = torch.stack([pool.latent[local_page] for pool, local_page in places])
    return latent, torch.stack([pool.index[local_page] for pool, local_page in places])


def check_nothing_else_written(run: PoolRun) -> None:
    """Each rank wrote its own pages of the requests, and no other byte: trash and foreign pages are still poisoned."""
    placement = run.ranks.placement
    pages = [page for held in run.trace.pages.values() for page in held]
    for rank, pool in enumerate(run.ranks.pools):
        foreign = torch.ones(pool.local_pages, dtype=torch.bool)
        foreign[[placement.local_page(p) for p in pages if placement.cp_size == 1 or placement.owner(p) == rank]] = (
            False
        )
        for what, memory in (("latent rows", pool.latent), ("index keys", pool.index)):
            written = (memory[foreign] != POISON_BYTE).flatten(1).any(dim=1)
            wrong = foreign.nonzero().flatten()[written].tolist()
            assert not wrong, f"rank {rank} wrote {what} of local pages {wrong}, which hold no request"
