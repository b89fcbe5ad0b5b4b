"""`unified` with ranks held at random moments while the others run as far ahead as the collectives let them.

The ranks run all batches without meeting in between, so that only the view's own fences keep a reader behind the
writers and an owner behind the readers of a page that it was given again. A rank is held until every other one is held
too or waits for it in a collective. Views that lack one of the fences are seen under the same holds.

rank 1     | write l0 | (held) write l1 .................. | batch 2
others     | write l0 | write l1 | batch 2: all-gather ... | batch 2     pages of batch 1 must not be read before this
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from held_ranks import POINTS, Group, assert_same_outputs

from cpkv.errors import NumericsError
from cpkv.layout.plan import BatchPlan
from cpkv.ops.reference.pages import token_rows
from cpkv.pool.page_pool import POISON_BYTE
from cpkv.testing.registration import register_cpu_ci
from cpkv.views import factory
from cpkv.views.unified import UnifiedView
from cpkv.views.view import CurrentRows, LayerRows, ViewContext

register_cpu_ci(est_time=11, suite="models")


@pytest.fixture(scope="module", params=[2, 3, 4])
def group(
    request: pytest.FixtureRequest, hot_model: Callable, prompt: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Group:
    """Ranks of each number, with a model of two layers."""
    return Group(hot_model, request.param, prompt, tmp_path_factory.mktemp("pools"))


def test_pages_are_used_again(group: Group) -> None:
    """Otherwise the holds would show nothing: batches read histories, and pages of finished requests are written."""
    specs = group.ranks().specs
    assert sum(any(segment.start for segment in spec.segments) for spec in specs) >= 4
    first, second = ({page for s in spec.segments for page in s.pages} for spec in (specs[0], specs[-1]))
    assert len(first & second) > len(second) / 2


@pytest.mark.parametrize(("seed", "chance"), [(0, 0.03), (1, 0.15), (2, 0.5)])
def test_ranks_held_at_random_moments_change_no_bit(
    group: Group, seed: int, chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.check_random_holds(monkeypatch, seed, chance)


@pytest.mark.parametrize("point", POINTS)
def test_one_rank_that_is_always_last_changes_no_bit(group: Group, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one at each point; the nights have every rank at each."""
    group.check_slow_rank(monkeypatch, POINTS.index(point) % group.cp_size, point)


# Views without a fence.


class ReadsTooEarly(UnifiedView):
    """Takes the history before the first all-gather of the batch, when an owner may still be in the batch before."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        self._early = self._pool._all_latent.clone()

    def open_layer(self, layer: int, current: CurrentRows) -> LayerRows:
        """The history as it was then, and the right current rows."""
        rows = super().open_layer(layer, current)
        rows.latent = self._early[layer * self._pool.geometry.page_size :]
        rows.latent[self._pool.tail_row : self._pool.tail_row + len(current.latent)] = current.latent
        return rows


class ReadsCurrentFromOwners(UnifiedView):
    """Reads the rows of the batch itself where their owners store them, without waiting until they have."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        placement, pool = plan.placement, self._pool
        position_rows = []
        for segment in plan.spec.segments:
            pages = torch.tensor(segment.pages[: placement.pages_for(segment.end)])
            local_pages = placement.local_page(pages)
            first_rows = pool.geometry.latent_row(local_pages, torch.zeros_like(local_pages))
            rows = placement.owner(pages) * pool.segment_rows + first_rows
            position_rows.append(token_rows(rows, segment.end, pool.geometry.page_size))
        self._position_rows = tuple(position_rows)


class OverwritesTooEarly(UnifiedView):
    """Clears the pages of new requests before the first all-gather, when a rank may still be in the batch before."""

    def __init__(self, plan: BatchPlan, context: ViewContext) -> None:
        super().__init__(plan, context)
        for segment in plan.spec.segments:
            if segment.start == 0:
                pages = [page for page in segment.pages if plan.placement.owner(page) == context.comm.rank]
                self._pool.latent[[plan.placement.local_page(page) for page in pages]] = POISON_BYTE


@pytest.mark.parametrize(
    ("unfenced", "point"),
    [
        (ReadsTooEarly, "before a write"),
        (ReadsCurrentFromOwners, "before a write"),
        (OverwritesTooEarly, "before rows are read"),
    ],
)
def test_a_view_without_a_fence_is_seen(
    group: Group, unfenced: type[UnifiedView], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holds are ones that show: the same ranks, held at the same points, read what is not there yet or any more."""
    monkeypatch.setattr(factory, "UnifiedView", unfenced)
    with pytest.raises((AssertionError, NumericsError), match="values differ|NaN|not finite"):
        outputs, _ = group.run_held(monkeypatch, lambda rank, _, at: rank == 0 and at == point)
        assert_same_outputs(outputs, group.expected)


@pytest.mark.parametrize("unfenced", [ReadsTooEarly, OverwritesTooEarly])
def test_ranks_that_meet_between_batches_need_no_fence(
    group: Group, unfenced: type[UnifiedView], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These views are wrong in nothing else: what the test above sees is the missing fence."""
    monkeypatch.setattr(factory, "UnifiedView", unfenced)
    assert_same_outputs(group.ranks().run(meet=True), group.expected)
