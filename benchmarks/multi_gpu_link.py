"""The links between ranks: a probe of them, and the page gather of `mixed` against what it consists of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from multi_gpu_forecast import Links
from multi_gpu_group import PIECE_BYTES, Rank, median
from paired_ratio import alternate, paired_ratio

from cpkv.layout.view_costs import ViewOptions
from cpkv.views.counters import ViewCounters
from cpkv.views.factory import open_view
from cpkv.views.gathered import MixedView
from cpkv.views.view import ViewContext

PROBE_BYTES = 256 << 20
# A rank's part of an all-gather that is nearly a meeting alone.
FEW_BYTES = 4 << 10
PROBE_ROUNDS = 10
PROBE_TRIES = 4


def segment(ours: Rank, owner: int) -> torch.Tensor:
    """The latent rows of a rank as this one sees them, uint8 [bytes]."""
    rows = ours.shared.segment_rows
    return ours.shared.all_latent_rows(0)[owner * rows : (owner + 1) * rows].flatten()


def probe_links(ours: Rank) -> Links:
    """Every rank at once copies memory of the next rank, and of its own; then all gather, much and little.

    Raises:
        SystemExit: see `probe_gather`.
    """
    meeting, gather = probe_gather(ours)
    links = Links(
        read=_copy_rate(ours, (ours.comm.rank + 1) % ours.comm.size),
        own=_copy_rate(ours, ours.comm.rank),
        gather=gather,
        meeting=meeting,
    )
    ours.note(
        f"links: {links.read / 1e9:.0f} GB/s from the next rank, {links.own / 1e9:.0f} own, {links.gather / 1e9:.0f} "
        f"gathered, {links.meeting * 1e6:.0f} us to meet"
    )
    return links


def probe_gather(ours: Rank) -> tuple[float, float]:
    """Seconds of an all-gather of hardly anything, and bytes per second that more of them arrive at.

    Raises:
        SystemExit: noise hides what the bytes take, several times in a row. Ranks see the same times, and all end.
    """
    # As much as mailboxes move at once.
    part = min(PIECE_BYTES, ours.job.least_bytes)
    for _ in range(PROBE_TRIES):
        few, much = (_gather_seconds(ours, size) for size in (FEW_BYTES, part))
        if much > few:
            return few, (ours.comm.size - 1) * (part - FEW_BYTES) / (much - few)
    raise SystemExit(
        f"an all-gather of {part} bytes a rank took {much * 1e6:.0f} us and one of {FEW_BYTES} took {few * 1e6:.0f}, "
        f"the last of {PROBE_TRIES} tries like this: there is no rate to forecast by; run again on an idle machine"
    )


def _copy_rate(ours: Rank, owner: int) -> float:
    source = segment(ours, owner)[: min(PROBE_BYTES, ours.job.least_bytes)]
    target = torch.empty_like(source)
    copies = max(1, ours.job.least_bytes // len(source))
    return len(source) / _median_seconds(ours, partial(target.copy_, source), copies)


def _gather_seconds(ours: Rank, part_bytes: int) -> float:
    out = torch.empty(ours.comm.size, part_bytes, dtype=torch.uint8, device=ours.shared.device)
    gather = partial(ours.comm.all_gather, out[ours.comm.rank], "probe", out=out)
    return _median_seconds(ours, gather, max(1, min(32, ours.job.least_bytes // out.numel())))


def _median_seconds(ours: Rank, work: Callable[[], Any], times: int) -> float:
    run = repeated(work, times)
    ours.timed(run)
    return median([ours.timed(run)[0] for _ in range(PROBE_ROUNDS)]) / times


def repeated(work: Callable[[], Any], times: int) -> Callable[[], None]:
    """The same several times."""

    def run() -> None:
        for _ in range(times):
            work()

    return run


def measure_gather(ours: Rank, history: int, rounds: int) -> dict[str, Any]:
    """All layers' history, nothing computed: gathered, all-gathered bare, and read by each rank with plain copies.

    Rates are of the bytes that come to a rank from the others.
    """
    options = ViewOptions(prefetch=False)
    costs = ours.model.shape.view_costs(ours.geometry, ours.model.compute_dtype.itemsize, options)
    view = open_view(
        ours.plan("mixed", history), ViewContext(ours.shared, ours.comm, costs, ours.scratch(), ViewCounters())
    )
    assert isinstance(view, MixedView)
    geometry, comm = ours.geometry, ours.comm
    blocks = [geometry.latent_page_bytes // geometry.num_layers] * geometry.num_layers
    blocks += [geometry.index_block_bytes] * geometry.num_slots
    sizes = [view.plan.history.max_pages * block for block in blocks]
    out = torch.empty(comm.size * max(sizes), dtype=torch.uint8, device=ours.shared.device)
    others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
    segments = {owner: segment(ours, owner) for owner in others}

    def gather() -> None:
        for layer in range(geometry.num_layers):
            view.gather.open_layer(layer)

    def all_gather() -> None:
        for size in sizes:
            target = out[: comm.size * size].view(comm.size, size)
            comm.all_gather(target[comm.rank], "bare", out=target)

    def peer_copy() -> None:
        for size in sizes:
            target = out[: comm.size * size].view(comm.size, size)
            for owner in others:
                target[owner].copy_(segments[owner][:size])

    times = max(1, ours.job.least_bytes // sum(sizes))

    def seconds(work: Callable[[], None]) -> float:
        return ours.timed(repeated(work, times))[0] / times

    arriving = (comm.size - 1) * sum(sizes)
    results: dict[str, Any] = {"bytes": arriving}
    for work in (gather, all_gather, peer_copy):
        seconds(work)
    for name, other in (("all-gather", all_gather), ("peer copy", peer_copy)):
        ours_seconds, theirs = alternate(lambda: seconds(gather), lambda other=other: seconds(other), rounds)
        results[name] = {
            "bytes_per_second": arriving / median(theirs),
            # Of rates, so the other's time comes first.
            "rate_ratio": paired_ratio(theirs, ours_seconds)._asdict(),
        }
        results["seconds"] = median(ours_seconds)
    view.close()
    ours.note(f"gather of {history} tokens: {arriving / results['seconds'] / 1e9:.0f} GB/s")
    return results | {"bytes_per_second": arriving / results["seconds"]}
