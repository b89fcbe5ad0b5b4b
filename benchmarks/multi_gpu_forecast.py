"""What a chunk should take by the bytes that cross the link, from the planner's numbers and a probe of the link alone.

current               replicated
unified               replicated + bytes read in other cards' memory / rate
mixed, full           the first layer's gather + the longer of: replicated, the other layers' gathers
mixed, no prefetch    replicated + gathered bytes of other ranks / rate
blocked               replicated + fetched bytes of other ranks / rate
"""

from __future__ import annotations

from cpkv.layout.view_costs import TAIL, BatchSizes, ViewCost, ViewCosts, aligned

NO_PREFETCH = "mixed, no prefetch"
AHEAD = ("mixed", "full")


def foreign_share(cp_size: int, cards: int) -> float:
    """Of evenly spread pages, those in the memory of other cards; ranks take the cards in turn."""
    on_card = -(-cp_size // cards)
    return 1 - on_card / cp_size


def link_bytes(view: str, costs: ViewCosts, sizes: BatchSizes, moved_bytes: int, foreign: float) -> float:
    """Bytes that come to the fullest rank from elsewhere.

    Args:
        view: its name.
        costs: of the pool.
        sizes: of the batch.
        moved_bytes: that gathers brought to a rank, its own included.
        foreign: share of the pages in the memory of other cards.
    """
    if view != "unified":
        return moved_bytes * (1 - 1 / sizes.cp_size)
    geometry, end = costs.geometry, max(sizes.request_tokens)
    history = end - sizes.tokens
    # Chosen keys are spread evenly over the request, and each query reads its own rows.
    chosen = sizes.rank_tokens * min(costs.queries.topk, end) * history / end
    rows = chosen * geometry.row_format.latent_row_bytes * geometry.num_layers
    keys = history * geometry.row_format.index_row_bytes * geometry.num_slots if costs.scored(sizes) else 0
    return (rows + keys) * foreign


def forecast(view: str, replicated_seconds: float, link_bytes: float, rate: float, first_layer: float) -> float:
    """Seconds of a chunk.

    Args:
        view: its name.
        replicated_seconds: of the same chunk.
        link_bytes: see the function of this name.
        rate: bytes per second of the link.
        first_layer: share of the bytes that the first layer moves; the others' are gathered while layers compute.
    """
    link_seconds = link_bytes / rate
    if view in AHEAD:
        return first_layer * link_seconds + max(replicated_seconds, (1 - first_layer) * link_seconds)
    return replicated_seconds + link_seconds


def without_tail(cost: ViewCost) -> int:
    """Bytes that a view takes from the scratch; the tail of `unified` lies behind the ranks' pools."""
    return cost.held_bytes - aligned(cost.buffers.get(TAIL, 0))
