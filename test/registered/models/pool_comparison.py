"""Runs the same plans through a shared and a replicated pool, in one process, and compares every bit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from reference_checks import assert_same_collectives, pages_of

from cpkv.config.names import IndexDtype, KvView, LatentDtype, SplitStrategy
from cpkv.layout.plan import BatchSpec
from cpkv.layout.view_costs import TAIL, ViewOptions, aligned
from cpkv.model.dsa_model import DsaModel
from cpkv.ops.kernels import Kernels
from cpkv.pool.page_pool import POISON_BYTE
from cpkv.testing.bits import StoredRequest, assert_same_bits, assert_same_rows
from cpkv.testing.ranks import PrefillTrace, ThreadedRanks


class ViewKind(NamedTuple):
    """One way to read a shared pool. Buffers of `blocked` are small, so that it takes several of each.

    Attributes:
        view: as it is forced.
        current_reuse: batches without history may read their own rows.
        prefetch: histories are gathered a layer ahead.
        one_range: the ranks share the memory of their pools.
    """

    view: KvView = "auto"
    current_reuse: bool = True
    prefetch: bool = True
    one_range: bool = False

    @property
    def options(self) -> ViewOptions:
        """How views work."""
        return ViewOptions(prefetch=self.prefetch, key_block_tokens=512, round_bytes=20_000)

    def __str__(self) -> str:
        """For test ids and messages."""
        parts = ("" if self.current_reuse else " without reuse", "" if self.prefetch else " without prefetch")
        return "".join((self.view, *parts, " in one range" if self.one_range else ""))


MIXED, FULL, BLOCKED = ViewKind("mixed"), ViewKind("full"), ViewKind("blocked")
UNIFIED = ViewKind("unified", one_range=True)
VIEW_KINDS = (
    ViewKind(),
    ViewKind(current_reuse=False),
    ViewKind(one_range=True),
    MIXED,
    MIXED._replace(prefetch=False),
    FULL,
    FULL._replace(prefetch=False),
    UNIFIED,
    BLOCKED,
)
# Of the model, its latent rows and its index keys.
FORMATS: tuple[tuple[str, LatentDtype, IndexDtype], ...] = (
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float32", "float32", "fp8"),
    ("bfloat16", "bfloat16", "fp8"),
    ("float32", "fp8", "float32"),
    ("float32", "fp8", "fp8"),
    ("bfloat16", "fp8", "bfloat16"),
    ("bfloat16", "fp8", "fp8"),
)


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
    kind: ViewKind = VIEW_KINDS[0],
    kernels: Kernels | None = None,
) -> PoolRun:
    """Prefill through one kind of pool, poisoned and with shuffled pages; the ranks' collectives must be equal."""
    lengths = [len(ids) for ids in prompts.values()]
    with ExitStack() as stack:
        # Descriptors are passed while the pools are opened; then nothing needs the folder.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if shared and kind.one_range else None
        ranks = ThreadedRanks(
            model,
            model.shape.geometry(page_size, dtype, index_dtype),
            cp_size=cp_size,
            shared=shared,
            num_pages=pages_of(lengths, page_size, cp_size if shared else 1),
            unified=folder,
            options=kind.options,
            kernels=kernels,
        )
    trace = ranks.prefill(
        prompts,
        chunk_size=chunk_size,
        strategy=strategy,
        current_reuse=kind.current_reuse,
        view=kind.view if shared else "auto",
    )
    assert_same_collectives(ranks)
    check_costs(ranks, trace)
    return PoolRun(ranks, trace)


def check_costs(ranks: ThreadedRanks, trace: PrefillTrace) -> None:
    """The planner knew what every batch would move and hold."""
    held = max(cost.held_bytes for cost in trace.costs)
    # The tail lies behind the ranks' pools and not in the scratch.
    in_scratch = max(cost.held_bytes - aligned(cost.buffers.get(TAIL, 0)) for cost in trace.costs)
    moved = sum(cost.moved_bytes for cost in trace.costs)
    for rank, counters in enumerate(ranks.counters):
        if "blocked" in counters.batches:
            assert counters.moved_bytes <= moved, f"rank {rank} moved {counters.moved_bytes} of {moved} bytes at most"
        else:
            assert counters.moved_bytes == moved, f"rank {rank} moved {counters.moved_bytes} bytes, planned {moved}"
        assert counters.history_bytes <= counters.moved_bytes
        assert counters.scratch_bytes == held, f"rank {rank} held {counters.scratch_bytes} bytes, planned {held}"
        assert ranks.scratches[rank].allocated_bytes == in_scratch


def check_views(
    model: DsaModel,
    prompts: dict[str, list[int]],
    kinds: Sequence[ViewKind] = VIEW_KINDS,
    *,
    dtype: LatentDtype,
    index_dtype: IndexDtype,
    page_size: int,
    cp_size: int,
    chunk_size: int,
    strategy: SplitStrategy,
    kernels: Kernels | None = None,
) -> tuple[list[PoolRun], PoolRun]:
    """Run a replicated pool once and a shared one through each view, and compare everything.

    Returns:
        The shared runs, in the order of `kinds`, and the replicated one.
    """

    def run(shared: bool, kind: ViewKind) -> PoolRun:
        return run_pool(
            model,
            prompts,
            shared=shared,
            dtype=dtype,
            index_dtype=index_dtype,
            page_size=page_size,
            cp_size=cp_size,
            chunk_size=chunk_size,
            strategy=strategy,
            kind=kind,
            kernels=kernels,
        )

    replicated = run(False, VIEW_KINDS[0])
    check_nothing_else_written(replicated)
    runs = []
    for kind in kinds:
        runs.append(run(True, kind))
        compare_runs(runs[-1], replicated, str(kind))
    return runs, replicated


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
    kind: ViewKind = VIEW_KINDS[0],
) -> tuple[PoolRun, PoolRun]:
    """`check_views` of one view: the shared and the replicated run."""
    runs, replicated = check_views(
        model,
        prompts,
        (kind,),
        dtype=dtype,
        index_dtype=index_dtype,
        page_size=page_size,
        cp_size=cp_size,
        chunk_size=chunk_size,
        strategy=strategy,
    )
    return runs[0], replicated


def compare_runs(shared: PoolRun, replicated: PoolRun, what: str) -> None:
    """In the order in which a fault spreads: plans, stored bytes, choices by layer, logits."""
    assert plan_of(shared.trace.specs) == plan_of(replicated.trace.specs), "the two runs did not have the same plans"
    ours, theirs = shared.trace, replicated.trace
    for name in theirs.logits:
        check_same_pages(shared, replicated, name)
        assert list(ours.choices[name]) == list(theirs.choices[name])
        for layer, chosen in ours.choices[name].items():
            assert_same_bits(chosen, theirs.choices[name][layer], f"{what}: choice of {name} in layer {layer}")
        assert_same_bits(ours.logits[name], theirs.logits[name], f"{what}: logits of {name}")
        assert not ours.logits[name].isnan().any(), f"{what}: logits of {name} hold NaN"
        assert_same_bits(ours.last_logits[name], theirs.last_logits[name], f"{what}: last logits of {name}")
    check_nothing_else_written(shared)


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
            written = (memory[foreign] != POISON_BYTE).flatten(1).any(dim=1).cpu()
            wrong = foreign.nonzero().flatten()[written].tolist()
            assert not wrong, f"rank {rank} wrote {what} of local pages {wrong}, which hold no request"
