"""One forward pass of one rank over one batch, the same for shared and replicated pools and for decode.

per layer   project own tokens -> convert to stored rows -> all-gather -> write own pages -> view -> attention
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cpkv.attention.dsa_attention import Choice, DsaAttention
from cpkv.comm.communicator import Communicator
from cpkv.engine.diagnostics import Diagnostics
from cpkv.errors import NumericsError
from cpkv.layout.plan import BatchPlan, LocalTokens
from cpkv.model.dsa_model import DsaModel, LayerProjections
from cpkv.ops.reference.index_keys import encode_index_keys
from cpkv.ops.reference.latent_rows import encode_latent_rows
from cpkv.pool.page_pool import PagePool
from cpkv.views.factory import open_view
from cpkv.views.view import CurrentRows, ViewCounters


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
    """What a rank needs for a batch, tied together; it owns none of it.

    Args:
        model: the model.
        pool: this rank's pages.
        comm: this rank's end of the group.
        counters: where the costs of all batches add up.
        diagnostics: checks of every batch, when they are on.
    """

    def __init__(
        self,
        model: DsaModel,
        pool: PagePool,
        comm: Communicator,
        counters: ViewCounters,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.comm = comm
        self.counters = counters
        self._diagnostics = diagnostics
        shape = model.shape
        self._attention = DsaAttention(
            row_format=pool.geometry.row_format,
            topk=shape.topk,
            index_heads=shape.index_heads,
            scale=shape.softmax_scale,
            compute_dtype=model.compute_dtype,
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
        local = plan.local_tokens(self.comm.rank)
        positions = torch.from_numpy(local.positions)
        hidden = self.model.embed(torch.from_numpy(local.token_ids))
        rotation = self.model.rotation(positions)
        writes = plan.page_writes(plan.pool_owner(self.comm.rank))
        cost = ViewCounters()
        view = open_view(plan, self.pool, self.comm, cost)
        choices: list[Choice] = []
        if self._diagnostics is not None:
            self._diagnostics.before_batch(plan)
        for layer in range(self.model.shape.num_layers):
            projected = self.model.project(layer, hidden, rotation)
            current = self._gather_current(plan, layer, projected)
            self.pool.write(layer, writes, current.latent, current.index)
            rows = view.open_layer(layer, current)
            if self._diagnostics is not None:
                self._diagnostics.compare_view(plan, layer, view, rows)
            if projected.attention.index is not None:
                choices = self._attention.choose(rows, local, projected.attention.index)
                ends = [plan.spec.segments[number].end for number, _, _ in local.runs]
                cost.hold(rows.held_bytes + max(map(self._attention.key_bytes, ends), default=0))
                if trace is not None and trace.want_choices:
                    trace.choices[layer] = _padded_choices(choices, self.model.shape.topk, len(local.packed))
            attended = self._attention.attend(view, rows, projected.attention.queries, choices)
            hidden = self.model.finish(layer, hidden, attended)
            # Else this layer's buffers would live until the next layer's are made.
            del rows, current
        if self._diagnostics is not None:
            self._diagnostics.after_batch(plan)
        if trace is not None and trace.want_logits:
            trace.logits = self.model.logits(hidden)
        self.counters.add(cost)
        return BatchResult(self._last_logits(plan, local, hidden), cost)

    def _gather_current(self, plan: BatchPlan, layer: int, projected: LayerProjections) -> CurrentRows:
        """Convert this rank's rows once, gather everyone's, put them in token order."""
        row_format = self.pool.geometry.row_format
        latent = encode_latent_rows(projected.latent, projected.rope_key, row_format.latent_dtype)
        index = None
        if projected.index_keys is not None:
            index = encode_index_keys(projected.index_keys, row_format.index_dtype)
        order = torch.from_numpy(plan.split.gather_slots)

        def gathered(rows: torch.Tensor, label: str) -> torch.Tensor:
            padding = rows.new_zeros(plan.split.max_tokens - rows.shape[0], rows.shape[1])
            everyone = self.comm.all_gather(torch.cat([rows, padding]), f"{label} {layer}")
            return everyone.flatten(0, 1).index_select(0, order)

        return CurrentRows(
            latent=gathered(latent, "current latent rows"),
            index=gathered(index, "current index keys") if index is not None else None,
        )

    def _last_logits(self, plan: BatchPlan, local: LocalTokens, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        last_logits = {}
        for number, _, last in local.runs:
            segment = plan.spec.segments[number]
            if segment.is_last and int(local.positions[last - 1]) == segment.end - 1:
                logits = self.model.logits(hidden[last - 1 : last])[0]
                if not bool(logits.isfinite().all()):
                    raise NumericsError(f"request {segment.request_id}: a logit of its last prompt token is not finite")
                last_logits[segment.request_id] = logits
        return last_logits


def _padded_choices(choices: list[Choice], topk: int, tokens: int) -> torch.Tensor:
    padded = torch.full((tokens, topk), -1)
    for choice in choices:
        padded[choice.first : choice.last, : choice.positions.shape[1]] = choice.positions
    return padded
