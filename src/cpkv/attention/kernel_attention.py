"""DSA attention by the kernels of a GPU, which read the chosen rows of a view where they lie.

fp8 keys      queries in fp8 too, their scales in the weights       scores -> choice with view rows -> attention
              scores and choice in one, where the kernels have that and the view has rows of all positions
float keys    scores by plain torch, of the decoded keys            as the first
packed rows, and views whose rows are fetched                       chosen rows are copied and decoded first
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch

from cpkv.attention.choice import Choice, IndexInputs, SparseAttention
from cpkv.layout.plan import BatchPlan, LocalTokens
from cpkv.layout.query_blocks import QueryBlocks
from cpkv.layout.row_format import FP8_SCALE_BYTES, RowFormat
from cpkv.ops.kernels import Kernels
from cpkv.ops.reference.index_keys import decode_index_keys
from cpkv.ops.reference.indexer import indexer_scores
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.views.view import LayerRows

DEFAULT_WORKSPACE_BYTES = 1 << 30
Best = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Block:
    """Queries of one segment that are scored together: tokens of this rank, and how many keys each may see."""

    first: int
    last: int
    limits: torch.Tensor
    most: int


@dataclass(frozen=True)
class KernelAttention(SparseAttention):
    """By the kernels of one device.

    Attributes:
        kernels: of the device.
        row_format: of the stored rows.
        blocks: how many keys each query chooses, and how queries are blocked whose rows the view fetches.
        scale: softmax scale.
        compute_dtype: of queries and outputs.
        value_dtype: of the values that attention reads: bfloat16, or float32 for comparison.
        debug: look for NaN among the scores, which waits for the device.
        workspace_bytes: bounds the scores, and copies of chosen rows, of a block of queries. Scores and choice in one
            write no scores, and bound what they need themselves.
    """

    kernels: Kernels
    row_format: RowFormat
    blocks: QueryBlocks
    scale: float
    compute_dtype: torch.dtype
    value_dtype: torch.dtype
    debug: bool = False
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES

    def choose(self, plan: BatchPlan, rows: LayerRows, local: LocalTokens, index: IndexInputs) -> list[Choice]:
        """Choose with view rows, where the view has them."""
        runs = {number: (first, last) for number, first, last in local.runs}
        inputs = self.quantised(index)
        choices: list[Choice] = []
        for number, segment in enumerate(plan.spec.segments):
            first, last = runs.get(number, (0, 0))
            size = self._block_size(segment.end, every_row=rows.position_rows(number) is not None)
            blocks = self._blocks(local, first, last, size, index.queries.device)
            if segment.end <= self.blocks.topk:
                choices += [self._everything(rows, number, block) for block in blocks]
            elif blocks or rows.position_rows(number) is None:
                # Where rows are fetched every rank asks, also one without a query here.
                choices += self._chosen(rows, number, blocks, inputs)
        return choices

    @property
    def _chosen_in_one(self) -> Callable[..., Best] | None:
        """Scores and choice in one; None where they are apart."""
        return self.kernels.fp8_indexer_topk if self.row_format.index_dtype == "fp8" else None

    def _block_size(self, tokens: int, *, every_row: bool) -> int:
        """How many queries are scored together: as many as the scores' bytes let, all where none are written."""
        in_one = every_row and self._chosen_in_one is not None
        return sys.maxsize if in_one else max(1, self.workspace_bytes // (4 * tokens))

    def _blocks(self, local: LocalTokens, first: int, last: int, size: int, device: torch.device) -> list[_Block]:
        limits = torch.from_numpy(local.positions[first:last] + 1).to(device)
        return [
            _Block(start, end, limits[start - first : end - first], int(local.positions[end - 1]) + 1)
            for start in range(first, last, size)
            for end in (min(last, start + size),)
        ]

    def _everything(self, rows: LayerRows, segment: int, block: _Block) -> Choice:
        """All keys that a query may see: there are no more than topk."""
        positions = torch.arange(block.most, dtype=torch.int32, device=block.limits.device)
        hidden = positions >= block.limits.unsqueeze(1)
        numbers = rows.position_rows(segment)
        return Choice(
            segment,
            block.first,
            block.last,
            positions.expand(len(hidden), -1).masked_fill(hidden, -1),
            None
            if numbers is None
            else numbers[: block.most].to(torch.int32).expand(len(hidden), -1).masked_fill(hidden, -1),
        )

    def _chosen(self, rows: LayerRows, segment: int, blocks: list[_Block], inputs: IndexInputs) -> list[Choice]:
        numbers = rows.position_rows(segment)
        of_blocks = [
            IndexInputs(inputs.queries[block.first : block.last], inputs.weights[block.first : block.last])
            for block in blocks
        ]
        if numbers is None:
            return self._merged(rows, segment, blocks, of_blocks)
        choices = []
        row_of_position = numbers.to(torch.int32)
        for _, stored in rows.key_blocks(segment):
            keys = self._keys(stored)
            for block, own in zip(blocks, of_blocks, strict=True):
                positions, chosen = self._choose_rows(own, keys, block.limits, row_of_position)
                choices.append(Choice(segment, block.first, block.last, positions, chosen))
        return choices

    def _choose_rows(
        self,
        inputs: IndexInputs,
        keys: tuple[torch.Tensor, torch.Tensor | None],
        limits: torch.Tensor,
        row_of_position: torch.Tensor,
    ) -> Best:
        """Positions and view rows of the best of all keys."""
        best = (self.blocks.topk, row_of_position)
        if self._chosen_in_one is not None:
            return self._chosen_in_one(inputs.queries, inputs.weights, *keys, limits, *best, debug=self.debug)
        return self.kernels.topk_rows(self._scores(inputs, keys, limits), limits, *best, debug=self.debug)

    def _merged(
        self, rows: LayerRows, segment: int, blocks: list[_Block], of_blocks: list[IndexInputs]
    ) -> list[Choice]:
        """Block of keys by block of keys, since never all of them are here."""
        best: dict[int, Best] = {}
        for start, stored in rows.key_blocks(segment):
            keys = self._keys(stored)
            for number, (block, own) in enumerate(zip(blocks, of_blocks, strict=True)):
                if block.most <= start:
                    continue
                limits = (block.limits - start).clamp(0, len(stored))
                scores = self._scores(own, keys, limits)
                known = best.get(number, (scores[:, :0], limits.new_empty(len(limits), 0)))
                best[number] = self.kernels.merge_topk(
                    *known, scores, limits, self.blocks.topk, start=start, debug=self.debug
                )
        return [Choice(segment, block.first, block.last, best[number][1]) for number, block in enumerate(blocks)]

    def quantised(self, index: IndexInputs) -> IndexInputs:
        """The indexer's inputs as scores take them: for fp8 keys fp8 queries, whose scales the weights hold."""
        queries, weights = index.queries, index.weights
        if self.row_format.index_dtype != "fp8":
            return index
        stored = self.kernels.encode_index_keys(queries.reshape(-1, queries.shape[2]), "fp8")
        values, scales = _apart(stored)
        return IndexInputs(values.view(queries.shape), weights * scales.view(weights.shape))

    def _keys(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stored keys [tokens, index_row_bytes] as scores take them."""
        if self.row_format.index_dtype == "fp8":
            return _apart(stored)
        return decode_index_keys(stored, self.row_format.index_dtype, self.compute_dtype), None

    def _scores(
        self, inputs: IndexInputs, keys: tuple[torch.Tensor, torch.Tensor | None], limits: torch.Tensor
    ) -> torch.Tensor:
        values, scales = keys
        if scales is not None:
            return self.kernels.fp8_indexer_scores(inputs.queries, inputs.weights, values, scales, limits)
        return indexer_scores(inputs.queries, inputs.weights, values, limits, dtype=self.row_format.index_dtype)

    def attend(self, rows: LayerRows, queries: torch.Tensor, choices: list[Choice]) -> torch.Tensor:
        """Attend to the rows in the view, or to decoded copies of those that were chosen."""
        out = torch.empty(
            *queries.shape[:2], self.row_format.kv_lora_rank, dtype=self.compute_dtype, device=queries.device
        )
        values = queries.to(self.value_dtype)
        stored = self.row_format.latent_dtype
        readable = stored != "fp8" and torch_dtype(stored) == self.value_dtype
        # Requests that choose as many keys attend together: one launch, and not one for each.
        for width, group in groupby(choices, lambda choice: choice.positions.shape[1]):
            together = list(group)
            chosen = [choice.rows for choice in together if choice.rows is not None]
            if not readable or len(chosen) < len(together):
                for choice in together:
                    self._attend_copies(rows, values, choice, out)
                continue
            first, last = together[0].first, together[-1].last
            every_row = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
            assert every_row.shape == (last - first, width)
            out[first:last] = self._attended(values[first:last], rows.latent.view(self.value_dtype), every_row)
        return out

    def _attend_copies(self, rows: LayerRows, values: torch.Tensor, choice: Choice, out: torch.Tensor) -> None:
        """A few queries at a time; a missing token has the row of the query's first chosen one, which is not read."""
        width = choice.positions.shape[1]
        size = max(1, self.workspace_bytes // (width * self.row_format.latent_width * values.itemsize))
        if choice.rows is None:
            # The view's buffer for fetched rows holds those of so many queries.
            size = min(size, self.blocks.most_rows(width) // width)
        for first in range(choice.first, choice.last, size):
            last = min(choice.last, first + size)
            positions = choice.positions[first - choice.first : last - choice.first].to(torch.int64)
            missing = positions < 0
            chosen = rows.chosen_rows(choice.segment, torch.where(missing, positions[:, :1], positions))
            latent = self.kernels.decode_latent_rows(chosen.flatten(0, 1), self.row_format, self.value_dtype)
            numbers = torch.arange(missing.numel(), dtype=torch.int32, device=missing.device).view(missing.shape)
            out[first:last] = self._attended(values[first:last], latent, numbers.masked_fill(missing, -1))

    def _attended(self, queries: torch.Tensor, latent: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        attended, _ = self.kernels.sparse_mla_rows(
            queries, latent, rows, scale=self.scale, kv_lora_rank=self.row_format.kv_lora_rank
        )
        return attended


def _apart(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 rows [n, dim + 4] as float8_e4m3fn [n, dim] and scales fp32 [n], each contiguous."""
    values = stored[:, :-FP8_SCALE_BYTES].contiguous().view(torch.float8_e4m3fn)
    scales = stored[:, -FP8_SCALE_BYTES:].contiguous().view(torch.float32)
    return values, scales.flatten()
