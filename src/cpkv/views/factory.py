"""Makes the view that a plan names."""

from __future__ import annotations

from cpkv.comm.communicator import Communicator
from cpkv.errors import PlanError
from cpkv.layout.plan import BatchPlan
from cpkv.pool.page_pool import PagePool
from cpkv.views.current import CurrentView
from cpkv.views.pooled import FullView, ReplicatedView
from cpkv.views.view import View, ViewCounters


def open_view(plan: BatchPlan, pool: PagePool, comm: Communicator, counters: ViewCounters) -> View:
    """The view of a batch on this rank; counts it.

    Raises:
        PlanError: the plan's pages are of another size than the pool's.
    """
    if plan.placement.page_size != pool.geometry.page_size:
        raise PlanError(
            f"the plan has pages of {plan.placement.page_size} tokens, the pool of {pool.geometry.page_size}"
        )
    counters.count_batch(plan.spec.view)
    if plan.spec.view == "current":
        return CurrentView(plan, counters)
    if plan.spec.view == "full":
        return FullView(plan, pool, comm, counters)
    return ReplicatedView(plan, pool, counters)
