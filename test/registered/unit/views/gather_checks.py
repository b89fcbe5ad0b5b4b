"""What views gather and hold, by count, in any layout."""

from __future__ import annotations

from pathlib import Path

from view_ranks import EIGHT_LAYERS, FORMATS, SMALL, Prompt, ViewRanks, check_seen, make_geometry, make_prompts

from cpkv.config.names import ViewName
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.view_costs import ViewOptions

HISTORIES = [(0, 7), (5, 1), (17, 20), (33, 2)]
NO_HISTORY = [(0, 7), (0, 1), (0, 37)]
LONGEST = 37


def gathers_by_rule(geometry: PoolGeometry, scored: bool) -> list[str]:
    """Each layer's rows, then its index keys where it has an indexer and somebody scores."""
    labels = []
    for layer, slot in enumerate(geometry.slots):
        labels.append(f"latent pages {layer}")
        if slot >= 0 and scored:
            labels.append(f"index pages {layer}")
    return labels


def most_history_pages(prompts: list[Prompt], page_size: int, cp_size: int) -> tuple[int, int]:
    """Pages that hold history: of the owner with the most, and of all."""
    pages = {page for prompt in prompts for page in prompt.pages[: -(-prompt.history // page_size)]}
    return max(sum(page % cp_size == owner for page in pages) for owner in range(cp_size)), len(pages)


def check_order(view: ViewName, cp_size: int, prefetch: bool, topk: int) -> None:
    """All ranks start the same gathers in the order of the plan."""
    geometry = make_geometry(16, FORMATS[1], EIGHT_LAYERS)
    prompts = make_prompts(geometry, cp_size, HISTORIES)
    assert max(prompt.tokens for prompt in prompts) == LONGEST
    ranks = ViewRanks(geometry, cp_size, prompts, view, options=SMALL._replace(prefetch=prefetch), topk=topk)
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)
    pages, _ = most_history_pages(prompts, 16, cp_size)
    sizes = {"latent": (pages, 16 * geometry.row_format.latent_row_bytes), "index": (pages, geometry.index_block_bytes)}
    for comm in ranks.comms:
        gathers, others = comm.sequence, comm.prefetch.sequence
        if prefetch:
            gathers, others = others, gathers
        assert others == []
        assert gathers is not None
        assert [one.label for one in gathers] == gathers_by_rule(geometry, topk < LONGEST)
        assert [one.shape for one in gathers] == [sizes[one.label.split()[0]] for one in gathers]
        assert {(one.kind, one.dtype) for one in gathers} == {("all_gather", "torch.uint8")}


def check_bytes(view: ViewName, cp_size: int, page_size: int, prefetch: bool, topk: int) -> None:
    """The bytes moved are those of the planner, and of a count."""
    geometry = make_geometry(page_size, FORMATS[3], EIGHT_LAYERS)
    prompts = make_prompts(geometry, cp_size, HISTORIES)
    ranks = ViewRanks(geometry, cp_size, prompts, view, options=SMALL._replace(prefetch=prefetch), topk=topk)
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)
    cost = ranks.cost(ranks.plan(prompts))
    owners = ranks.placement.cp_size
    most, pages = most_history_pages(prompts, page_size, owners)
    page_bytes = geometry.page_bytes if topk < LONGEST else geometry.latent_page_bytes
    for counters in ranks.counters:
        assert counters.batches == {view: 1}
        assert counters.moved_bytes == cost.moved_bytes == owners * most * page_bytes
        assert counters.history_bytes == pages * page_bytes


def check_scratch(view: ViewName, lengths: list[tuple[int, int]], prefetch: bool, topk: int, folder: Path) -> None:
    """Scratch is allocated and counted as planned; of `unified` the tail is counted too, and lies in the pool."""
    if view == "current":
        lengths = [(0, sum(both)) for both in lengths]
    geometry = make_geometry(3, FORMATS[3], EIGHT_LAYERS)
    prompts = make_prompts(geometry, 4, lengths)
    ranks = ViewRanks(geometry, 4, prompts, view, folder=folder, options=ViewOptions(prefetch), topk=topk)
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)
    cost = ranks.cost(ranks.plan(prompts))
    tail = -(-cost.buffers.get("tail", 0) // 64) * 64
    assert bool(tail) is (view == "unified")
    for rank in range(4):
        assert ranks.counters[rank].scratch_bytes == cost.held_bytes
        assert ranks.scratches[rank].allocated_bytes == cost.held_bytes - tail
