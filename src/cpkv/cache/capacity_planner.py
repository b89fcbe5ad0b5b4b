"""What a pool holds and what each view costs, before anything is started: the numbers of the engine's own code.

kv memory of a rank = pages, its trash page included, + scratch of the view for the longest context
                      |                                  |
        what the allocator can hand out               ViewCosts and ViewPlanner, as when ranks run
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from cpkv.cache.capacity_plan import Capacity, CapacityPlan, ContextNumbers, EngineChoice, Hosts, ViewNumbers
from cpkv.config.names import KvView, ViewName
from cpkv.config.settings import EngineSettings, check_settings
from cpkv.errors import CapacityError, ConfigError
from cpkv.layout.capacity import allocatable_pages
from cpkv.layout.model_numbers import ModelNumbers
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import Segment
from cpkv.layout.planner import ViewPlanner
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.view_costs import BatchSizes, ViewCost, ViewCosts, ViewOptions

MILLION = 1 << 20
MAX_CONTEXT = 1 << 24
REPLICATED: ViewName = "replicated"
SHARED_VIEWS: tuple[ViewName, ...] = tuple(name for name in get_args(KvView) if name != "auto")
SEVERAL_HOSTS = "ranks on several hosts share no memory"


@dataclass(frozen=True)
class CapacityPlanner:
    """Works the numbers out.

    Attributes:
        model: sizes of the model.
        settings: of the engine; `num_pages` is not read, since the memory decides.
        kv_memory: bytes of a rank for pages and scratch.
    """

    model: ModelNumbers
    settings: EngineSettings
    kv_memory: int

    @property
    def geometry(self) -> PoolGeometry:
        """Of the pool."""
        settings = self.settings
        return self.model.geometry(settings.page_size, settings.stored_latent_dtype, settings.index_dtype)

    @property
    def options(self) -> ViewOptions:
        """How views work."""
        return ViewOptions(prefetch=self.settings.prefetch)

    @property
    def costs(self) -> ViewCosts:
        """Of views."""
        return self.model.view_costs(self.geometry, self.settings.compute_item_bytes, self.options)

    def placement(self, shared: bool) -> PagePlacement:
        """Over the ranks, or every page on every rank."""
        return PagePlacement(self.settings.page_size, self.settings.cp_size if shared else 1)

    def check(self) -> None:
        """Refuse settings that the engine refuses, and memory that holds no page or too many.

        Raises:
            ConfigError: with the fact, the cause and the remedy.
        """
        check_settings(self.settings)
        geometry = self.geometry
        if self.kv_memory < geometry.pool_bytes(2):
            raise ConfigError(
                f"--kv-memory is {self.kv_memory} bytes, and a rank's trash page and one page of {geometry.page_size} "
                f"tokens take {geometry.pool_bytes(2)}; raise it to that or more"
            )
        pages = self.kv_memory // geometry.page_bytes
        try:
            geometry.check_rows(pages)
        except ConfigError as error:
            raise ConfigError(f"--kv-memory {self.kv_memory} bytes is too much for one pool: {error}") from error

    def report(self, contexts: tuple[int, ...]) -> CapacityPlan:
        """All numbers.

        Raises:
            ConfigError: the settings cannot work, or a context is out of range.
        """
        self.check()
        settings, geometry = self.settings, self.geometry
        replicated = self.capacity(0, False)
        shared = self.capacity(0, True)
        return CapacityPlan(
            model=self.model,
            cp_size=settings.cp_size,
            page_size=settings.page_size,
            chunk_size=settings.chunk_size,
            latent_dtype=settings.stored_latent_dtype,
            index_dtype=settings.index_dtype,
            prefetch=settings.prefetch,
            kv_memory_bytes=self.kv_memory,
            latent_row_bytes=geometry.row_format.latent_row_bytes,
            index_row_bytes=geometry.row_format.index_row_bytes,
            token_bytes=geometry.page_bytes / geometry.page_size,
            page_bytes=geometry.page_bytes,
            replicated=replicated,
            shared=shared,
            capacity_ratio=shared.tokens / replicated.tokens,
            contexts=tuple(self.context_numbers(context) for context in contexts),
            million=self.context_numbers(MILLION),
        )

    def capacity(self, scratch: int, shared: bool) -> Capacity:
        """What the memory less the scratch holds; nothing where no page is left beside the trash page."""
        memory = max(0, self.kv_memory - scratch)
        placement = self.placement(shared)
        pages = allocatable_pages(memory // self.geometry.page_bytes, placement)
        return Capacity(memory, pages, pages * placement.page_size)

    def context_numbers(self, context: int) -> ContextNumbers:
        """One request of that many tokens, its last chunk.

        Raises:
            ConfigError: the context is out of range.
        """
        if not 1 <= context <= MAX_CONTEXT:
            raise ConfigError(f"--context is {context} tokens; it must be from 1 to {MAX_CONTEXT}")
        settings, geometry = self.settings, self.geometry
        placement = self.placement(True)
        views = self.views(context)
        pages = placement.pages_for(context)
        choices = []
        if settings.cp_size > 1:
            choices = [self.choice(context, hosts, views[0].capacity.tokens) for hosts in get_args(Hosts)]
        return ContextNumbers(
            context=context,
            chunk=min(context, settings.chunk_size),
            pages=pages,
            replicated_bytes=pages * geometry.page_bytes,
            shared_bytes=-(-pages // settings.cp_size) * geometry.page_bytes,
            beyond_model=context > self.model.max_positions,
            views=views,
            choices=tuple(choices),
        )

    def view_names(self) -> tuple[ViewName, ...]:
        """The views of a shared pool that the settings admit; none on one rank."""
        if self.settings.cp_size == 1:
            return ()
        return tuple(name for name in SHARED_VIEWS if self.settings.kv_view in ("auto", name))

    def views(self, context: int) -> tuple[ViewNumbers, ...]:
        """Every view that the settings admit, replicated first."""
        base = self.capacity(self.set_aside(REPLICATED, context).held_bytes, False).tokens
        return tuple(self._view_numbers(view, context, base) for view in (REPLICATED, *self.view_names()))

    def last_chunk(self, view: ViewName, context: int) -> ViewCost:
        """What a view costs for the last chunk; `current` for the first one, the only one that it serves."""
        return self.costs.cost(view, self._sizes(BatchSizes.even, self._served(view, context)))

    def set_aside(self, view: ViewName, context: int) -> ViewCost:
        """What a view may cost for any chunk of a request of up to that many tokens."""
        return self.costs.cost(view, self._sizes(BatchSizes.largest, self._served(view, context)))

    def _sizes(self, sizes_of: Callable[[int, int, int, int, ViewOptions], BatchSizes], context: int) -> BatchSizes:
        settings = self.settings
        return sizes_of(context, settings.chunk_size, settings.cp_size, settings.page_size, self.options)

    def _served(self, view: ViewName, context: int) -> int:
        return min(context, self.settings.chunk_size) if view == "current" else context

    def _view_numbers(self, view: ViewName, context: int, base_tokens: int) -> ViewNumbers:
        cost, last = self.set_aside(view, context), self.last_chunk(view, context)
        capacity = self.capacity(cost.held_bytes, view != REPLICATED)
        limit = self.settings.scratch_bytes
        return ViewNumbers(
            view=view,
            scratch_bytes=cost.held_bytes,
            buffers=dict(cost.buffers),
            last_chunk_bytes=last.held_bytes,
            moved_bytes=last.moved_bytes,
            capacity=capacity,
            capacity_ratio=_ratio(capacity.tokens, base_tokens),
            serves_context=self._served(view, context) == context and (limit is None or last.held_bytes <= limit),
        )

    def choice(self, context: int, hosts: Hosts, base_tokens: int) -> EngineChoice:
        """What the engine's planner takes for the last chunk, with the scratch that it sets aside at start."""
        settings = self.settings
        unified_reason = None if hosts == "one" else SEVERAL_HOSTS
        planner = ViewPlanner.of_settings(settings, self.costs, self.placement(True), unified_reason)
        if planner.scratch_bytes is None:
            planner = planner.with_scratch_for(context, settings.chunk_size)
        scratch = planner.scratch_bytes or 0
        view: ViewName | None = None
        try:
            if settings.kv_view == "unified" and planner.unified_reason is not None:
                raise CapacityError(f"the view unified was forced, and {planner.unified_reason}; leave out --kv-view")
            chosen = planner.choose([self._last_segment(context)])
            view, reason = chosen.view, chosen.reason
        except CapacityError as error:
            reason = str(error)
        capacity = self.capacity(scratch, True)
        return EngineChoice(hosts, view, reason, scratch, capacity, _ratio(capacity.tokens, base_tokens))

    def _last_segment(self, context: int) -> Segment:
        placement = self.placement(True)
        start = max(0, context - self.settings.chunk_size)
        first = placement.reserved_pages
        pages = tuple(range(first, first + placement.pages_for(context)))
        return Segment(f"of {context} tokens", start, (0,) * (context - start), pages, True)


def _ratio(tokens: int, base_tokens: int) -> float:
    """Of tokens; 0 where the base holds none, since then there is nothing to compare with."""
    return tokens / base_tokens if base_tokens else 0.0
