"""One rank process of the benchmark on several cards: chunks through every view, bits first, then times."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import torch
from multi_gpu_forecast import Moves, foreign_share, without_tail
from multi_gpu_group import SECRET, Job, Rank, fill_history, median, open_pools, what_fits
from multi_gpu_link import measure_gather, probe_links
from multi_gpu_recall import check_recall
from paired_ratio import alternate, paired_ratio
from view_group import NO_PREFETCH, PAGE_SIZE, chunk_ids

from cpkv.comm.communicator import Communicator
from cpkv.config.settings import EngineSettings
from cpkv.engine.devices import model_kernels, take_device
from cpkv.engine.forward import BatchTrace
from cpkv.engine.rank_group import join_ranks
from cpkv.layout.placement import PagePlacement
from cpkv.layout.view_costs import BatchSizes
from cpkv.model.checkpoint import read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.views.counters import ViewCounters

# With mailboxes the rows that `blocked` asks for come by way of the host, slowly: a part of a chunk is compared.
BLOCKED_PART = 8
WITH_HISTORY = ("unified", "mixed", NO_PREFETCH, "full")
WITHOUT_HISTORY = ("current", "unified", "mixed", "full")


def run_rank(rank: int, job: Job) -> None:
    """A rank process from start to end; rank 0 writes `results.json`."""
    torch.set_num_threads(1)
    device = take_device(job.device, rank)
    comm = join_ranks(rank, job.cp_size, device, job.folder / "rendezvous", SECRET)
    try:
        results = measure_all(comm, device, job)
        if rank == 0:
            (job.folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
        comm.barrier("all is measured")
    finally:
        comm.close()


def measure_all(comm: Communicator, device: torch.device, job: Job) -> dict[str, Any]:
    """Bits and answers first: nothing is timed when they are wrong."""
    # Of what ranks are given, only what kernels depend on.
    settings = EngineSettings(num_pages=1, dtype="bfloat16", index_dtype="fp8", device=job.device, kernels="auto")
    model = DsaModel.load(read_config(job.folder / "checkpoint"), job.folder / "weights.safetensors", 1e-6, device)
    kernels = model_kernels(model.shape, settings, device)
    geometry = model.shape.geometry(PAGE_SIZE, job.latent_dtype, "fp8")
    fitting, skipped = what_fits(comm, model, geometry, job)
    ours = open_pools(comm, model, geometry, kernels, job, max((job.check_history, *fitting)))
    fill_history(ours)
    # What is there by now stays; to look it through for garbage would stop all ranks again and again.
    gc.collect()
    gc.freeze()
    ours.note(f"pools for {ours.pages} pages, kernels: {kernels.name}")
    results: dict[str, Any] = {
        "kernels": kernels.name,
        "skipped": skipped,
        "equal": check_views(ours),
        "recall": check_recall(comm, device, settings, job),
        "pools": pool_bytes(ours),
    }
    if all(results["equal"].values()) and all(right == asked for right, asked in results["recall"].values()):
        # The checks left rows of other chunks, and poison.
        fill_history(ours)
        results["links"] = probe_links(ours)._asdict()
        results["views"] = {
            str(history): measure_views(ours, history, shortest=fitting[:1] == [history]) for history in (0, *fitting)
        }
        results["gathers"] = {str(history): measure_gather(ours, history, job.rounds) for history in fitting}
    return results | {"seconds": time.time() - job.started}


def check_views(ours: Rank) -> dict[str, bool]:
    """By what is compared: on every rank logits, choices and stored rows are those of `replicated`."""
    equal = {}
    for start, tokens, views in compared(ours.job):
        expected = traced(ours, "replicated", start, tokens)
        for view in views:
            found = traced(ours, view, start, tokens)
            same = found.keys() == expected.keys()
            same = same and all(torch.equal(found[name], value) for name, value in expected.items())
            same = ours.everywhere(same, f"{view} is right")
            part = "" if tokens == ours.job.chunk else f", {tokens} tokens of a chunk"
            name = f"{view}, history {start}{part}"
            equal[name] = same
            ours.note(f"{name}: {'the' if same else 'NOT the'} bits of replicated")
    return equal


def compared(job: Job) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """Tokens of history, tokens of the chunk behind it, and the views that serve it."""
    blocked = job.chunk // BLOCKED_PART if job.link == "mailboxes" else job.chunk
    return (
        (0, job.chunk, WITHOUT_HISTORY),
        (job.check_history, job.chunk, WITH_HISTORY),
        (job.check_history, blocked, ("blocked",)),
    )


def traced(ours: Rank, view: str, history: int, tokens: int) -> dict[str, torch.Tensor]:
    """What a chunk leaves on this rank, on the CPU: logits, choices by layer, and its pages that the rank owns."""
    placement = PagePlacement(PAGE_SIZE, ours.comm.size)
    # A page with history in it keeps that; the others are poisoned, so that a row that is not written shows.
    written = range(-(-history // PAGE_SIZE), placement.pages_for(history + tokens))
    own = [page for page in written if page % placement.cp_size == ours.comm.rank]
    pool = ours.pool(view)
    local = [page + 1 if view == "replicated" else page // placement.cp_size + 1 for page in own]
    everything = local if view != "replicated" else [page + 1 for page in written]
    pool.poison(everything)
    trace = BatchTrace(want_logits=True, want_choices=True)
    ours.run(view, history, ours.scratch(), trace, chunk_ids(tokens))
    assert trace.logits is not None
    found = {"logits": trace.logits, "latent": pool.latent[local].cpu(), "index": pool.index[local].cpu()}
    return found | {f"choice {layer}": choice for layer, choice in trace.choices.items()}


def pool_bytes(ours: Rank) -> dict[str, dict[str, int]]:
    """What the pools really hold, and the formula's bytes."""
    pools = {"shared": ours.shared, "replicated": ours.replicated}
    return {
        name: {"allocated": pool.allocated_bytes, "formula": ours.geometry.pool_bytes(pool.local_pages)}
        for name, pool in pools.items()
    }


