"""One forward pass of one rank over one batch, the same for shared and replicated pools and for decode.

per layer   project own tokens -> convert to stored rows -> all-gather -> write own pages -> view -> attention
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cpkv.attention.choice import Choice, SparseAttention
from cpkv.attention.dsa_attention import DsaAttention
from cpkv.attention.kernel_attention import KernelAttention
from cpkv.attention.paged_decode import PagedDecode
from cpkv.comm.communicator import Communicator, settle
from cpkv.engine.diagnostics import Diagnostics
from cpkv.errors import NumericsError
from cpkv.layout.plan import BatchPlan, LocalTokens
from cpkv.layout.view_costs import ViewOptions
from cpkv.model.dsa_model import DsaModel, LayerProjections
from cpkv.ops.device import launching_on
from cpkv.pool.page_pool import PagePool
from cpkv.views.counters import ViewCounters
from cpkv.views.factory import open_view
from cpkv.views.scratch import Scratch
from cpkv.views.view import CurrentRows, View, ViewContext


@dataclass
class BatchTrace:
    """What a forward pass keeps on request, for references and dumps.

    Attributes:
        want_logits: keep the logits of every token.
        want_choices: keep the chosen positions of every layer that has an indexer.
        logits: [tokens of this rank, vocab_size].
        choices: layer -> int64 [tokens of this rank, topk], -1 padded.
    """

    want_logits: bool = False
    want_choices: bool = False
    logits: torch.Tensor | None = None
    choices: dict[int, torch.Tensor] = field(default_factory=dict)


class BatchResult(NamedTuple):
    """What a forward pass returns.

    Attributes:
        last_logits: request -> logits [vocab_size] of its last prompt token, where this rank computed it.
        cost: what the view of this batch cost this rank.
    """

    last_logits: dict[str, torch.Tensor]
    cost: ViewCounters


class ForwardPass:
    """What a rank needs for a batch, tied together; it owns nothing of it but the scratch.

    Args:
        model: the model.
        pool: this rank's pages.
        comm: this rank's end of the group.
        counters: where the costs of all batches add up.
        scratch: where views hold what they gather.
        options: how views work.
        diagnostics: checks of every batch, when they are on.
    """

    def __init__(
        self,
        model: DsaModel,
        pool: PagePool,
        comm: Communicator,
        counters: ViewCounters,
        scratch: Scratch,
        *,
        options: ViewOptions | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.comm = comm
        self.counters = counters
        self._scratch = scratch
        self._diagnostics = diagnostics
        self._costs = model.shape.view_costs(
            pool.model_geometry, model.compute_dtype.itemsize, options or ViewOptions()
        )
        self._attention = self._open_attention(debug=diagnostics is not None)

    def _open_attention(self, *, debug: bool) -> SparseAttention:
        model, row_format = self.model, self.pool.geometry.row_format
        if self.pool.kernels.name == "reference":
            return DsaAttention(row_format, self._costs.queries, model.shape.softmax_scale, model.compute_dtype)
        return KernelAttention(
            self.pool.kernels,
            row_format,
            self._costs.queries,
            scale=model.shape.softmax_scale,
            compute_dtype=model.compute_dtype,
            value_dtype=model.dtype,
            debug=debug,
        )

    @torch.inference_mode()
    def run(self, plan: BatchPlan, trace: BatchTrace | None = None) -> BatchResult:
        """Run a batch.

        Args:
            plan: the same on every rank.
            trace: filled when given.

        Raises:
            NumericsError: a score is NaN, or a wanted logit is not finite.
        """
        with launching_on(self.pool.device):
            return self._run(plan, trace)

    def _run(self, plan: BatchPlan, trace: BatchTrace | None) -> BatchResult:
        cost = ViewCounters()
        if self._diagnostics is not None:
            self._diagnostics.before_batch(plan)
        view = open_view(plan, ViewContext(self.pool, self.comm, self._costs, self._scratch, cost))
        try:
            result = BatchResult(self._run_layers(plan, view, trace), cost)
        except BaseException:
            view.close(abandon=True)
            raise
        view.close()
        # Whoever is told that the batch is over may read its pages, by a stream of his own or by none.
        settle(self.pool.latent)
        if self._diagnostics is not None:
            self._diagnostics.after_batch(plan)
        self.counters.add(cost)
        return result

    def _run_layers(self, plan: BatchPlan, view: View, trace: BatchTrace | None) -> dict[str, torch.Tensor]:
        local, context = plan.local_tokens(self.comm.rank), view.context
        hidden = self.model.embed(context.tensor(local.token_ids))
        rotation = self.model.rotation(context.tensor(local.positions))
        order = context.tensor(plan.split.gather_slots)
        places = self.pool.place(plan.page_writes(plan.pool_owner(self.comm.rank)))
        attention = self._attention_of(plan)
        choices: list[Choice] = []
        for layer in range(self.model.shape.num_layers):
            projected = self.model.project(layer, hidden, rotation)
            current = self._gather_current(layer, view, projected, order)
            self.pool.write(layer, places, current.latent, current.index)
            rows = view.open_layer(layer, current)
            if self._diagnostics is not None:
                self._diagnostics.compare_view(plan, layer, view, rows)
            if projected.attention.index is not None:
                choices = attention.choose(plan, rows, local, projected.attention.index)
                if trace is not None and trace.want_choices:
                    trace.choices[layer] = _padded_choices(choices, self.model.shape.topk, len(local.packed))
            rows.keys_done()
            attended = attention.attend(rows, projected.attention.queries, choices)
            rows.close()
            hidden = self.model.finish(layer, hidden, attended)
        if trace is not None and trace.want_logits:
            trace.logits = self.model.logits(hidden).cpu()
        return self._last_logits(plan, local, hidden)

    def _attention_of(self, plan: BatchPlan) -> SparseAttention:
        """By page tables for a batch that is decoded, where the kernels can."""
        if isinstance(self._attention, KernelAttention):
            return PagedDecode.of(plan, self.pool, self._attention) or self._attention
        return self._attention

    def _gather_current(self, layer: int, view: View, projected: LayerProjections, order: torch.Tensor) -> CurrentRows:
        """Convert this rank's rows once, gather everyone's, put them in token order where the view wants them."""
        row_format, kernels = self.pool.geometry.row_format, self.pool.kernels
        target = view.current_target(layer)

        def gather(rows: torch.Tensor, out: torch.Tensor, label: str) -> None:
            everyone = view.exchange(rows.shape[1])
            own = everyone[self.comm.rank]
            own[: len(rows)] = rows
            own[len(rows) :] = 0
            self.comm.all_gather(own, f"{label} {layer}", out=everyone)
            kernels.gather_pages(everyone.flatten(0, 1), order, out[: len(order)])

        latent = kernels.encode_latent_rows(projected.latent, projected.rope_key, row_format.latent_dtype)
        gather(latent, target.latent, "current latent rows")
        if projected.index_keys is not None:
            assert target.index is not None
            keys = kernels.encode_index_keys(projected.index_keys, row_format.index_dtype)
            gather(keys, target.index, "current index keys")
        return CurrentRows(target.latent[: len(order)], target.index)

    def _last_logits(self, plan: BatchPlan, local: LocalTokens, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        last_logits = {}
        for number, _, last in local.runs:
            segment = plan.spec.segments[number]
            if segment.is_last and int(local.positions[last - 1]) == segment.end - 1:
                logits = self.model.logits(hidden[last - 1 : last])[0]
                if not bool(logits.isfinite().all()):
                    raise NumericsError(f"request {segment.request_id}: a logit of its last prompt token is not finite")
                last_logits[segment.request_id] = logits.cpu()
        return last_logits


def _padded_choices(choices: list[Choice], topk: int, tokens: int) -> torch.Tensor:
    padded = torch.full((tokens, topk), -1)
    for choice in choices:
        padded[choice.first : choice.last, : choice.positions.shape[1]] = choice.positions.cpu()
    return padded
