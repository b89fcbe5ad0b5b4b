"""Chooses the view of each batch: the cheapest one that can serve it and fits the scratch.

current    no request of the batch has history           nothing moves
unified    the ranks share memory on one host            nothing moves; over links between devices rows are read
mixed      always                                        history pages move
full       only when forced                              history pages move, and current rows are copied
blocked    always; the last resort                       index keys and chosen rows move, in a fixed scratch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cpkv.config.names import KvView, SplitStrategy, ViewName
from cpkv.config.settings import EngineSettings
from cpkv.errors import CapacityError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.view_costs import BatchSizes, ViewCost, ViewCosts

SCRATCH_OPTION = "--scratch-bytes"


class ViewChoice(NamedTuple):
    """A view, what it costs, why it was chosen, in words, and the bytes that it moves or reads from rank to rank."""

    view: ViewName
    cost: ViewCost
    reason: str
    over_links: int


@dataclass(frozen=True)
class ViewPlanner:
    """The choice of views for one pool.

    Attributes:
        costs: of the model and pool.
        placement: of the pool; one owner means that every rank holds every page.
        cp_size: ranks.
        strategy: how tokens are split.
        forced: the view to use whatever it costs, or auto.
        current_reuse: batches without history may read their own rows.
        unified_reason: why the ranks cannot share memory; None when they do.
        scratch_bytes: bytes that views may hold beside the pool; None for as much as they need.
        linked: the ranks' memory is that of several devices: what one reads in another's crosses a link.
    """

    costs: ViewCosts
    placement: PagePlacement
    cp_size: int
    strategy: SplitStrategy
    forced: KvView = "auto"
    current_reuse: bool = True
    unified_reason: str | None = "the pools are not in shared memory"
    scratch_bytes: int | None = None
    linked: bool = False

    @classmethod
    def of_settings(
        cls,
        settings: EngineSettings,
        costs: ViewCosts,
        placement: PagePlacement,
        unified_reason: str | None,
        *,
        linked: bool = False,
    ) -> ViewPlanner:
        """The planner of a pool under these settings."""
        return cls(
            costs=costs,
            placement=placement,
            cp_size=settings.cp_size,
            strategy=settings.cp_strategy,
            forced=settings.kv_view,
            current_reuse=settings.current_reuse,
            unified_reason=unified_reason,
            scratch_bytes=settings.scratch_bytes,
            linked=linked,
        )

    def with_scratch_for(self, context: int, chunk: int) -> ViewPlanner:
        """The same planner with the scratch that the preferred views take for one request of up to `context` tokens."""
        page_size = self.placement.page_size
        sizes = BatchSizes.largest(context, chunk, self.cp_size, page_size, self.costs.options)
        views: set[ViewName] = {self._views(has_history)[0][0] for has_history in (False, True)}
        views |= {"blocked", "mixed"} if self._reads_over_links else {"blocked"}
        return replace(self, scratch_bytes=max(self.costs.cost(view, sizes).held_bytes for view in views))

    def choose(self, segments: Sequence[Segment]) -> ViewChoice:
        """The view of a batch.

        Raises:
            CapacityError: no admissible view fits the scratch, with the bytes that the cheapest one needs.
        """
        choices = self.admissible(segments)
        limit = self.scratch_bytes
        fitting = [choice for choice in choices if limit is None or choice.cost.held_bytes <= limit]
        if fitting:
            # `blocked` moves what queries choose, which the plan cannot know: it serves what nothing else can.
            return min(fitting, key=lambda choice: (choice.view == "blocked", choice.over_links))
        names = ", ".join(segment.request_id for segment in segments)
        raise self._too_small(
            names, min((choice.cost for choice in choices), key=_held), max(segment.end for segment in segments)
        )

    def check_request(self, request_id: str, tokens: int, pages: Sequence[int], chunk: int) -> None:
        """Refuse a request of which some chunk could need more than the scratch, wherever chunks happen to start.

        Raises:
            CapacityError: with the bytes that serve any chunk of it.
        """
        if tokens > chunk:
            self._check_history(request_id)
        if self.scratch_bytes is None:
            return
        sizes = BatchSizes.largest_of(tokens, pages, chunk, self.cp_size, self.placement, self.costs.options)
        views = [name for name, _ in self._views(has_history=True)]
        cheapest = min((self.costs.cost(view, sizes) for view in views), key=_held)
        if cheapest.held_bytes > self.scratch_bytes:
            raise self._too_small(request_id, cheapest, tokens)

    def _too_small(self, names: str, cost: ViewCost, tokens: int) -> CapacityError:
        return CapacityError(
            f"request {names}: the view {cost.view} holds up to {cost.held_bytes} bytes for {tokens} tokens, and the "
            f"scratch has {self.scratch_bytes}; raise {SCRATCH_OPTION} to {cost.held_bytes}"
            + ("" if self.forced in ("auto", "blocked") else " or leave out --kv-view")
        )

    def _check_history(self, names: str) -> None:
        if self._views(has_history=True)[0][0] == "current":
            raise CapacityError(
                f"request {names}: the view current was forced and holds no history, and the request is longer than "
                "one chunk; raise --chunk-size or leave out --kv-view"
            )

    def admissible(self, segments: Sequence[Segment]) -> list[ViewChoice]:
        """Every view that could serve a batch, the preferred one first among equals."""
        has_history = any(segment.start for segment in segments)
        if has_history:
            self._check_history(", ".join(segment.request_id for segment in segments))
        names = self._views(has_history)
        spec = BatchSpec(0, tuple(segments), self.strategy, names[-1][0])
        sizes = BatchSizes.of(BatchPlan.build(spec, self.placement, self.cp_size), self.costs.options)
        choices = []
        for view, reason in names:
            cost = self.costs.cost(view, sizes)
            # Of what a gather brings, one part in cp_size was here.
            moved = cost.moved_bytes * (self.cp_size - 1) // self.cp_size
            read = self.costs.read_bytes(view, sizes) if self.linked else 0
            choices.append(ViewChoice(view, cost, reason, moved + read))
        return choices

    @property
    def _reads_over_links(self) -> bool:
        return self.linked and self.unified_reason is None and self.forced == "auto"

    def _views(self, has_history: bool) -> list[tuple[ViewName, str]]:
        """Views and why each, the preferred one first."""
        if self.placement.cp_size < self.cp_size or self.cp_size == 1:
            return [("replicated", "every rank holds every page")]
        if self.forced != "auto":
            return [(self.forced, "it was forced")]
        names: list[tuple[ViewName, str]] = []
        if self.current_reuse and not has_history:
            names.append(("current", "no request of the batch has history"))
        if self.unified_reason is None:
            names.append(("unified", "the ranks share memory: nothing moves"))
            if self._reads_over_links:
                names[-1] = ("unified", "less is read over the links between the ranks' devices than a gather moves")
                names.append(("mixed", "a gather moves less than is read over the links between the ranks' devices"))
            names.append(("blocked", "the scratch is too small for unified"))
        else:
            names.append(("mixed", f"the history is gathered: {self.unified_reason}"))
            names.append(("blocked", "the scratch is too small to gather a layer's history"))
        return names


def _held(cost: ViewCost) -> int:
    return cost.held_bytes