def measure_views(ours: Rank, history: int, *, shortest: bool) -> dict[str, Any]:
    """Every view that serves this history, against `replicated`.

    `blocked` at the shortest history alone, and only where what it asks for need not come by way of the host.
    """
    if not history:
        return {"current": compare(ours, "current", 0, ours.job.rounds)}
    results = {view: compare(ours, view, history, ours.job.rounds) for view in ("unified", "mixed", NO_PREFETCH)}
    for view in ("full", "blocked") if shortest and ours.job.link != "mailboxes" else ("full",):
        results[view] = compare(ours, view, history, ours.job.other_rounds)
    return results


def compare(ours: Rank, view: str, history: int, rounds: int) -> dict[str, Any]:
    """One view and `replicated` in turn: times, bytes, and whether the last logits are the same each time."""
    scratches = {name: ours.scratch() for name in (view, "replicated")}
    expected, _, _ = ours.run("replicated", history, scratches["replicated"])
    equal, cost = True, ViewCounters()

    def once(name: str) -> float:
        nonlocal equal, cost
        result, seconds, counters = ours.run(name, history, scratches[name])
        equal &= all(torch.equal(result.last_logits[key], value) for key, value in expected.last_logits.items())
        cost = counters if name == view else cost
        return seconds

    for name in (view, "replicated"):
        once(name)
    mine, theirs = alternate(lambda: once(view), lambda: once("replicated"), rounds)
    ratio = paired_ratio(mine, theirs)
    ours.note(f"{view}, history {history}: {ratio.middle:.3f} of replicated ({ratio.low:.3f} to {ratio.high:.3f})")
    plan, costs = ours.plan(view, history), ours.costs(view)
    sizes = BatchSizes.of(plan, costs.options)
    planned = costs.cost(plan.spec.view, sizes)
    foreign = foreign_share(ours.job.cp_size, ours.job.cards)
    return {
        "seconds": median(mine),
        "replicated_seconds": median(theirs),
        "ratio": ratio._asdict(),
        "equal": ours.everywhere(equal, "equal"),
        "moved_bytes": cost.moved_bytes,
        "planned_bytes": planned.moved_bytes,
        "held_bytes": cost.scratch_bytes,
        "planned_held_bytes": planned.held_bytes,
        "scratch_bytes": scratches[view].allocated_bytes,
        "planned_scratch_bytes": without_tail(planned),
        "moves": Moves.of(view, costs, sizes, cost.moved_bytes, foreign=foreign, piece=ours.job.piece_bytes)._asdict(),
    }
