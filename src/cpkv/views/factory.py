"""Makes the view that a plan names."""

from __future__ import annotations

from cpkv.config.names import ViewName
from cpkv.errors import PlanError
from cpkv.layout.plan import BatchPlan
from cpkv.views.blocked import BlockedView
from cpkv.views.current import CurrentView
from cpkv.views.gathered import FullView, MixedView
from cpkv.views.layer_split import LayerSplitView
from cpkv.views.replicated import ReplicatedView
from cpkv.views.unified import UnifiedView
from cpkv.views.view import View, ViewContext


def open_view(plan: BatchPlan, context: ViewContext) -> View:
    """The view of a batch on this rank.

    Raises:
        PlanError: the plan's pages are of another size than the pool's, or the pool has no such view.
        CapacityError: the view does not fit the scratch.
    """
    page_size = context.geometry.page_size
    if plan.placement.page_size != page_size:
        raise PlanError(f"the plan has pages of {plan.placement.page_size} tokens, the pool of {page_size}")
    views: dict[ViewName, type[View]] = {
        "replicated": ReplicatedView,
        "current": CurrentView,
        "full": FullView,
        "mixed": MixedView,
        "unified": UnifiedView,
        "blocked": BlockedView,
        "layer-split": LayerSplitView,
    }
    return views[plan.spec.view](plan, context)
