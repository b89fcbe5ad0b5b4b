"""Every view shows the same bytes for every position, and nothing that is not theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gather_checks import HISTORIES, NO_HISTORY
from view_ranks import (
    EIGHT_LAYERS,
    FORMATS,
    ONE_COPY,
    SMALL,
    Reading,
    ViewRanks,
    check_every_boundary,
    check_seen,
    make_geometry,
    make_prompts,
)

from cpkv.config.names import SplitStrategy, ViewName
from cpkv.errors import CapacityError, PlanError
from cpkv.layout.placement import PagePlacement
from cpkv.testing.registration import register_cpu_ci
from cpkv.views.scratch import Scratch

register_cpu_ci(est_time=16, suite="unit")

# Ranks and tokens of a page; the nights have more of them.
LAYOUTS = [(1, 16), (2, 3), (3, 16), (4, 16), (5, 1), (6, 3), (7, 1), (8, 3)]
ALL = [*ONE_COPY, "current", "replicated", "layer-split"]


@pytest.mark.parametrize(("cp_size", "page_size"), LAYOUTS)
def test_every_view_shows_every_position(cp_size: int, page_size: int, tmp_path: Path) -> None:
    """Kinds 1, 9, 10, 12, 13, 16 and 24: histories and chunks that end at every side of a page, among poison."""
    check_every_boundary(cp_size, page_size, tmp_path)


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
@pytest.mark.parametrize(("cp_size", "page_size"), LAYOUTS[1::3])
def test_every_view_shows_every_position_of_requests_without_history(
    cp_size: int, page_size: int, strategy: SplitStrategy, tmp_path: Path
) -> None:
    """Kinds 12, 13 and 24."""
    for view in ALL:
        slots = EIGHT_LAYERS if view == "layer-split" else (0, -1, 1)
        geometry = make_geometry(page_size, FORMATS[(cp_size + page_size) % len(FORMATS)], slots)
        prompts = make_prompts(geometry, cp_size, NO_HISTORY)
        ranks = ViewRanks(geometry, cp_size, prompts, view, folder=tmp_path)  # type: ignore[arg-type]
        check_seen(ranks, ranks.read(prompts, Reading(strategy)), prompts)


@pytest.mark.parametrize("row_format", FORMATS, ids="/".join)
@pytest.mark.parametrize("view", [*ONE_COPY, "replicated"])
def test_every_row_format_in_every_view(view: ViewName, row_format: tuple[str, str], tmp_path: Path) -> None:
    """Kind 7, and packed rows, whose 15 bytes are aligned nowhere."""
    geometry = make_geometry(3, row_format)
    prompts = make_prompts(geometry, 4, HISTORIES)
    # Some requests have their keys read, or none.
    for topk in (18, 400):
        ranks = ViewRanks(geometry, 4, prompts, view, folder=tmp_path, topk=topk)
        ranks.store_history(prompts)
        check_seen(ranks, ranks.read(prompts), prompts)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_length_up_to_three_pages_and_one_is_shown_to_its_last_token(page_size: int, tmp_path: Path) -> None:
    """Kind 13: all of them as one batch, with a history of every length too."""
    geometry = make_geometry(page_size)
    lengths = [(total // 2, total - total // 2) for total in range(1, 3 * page_size + 2)]
    prompts = make_prompts(geometry, 2, lengths)
    for view in ONE_COPY:
        ranks = ViewRanks(geometry, 2, prompts, view, folder=tmp_path)
        ranks.store_history(prompts)
        check_seen(ranks, ranks.read(prompts), prompts)


@pytest.mark.parametrize(
    ("page_size", "cp_size", "history"),
    [*((16, 2, history) for history in (511, 512, 513, 1023, 1024, 1025)), (3, 3, 1537), (64, 4, 1300)],
)
def test_several_blocks_of_keys_and_several_rounds(page_size: int, cp_size: int, history: int, tmp_path: Path) -> None:
    """Histories at the edges of the blocks; with pages of 3 tokens a block has 1536."""
    geometry = make_geometry(page_size, FORMATS[history % len(FORMATS)])
    prompts = make_prompts(geometry, cp_size, [(history, 40), (0, 3), (30, 1), (0, 520)])
    for view in ONE_COPY:
        # One row a round from each owner, or many.
        options = SMALL._replace(round_bytes=1 if history == 513 else 1 << 20)
        ranks = ViewRanks(
            geometry, cp_size, prompts, view, folder=tmp_path, options=options, topk=16, queries_bytes=32 * 300
        )
        ranks.store_history(prompts)
        check_seen(ranks, ranks.read(prompts), prompts)


@pytest.mark.parametrize("idle", [(0,), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_blocked_answers_the_others_where_a_rank_asks_for_nothing(idle: tuple[int, ...]) -> None:
    """Kind 21: a rank without a token answers until nobody asks any more."""
    geometry = make_geometry(3, FORMATS[3])
    prompts = make_prompts(geometry, 4, HISTORIES)
    ranks = ViewRanks(geometry, 4, prompts, "blocked")
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts, Reading(idle=idle)), prompts)
    assert [comm.sequence for comm in ranks.comms] == [ranks.comms[0].sequence] * 4


def test_blocked_refuses_more_rows_than_it_has_room_for() -> None:
    """Before anything moves: what lies behind the buffer belongs to others."""
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 2, [(40, 3)])
    ranks = ViewRanks(geometry, 2, prompts, "blocked")
    most = ranks.costs.queries.most_rows(43)
    assert most < 43
    view = ranks.open(ranks.plan(prompts, "zigzag"), 0)
    rows = view.open_layer(0, view.current_target(0))
    with pytest.raises(PlanError, match=f"{most + 1} chosen rows are asked for at once, .* room for {most}"):
        rows.chosen_rows(0, torch.arange(most + 1))
    view.close(abandon=True)


@pytest.mark.parametrize("owners", [[0], [3], [1, 2]])
@pytest.mark.parametrize("view", ONE_COPY)
def test_pages_on_few_owners_are_padded_and_no_padding_is_shown(
    view: ViewName, owners: list[int], tmp_path: Path
) -> None:
    """Kinds 9 and 21: the other owners contribute their trash page."""
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, HISTORIES, owners=owners)
    ranks = ViewRanks(geometry, 4, prompts, view, folder=tmp_path)
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)


@pytest.mark.parametrize("fill", [0x00, 0x7B])
@pytest.mark.parametrize("view", [*ONE_COPY, "current", "replicated"])
def test_what_lies_in_the_trash_pages_changes_nothing(view: ViewName, fill: int, tmp_path: Path) -> None:
    """Kind 8; elsewhere it is 0xFF."""
    geometry = make_geometry(3, FORMATS[1])
    prompts = make_prompts(geometry, 4, NO_HISTORY if view == "current" else HISTORIES)
    ranks = ViewRanks(geometry, 4, prompts, view, folder=tmp_path)
    for pool in ranks.pools:
        pool.latent[0], pool.index[0] = fill, fill
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)


@pytest.mark.parametrize("view", ["mixed", "full", "unified", "current", "replicated"])
def test_no_token_stays_no_token_and_its_neighbours_keep_their_rows(view: ViewName, tmp_path: Path) -> None:
    """Kind 9: -1 in any place of an array of any shape; a position behind the last token is refused."""
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, NO_HISTORY)
    ranks = ViewRanks(geometry, 4, prompts, view, folder=tmp_path)
    opened = ranks.open(ranks.plan(prompts), 1)
    rows = opened.rows_of(2, torch.tensor([[-1, 36, 0], [5, -1, -1]]))
    alone = {pos: int(opened.rows_of(2, torch.tensor([pos]))[0]) for pos in (36, 0, 5)}
    assert rows.tolist() == [[-1, alone[36], alone[0]], [alone[5], -1, -1]]
    assert rows.dtype == torch.int64 and min(alone.values()) >= 0
    assert opened.rows_of(1, torch.tensor([-1, -1])).tolist() == [-1, -1]
    with pytest.raises(IndexError):
        opened.rows_of(1, torch.tensor([1]))
    opened.close()


def poison_pools(ranks: ViewRanks) -> Reading:
    return Reading(after_write=lambda rank, layer: ranks.pools[rank].poison(list(range(ranks.pools[rank].local_pages))))


@pytest.mark.parametrize("view", ["current", "mixed", "full", "blocked", "layer-split"])
def test_a_batch_without_history_reads_no_row_of_the_pool(view: ViewName) -> None:
    """The pools are NaN from end to end when a layer is opened."""
    geometry = make_geometry(3, FORMATS[1], EIGHT_LAYERS)
    prompts = make_prompts(geometry, 4, NO_HISTORY)
    ranks = ViewRanks(geometry, 4, prompts, view)
    check_seen(ranks, ranks.read(prompts, poison_pools(ranks)), prompts)


def test_the_test_above_sees_a_view_that_reads_the_pool() -> None:
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, NO_HISTORY)
    ranks = ViewRanks(geometry, 4, prompts, "replicated")
    assert bool((ranks.read(prompts, poison_pools(ranks))[0][0][0].latent == 0xFF).all())


@pytest.mark.parametrize("view", ["mixed", "full", "unified", "blocked"])
def test_the_current_rows_of_a_page_that_is_half_history_are_not_read_from_its_owner(
    view: ViewName, tmp_path: Path
) -> None:
    """The owner's copy of them is poisoned before the layer is opened; a page of 16 ends behind the last token."""
    geometry = make_geometry(16, FORMATS[3])
    prompts = make_prompts(geometry, 3, [(9, 5), (4, 1), (0, 6)])
    ranks = ViewRanks(geometry, 3, prompts, view, folder=tmp_path)
    ranks.store_history(prompts)

    def spoil(rank: int, layer: int) -> None:
        for prompt in prompts:
            owner, local_page = prompt.pages[0] % 3, prompt.pages[0] // 3
            if owner == rank:
                ranks.pools[rank].latent[local_page, layer, prompt.history :] = 0xFF

    check_seen(ranks, ranks.read(prompts, Reading(after_write=spoil)), prompts)


