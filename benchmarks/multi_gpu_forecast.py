"""What a chunk should take by the bytes that it moves or reads, from the planner's numbers and a probe of the links.

A gather takes a meeting of the ranks for each piece that moves at once, its copies of own pages, and the rest over the
link:

    gather = meetings x their time + own bytes / own rate + bytes of other ranks / rate of an all-gather

current               replicated
unified               replicated + bytes read in other cards' memory / rate of reading there
mixed, no prefetch    replicated + gather
mixed, full           a card each: the first layer's gather + the longer of replicated and the other layers'
                      one card:    replicated + gather less the meetings behind the first layer's; copies and kernels of
                                   all ranks take the same engines, so waits are all that is hidden
blocked               replicated + fetched bytes of other ranks / rate of an all-gather
"""

from __future__ import annotations

from typing import NamedTuple

from view_group import NO_PREFETCH

from cpkv.layout.view_costs import TAIL, BatchSizes, ViewCost, ViewCosts, aligned

AHEAD = ("mixed", "full")


class Links(NamedTuple):
    """What a probe found, all ranks at once, by the slowest rank.

    Attributes:
        read: bytes per second that a rank copies out of the next rank's memory.
        own: the same within its own.
        gather: bytes per second that come from other ranks in an all-gather of one piece, the meeting left out.
        meeting: seconds that an all-gather of hardly anything takes.
    """

    read: float
    own: float
    gather: float
    meeting: float


class Moves(NamedTuple):
    """What a chunk through a view moves, to the fullest rank.

    Attributes:
        link_bytes: that come from elsewhere.
        own_bytes: of the gathered ones, those that were here.
        meetings: of the ranks for all layers.
        first_layer: share of the bytes that the first layer moves.
        first_meetings: of the ranks for the first layer.
    """

    link_bytes: float
    own_bytes: float
    meetings: int
    first_layer: float
    first_meetings: int

    @classmethod
    def of(
        cls, view: str, costs: ViewCosts, sizes: BatchSizes, moved_bytes: int, *, foreign: float, piece: int | None
    ) -> Moves:
        """Of a batch.

        Args:
            view: its name.
            costs: of the pool.
            sizes: of the batch.
            moved_bytes: that gathers brought to a rank, its own included.
            foreign: share of the pages in the memory of other cards.
            piece: bytes of a rank that move at once; None for all that there are.
        """
        geometry = costs.geometry
        latent = geometry.latent_page_bytes // geometry.num_layers
        index, slots = (geometry.index_block_bytes, geometry.num_slots) if costs.scored(sizes) else (0, 0)
        page_bytes = geometry.latent_page_bytes + slots * index

        def pieces(block_bytes: int) -> int:
            return -(-sizes.history_pages * block_bytes // piece) if piece else int(block_bytes > 0)

        of_latent, of_index = pieces(latent), pieces(index)
        if view == "unified":
            link_bytes, own_bytes = _read_bytes(costs, sizes) * foreign, 0.0
        else:
            own_bytes = moved_bytes / sizes.cp_size
            link_bytes = moved_bytes - own_bytes
        meetings = geometry.num_layers * of_latent + slots * of_index
        return cls(link_bytes, own_bytes, meetings, (latent + index) / page_bytes, of_latent + of_index)


def _read_bytes(costs: ViewCosts, sizes: BatchSizes) -> float:
    """Bytes of history that a rank's kernels read through `unified`, its own pages' included."""
    geometry, end = costs.geometry, max(sizes.request_tokens)
    history = end - sizes.tokens
    # Chosen keys are spread evenly over the request, and each query reads its own rows.
    chosen = sizes.rank_tokens * min(costs.queries.topk, end) * history / end
    rows = chosen * geometry.row_format.latent_row_bytes * geometry.num_layers
    keys = history * geometry.row_format.index_row_bytes * geometry.num_slots if costs.scored(sizes) else 0
    return rows + keys


def foreign_share(cp_size: int, cards: int) -> float:
    """Of evenly spread pages, those in the memory of other cards; ranks take the cards in turn."""
    on_card = -(-cp_size // cards)
    return 1 - on_card / cp_size


def forecast(view: str, replicated_seconds: float, moves: Moves, links: Links, *, shared_card: bool) -> float:
    """Seconds of a chunk.

    Args:
        view: its name.
        replicated_seconds: of the same chunk.
        moves: of the chunk.
        links: what a probe found.
        shared_card: several ranks take the same engines.
    """
    if view not in (*AHEAD, NO_PREFETCH):
        return replicated_seconds + moves.link_bytes / (links.read if view == "unified" else links.gather)
    copies = moves.own_bytes / links.own + moves.link_bytes / links.gather
    gather = moves.meetings * links.meeting + copies
    if view == NO_PREFETCH:
        return replicated_seconds + gather
    first = moves.first_meetings * links.meeting + moves.first_layer * copies
    if shared_card:
        return replicated_seconds + first + (1 - moves.first_layer) * copies
    return first + max(replicated_seconds, gather - first)


def without_tail(cost: ViewCost) -> int:
    """Bytes that a view takes from the scratch; the tail of `unified` lies behind the ranks' pools."""
    return cost.held_bytes - aligned(cost.buffers.get(TAIL, 0))
