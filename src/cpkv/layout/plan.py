"""The plan of one batch: which rank computes, writes and gathers what. Made once, then only read.

A batch is a list of segments; a segment is the part of one request that is computed now (`current`), behind the
part that earlier chunks stored (`history`). With page_size 4 and cp_size 4, a request in its second chunk:

    pos       0 1 2 3 | 4 5 6 7 | 8 9
    page         4    |    9    |  6       pages of the request, by logical page position
    owner        0    |    1    |  2
              history .......|  current    start = 6: the chunk begins inside page 9, which rank 1 owns

Every rank builds the same plan from the same `BatchSpec`, so no rank decides alone whether a collective runs or
how large it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from cpkv.config.names import SplitStrategy, ViewName
from cpkv.errors import PlanError
from cpkv.layout.page_gather import PageGather
from cpkv.layout.placement import PagePlacement
from cpkv.layout.split import IntArray, TokenSplit, split_tokens


class Segment(msgspec.Struct, frozen=True):
    """The part of one request that a batch computes.

    Attributes:
        request_id: names the request in logs and errors.
        start: history tokens; the position of the first token computed now.
        token_ids: the tokens computed now.
        pages: logical pages of the request by logical page position, for history and current tokens.
        is_last: the prompt ends here, so the logits of its last token are wanted.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    is_last: bool

    @property
    def length(self) -> int:
        """Tokens computed now."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Tokens of the request that are stored once this batch is done."""
        return self.start + len(self.token_ids)


class BatchSpec(msgspec.Struct, frozen=True):
    """What the scheduler sends to every rank: plain data from which the plan follows."""

    batch_number: int
    segments: tuple[Segment, ...]
    strategy: SplitStrategy
    view: ViewName

    def digest(self) -> str:
        """A digest of every field; ranks whose digests differ hold different plans."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


@dataclass(frozen=True)
class LocalTokens:
    """The tokens that one rank computes, by request, ascending in position.

    Attributes:
        packed: [n] token numbers in the packed batch.
        positions: [n] positions in their requests (global, never local to a chunk or a rank).
        token_ids: [n] vocabulary ids.
        runs: (segment number, first, last + 1) of each segment's slice of these arrays; segments without a token
            here are left out.
    """

    packed: IntArray
    positions: IntArray
    token_ids: IntArray
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class PageWrites:
    """The rows that one rank writes: the packed tokens, and for each its place in the rank's pool."""

    packed: IntArray
    local_pages: IntArray
    offsets: IntArray


@dataclass(frozen=True)
class BatchPlan:
    """Everything that follows from a `BatchSpec`, the number of ranks and the placement of the pool.

    The placement's cp_size is the number of ranks for a shared pool, and 1 for a replicated one, where every rank
    holds and writes every page.
    """

    spec: BatchSpec
    placement: PagePlacement
    cp_size: int
    split: TokenSplit
    offsets: tuple[int, ...]
    segment_of_token: IntArray
    positions: IntArray
    token_ids: IntArray
    pages: IntArray

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, over all segments."""
        return len(self.positions)

    @classmethod
    def build(cls, spec: BatchSpec, placement: PagePlacement, cp_size: int) -> BatchPlan:
        """Derive the plan.

        Raises:
            PlanError: a segment's pages do not cover its tokens, hold a reserved page, or the view cannot serve
                the batch.
        """
        _check(spec, placement, cp_size)
        segments = spec.segments
        lengths = [segment.length for segment in segments]
        positions = np.concatenate([np.arange(segment.start, segment.end) for segment in segments])
        pages = np.concatenate(
            [
                np.asarray(segment.pages, dtype=np.int64)[np.arange(segment.start, segment.end) // placement.page_size]
                for segment in segments
            ]
        )
        return cls(
            spec=spec,
            placement=placement,
            cp_size=cp_size,
            split=split_tokens(lengths, cp_size, spec.strategy),
            offsets=tuple(int(offset) for offset in np.cumsum([0, *lengths])),
            segment_of_token=np.repeat(np.arange(len(segments)), lengths),
            positions=positions,
            token_ids=np.concatenate([np.asarray(segment.token_ids, dtype=np.int64) for segment in segments]),
            pages=pages,
        )

    def local_tokens(self, rank: int) -> LocalTokens:
        """The tokens that a rank computes."""
        packed = self.split.rank_tokens[rank]
        segment_numbers = self.segment_of_token[packed]
        bounds = np.searchsorted(segment_numbers, np.arange(len(self.spec.segments) + 1))
        runs = tuple(
            (number, int(first), int(last))
            for number, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
            if last > first
        )
        return LocalTokens(packed, self.positions[packed], self.token_ids[packed], runs)

    def pool_owner(self, rank: int) -> int:
        """The owner class whose pages a rank stores: its own, or the only one where every rank stores every page."""
        return rank if self.placement.cp_size > 1 else 0

    def page_writes(self, owner: int) -> PageWrites:
        """The rows of the batch that an owner stores."""
        packed = np.flatnonzero(self.placement.owner(self.pages) == owner)
        local_pages = self.placement.local_page(self.pages[packed])
        return PageWrites(packed, local_pages, self.positions[packed] % self.placement.page_size)

    @cached_property
    def history(self) -> PageGather:
        """The gather of the pages that hold history, by segment."""
        return PageGather.of([self.history_pages(number) for number in range(len(self.spec.segments))], self.placement)

    @cached_property
    def everything(self) -> PageGather:
        """The gather of all pages of the batch, by segment."""
        return PageGather.of([self._pages(segment, segment.end) for segment in self.spec.segments], self.placement)

    def history_pages(self, segment: int) -> IntArray:
        """The logical pages of a segment that hold its history."""
        return self._pages(self.spec.segments[segment], self.spec.segments[segment].start)

    def _pages(self, segment: Segment, tokens: int) -> IntArray:
        return np.asarray(segment.pages[: self.placement.pages_for(tokens)], dtype=np.int64)


def _check(spec: BatchSpec, placement: PagePlacement, cp_size: int) -> None:
    owners = 1 if spec.view in ("replicated", "layer-split") else cp_size
    if placement.cp_size != owners:
        raise PlanError(
            f"view {spec.view} over {cp_size} ranks reads pools of {owners} owners, and these have {placement.cp_size}"
        )
    if not spec.segments:
        raise PlanError(f"batch {spec.batch_number} holds no request")
    for segment in spec.segments:
        needed = placement.pages_for(segment.end)
        if len(segment.pages) < needed:
            raise PlanError(
                f"request {segment.request_id} has {len(segment.pages)} pages and needs {needed} for "
                f"{segment.end} tokens"
            )
        reserved = [page for page in segment.pages if page < placement.reserved_pages]
        if reserved:
            raise PlanError(f"request {segment.request_id} holds page {reserved[0]}, which is reserved or no page")
    if spec.view == "current" and any(segment.start for segment in spec.segments):
        raise PlanError(f"batch {spec.batch_number} has history, which the view `current` does not hold; use `mixed`")