def test_a_short_batch_after_a_long_one_shows_its_own_rows(tmp_path: Path) -> None:
    """Kind 20: nothing of the batch before is left in a buffer; here the scratch is not poisoned in between."""
    geometry = make_geometry(3, FORMATS[1])
    prompts = make_prompts(geometry, 4, [(17, 40), (0, 37), (4, 1), (0, 2)])
    for view in (*ONE_COPY, "replicated"):
        ranks = ViewRanks(geometry, 4, prompts, view, folder=tmp_path)
        ranks.scratches = [Scratch() for _ in range(4)]
        ranks.store_history(prompts)
        for batch in (prompts[:2], prompts[2:3], prompts[3:]):
            check_seen(ranks, ranks.read(batch), batch)
        assert ranks.counters[2].batches == {view: 3}


def test_the_current_view_is_refused_for_a_batch_with_history() -> None:
    geometry = make_geometry(3)
    prompts = make_prompts(geometry, 4, HISTORIES)
    with pytest.raises(PlanError, match="has history, which the view `current` does not hold"):
        ViewRanks(geometry, 4, prompts, "current").read(prompts)


@pytest.mark.parametrize("view", ["mixed", "full", "blocked", "replicated"])
def test_a_plan_of_another_page_size_than_the_pool_is_refused(view: ViewName) -> None:
    """Kind 5: one page size, or two named ones with a checked ratio."""
    geometry = make_geometry(4)
    prompts = make_prompts(geometry, 2, HISTORIES)
    ranks = ViewRanks(geometry, 2, prompts, view)
    ranks.placement = PagePlacement(8, ranks.placement.cp_size)
    with pytest.raises(PlanError, match="the plan has pages of 8 tokens, the pool of 4"):
        ranks.open(ranks.plan(prompts), 0)


