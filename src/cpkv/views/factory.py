"""Makes the view that a plan names."""

from __future__ import annotations

from cpkv.comm.communicator import Communicator
from cpkv.layout.plan import BatchPlan
from cpkv.pool.page_pool import PagePool
from cpkv.views.current import CurrentView
from cpkv.views.pooled import FullView, ReplicatedView
from cpkv.views.view import View, ViewCounters


def open_view(plan: BatchPlan, pool: PagePool, comm: Communicator, counters: ViewCounters) -> View:
    """The view of a batch on this rank; counts it."""
    counters.count_batch(plan.spec.view)
    if plan.spec.view == "current":
        return CurrentView(plan, counters)
    if plan.spec.view == "full":
        return FullView(plan, pool, comm, counters)
    return ReplicatedView(plan, pool, counters)
