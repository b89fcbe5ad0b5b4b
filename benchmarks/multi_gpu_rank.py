"""One rank process of the benchmark on several cards: chunks through every view, bits first, then times."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import torch
from multi_gpu_forecast import NO_PREFETCH, foreign_share, link_bytes, without_tail
from multi_gpu_group import PAGE_SIZE, SECRET, Job, Rank, fill_history, median, open_pools, what_fits
from multi_gpu_link import measure_gather, probe_link
from paired_ratio import alternate, paired_ratio

from cpkv.comm.communicator import Communicator
from cpkv.config.settings import EngineSettings
from cpkv.engine.devices import model_kernels, take_device
from cpkv.engine.forward import BatchTrace
from cpkv.engine.rank_group import join_ranks
from cpkv.layout.placement import PagePlacement
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.view_costs import BatchSizes
from cpkv.model.checkpoint import read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.views.counters import ViewCounters

# It ends inside a page, and it holds more rows than `blocked` has room for.
CHECK_HISTORY = 20_000
# Of what the ranks are given, only what kernels depend on.
SETTINGS = EngineSettings(num_pages=1, dtype="bfloat16", index_dtype="fp8", device="cuda", kernels="auto")
WITH_HISTORY = ("unified", "mixed", NO_PREFETCH, "full", "blocked")
WITHOUT_HISTORY = ("current", "unified", "mixed", "full")


def run_rank(rank: int, job: Job) -> None:
    """A rank process from start to end; rank 0 writes `results.json`."""
    torch.set_num_threads(1)
    device = take_device("cuda", rank)
    comm = join_ranks(rank, job.cp_size, device, job.folder / "rendezvous", SECRET)
    try:
        results = measure_all(comm, device, job)
        if rank == 0:
            (job.folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
        comm.barrier("all is measured")
    finally:
        comm.close()


def measure_all(comm: Communicator, device: torch.device, job: Job) -> dict[str, Any]:
    """Bits first: nothing is timed when they differ."""
    model = DsaModel.load(read_config(job.folder / "checkpoint"), job.folder / "weights.safetensors", 1e-6, device)
    kernels = model_kernels(model.shape, SETTINGS, device)
    geometry = model.shape.geometry(PAGE_SIZE, job.latent_dtype, "fp8")
    fitting, skipped = what_fits(comm, model, geometry, job)
    ours = open_pools(comm, model, geometry, kernels, job, max((CHECK_HISTORY, *fitting)))
    fill_history(ours)
    # What is there by now stays; to look it through for garbage would stop all ranks again and again.
    gc.collect()
    gc.freeze()
    ours.note(f"pools for {ours.pages} pages, kernels: {kernels.name}")
    results: dict[str, Any] = {
        "kernels": kernels.name,
        "skipped": skipped,
        "equal": check_views(ours),
        "pools": pool_bytes(ours),
    }
    if all(results["equal"].values()):
        # The checks left rows of other chunks, and poison.
        fill_history(ours)
        results["probe"] = probe_link(ours)
        results["views"] = {
            str(history): measure_views(ours, history, blocked=fitting[:1] == [history]) for history in (0, *fitting)
        }
        results["gathers"] = {str(history): measure_gather(ours, history, job.rounds) for history in fitting}
    return results | {"seconds": time.time() - job.started}


def check_views(ours: Rank) -> dict[str, bool]:
    """By view and history: on every rank the logits, choices and stored rows of a chunk are those of `replicated`."""
    equal = {}
    for history, views in ((0, WITHOUT_HISTORY), (CHECK_HISTORY, WITH_HISTORY)):
        expected = traced(ours, "replicated", history)
        for view in views:
            found = traced(ours, view, history)
            same = found.keys() == expected.keys()
            same = same and all(torch.equal(found[name], value) for name, value in expected.items())
            everywhere = ours.comm.all_gather(torch.tensor([same]), f"{view} is right")
            equal[f"{view}, history {history}"] = bool(everywhere.all())
            ours.note(f"{view}, history {history}: {'the' if everywhere.all() else 'NOT the'} bits of replicated")
    return equal


def traced(ours: Rank, view: str, history: int) -> dict[str, torch.Tensor]:
    """What a chunk leaves on this rank, on the CPU: logits, choices by layer, and its pages that the rank owns."""
    placement = PagePlacement(PAGE_SIZE, ours.comm.size)
    # A page with history in it keeps that; the others are poisoned, so that a row that is not written shows.
    written = range(-(-history // PAGE_SIZE), placement.pages_for(history + ours.job.chunk))
    own = [page for page in written if page % placement.cp_size == ours.comm.rank]
    pool = ours.pool(view)
    local = [page + 1 if view == "replicated" else page // placement.cp_size + 1 for page in own]
    everything = local if view != "replicated" else [page + 1 for page in written]
    pool.poison(everything)
    trace = BatchTrace(want_logits=True, want_choices=True)
    ours.run(view, history, ours.scratch(), trace)
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


def measure_views(ours: Rank, history: int, *, blocked: bool) -> dict[str, Any]:
    """Every view that serves this history, against `replicated`."""
    if not history:
        return {"current": compare(ours, "current", 0, ours.job.rounds)}
    results = {view: compare(ours, view, history, ours.job.rounds) for view in ("unified", "mixed", NO_PREFETCH)}
    for view in ("full", "blocked") if blocked else ("full",):
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
    return {
        "seconds": median(mine),
        "replicated_seconds": median(theirs),
        "ratio": ratio._asdict(),
        "equal": bool(ours.comm.all_gather(torch.tensor([equal]), "equal").all()),
        "moved_bytes": cost.moved_bytes,
        "planned_bytes": planned.moved_bytes,
        "held_bytes": cost.scratch_bytes,
        "planned_held_bytes": planned.held_bytes,
        "scratch_bytes": scratches[view].allocated_bytes,
        "planned_scratch_bytes": without_tail(planned),
        "link_bytes": link_bytes(view, costs, sizes, cost.moved_bytes, foreign_share(ours.job.cp_size, ours.job.cards)),
        "first_layer": first_layer_share(ours.geometry),
    }


def first_layer_share(geometry: PoolGeometry) -> float:
    """Of the bytes that a gather of all layers moves, those of the first layer."""
    latent = geometry.latent_page_bytes // geometry.num_layers
    return (latent + geometry.index_block_bytes) / geometry.page_bytes