@pytest.mark.parametrize("view", ["unified", "layer-split"])
def test_a_view_that_the_pool_does_not_have_is_refused(view: ViewName) -> None:
    geometry = make_geometry(4)
    prompts = make_prompts(geometry, 2, HISTORIES)
    ranks = ViewRanks(geometry, 2, prompts, "replicated" if view == "layer-split" else "mixed")
    ranks.view = view
    with pytest.raises(PlanError, match="this pool is not"):
        ranks.open(ranks.plan(prompts), 0)


@pytest.mark.parametrize("view", [*ONE_COPY, "replicated"])
def test_a_scratch_that_is_one_byte_too_small_is_refused_with_the_bytes(view: ViewName, tmp_path: Path) -> None:
    """The tail of `unified` lies in its pool."""
    geometry = make_geometry(4)
    prompts = make_prompts(geometry, 2, HISTORIES)
    ranks = ViewRanks(geometry, 2, prompts, view, folder=tmp_path)
    plan = ranks.plan(prompts)
    needed = sum(-(-size // 64) * 64 for name, size in ranks.cost(plan).buffers.items() if name != "tail")
    ranks.scratches[0] = Scratch(needed - 1)
    with pytest.raises(CapacityError, match=f"needs {needed} bytes of scratch and there are {needed - 1}; raise"):
        ranks.open(plan, 0)
    ranks.scratches = [Scratch(needed, poison=True) for _ in range(2)]
    ranks.store_history(prompts)
    check_seen(ranks, ranks.read(prompts), prompts)
