"""The prefill scheduler: admits requests, cuts batches, runs them on every rank, hands the pages to the decode worker.

waiting -> admitted (pages of the whole prompt, announced) -> batches -> last logits -> first token -> pages free
                                                                `-> whole pages of finished chunks leave meanwhile
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.engine.cluster import Cluster
from cpkv.engine.cluster_ranks import ClusterRanks
from cpkv.engine.commands import BatchDone, PoisonPages, RunBatch, Trace
from cpkv.engine.prefill_report import BatchReport, PrefillReport
from cpkv.engine.request import Request, check_request
from cpkv.engine.sampling import sample_token
from cpkv.engine.tensors import bytes_tensor
from cpkv.errors import CapacityError, CpkvError, PromptError, TransferError
from cpkv.layout.plan import BatchSpec, Segment
from cpkv.layout.planner import ViewChoice
from cpkv.layout.schedule import Piece, next_batch
from cpkv.layout.transfer_map import sender_of_positions
from cpkv.model.norms import compute_dtype_of
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.protocol.messages import OpenTransfer
from cpkv.protocol.sender import TransferSender
from cpkv.transfer.handover import Handover

LOG = logging.getLogger(__name__)
NEWS_WAIT_S = 0.02


@dataclass
class Admitted:
    """A request that holds pages."""

    request: Request
    pages: tuple[int, ...]
    done_tokens: int = 0
    last_logits: torch.Tensor | None = None

    @property
    def total_tokens(self) -> int:
        """Prompt tokens."""
        return len(self.request.token_ids)


class PrefillScheduler:
    """Runs requests through one pool of a cluster. The pool must be open in the same mode.

    Args:
        cluster: the workers.
        shared: one copy over the ranks, or every page on every rank.
        trace: what batches leave behind, if anything.
    """

    def __init__(self, cluster: Cluster, *, shared: bool, trace: Trace | None = None) -> None:
        self._cluster = cluster
        self._trace = trace
        self._placement = cluster.placement(shared)
        self.allocator = PageAllocator(cluster.pool_pages(shared), self._placement)
        self._planner = cluster.planner(shared)
        self._batches = 0
        self._last_choice = ("", "")
        self._waiting: deque[Request] = deque()
        self._admitted: list[Admitted] = []
        self._sampled: dict[str, int] = {}
        self._cancelled: queue.SimpleQueue[tuple[str, CpkvError]] = queue.SimpleQueue()
        self._report = PrefillReport()
        settings = cluster.settings
        self._handover = Handover(
            TransferSender(wait_s=settings.transfer_timeout_s, progress_s=settings.transfer_timeout_s),
            cluster.decode_connection,
            ClusterRanks(cluster, self.allocator.pages_of),
            on_end=self._on_end,
            on_free=self._on_free,
            on_taken=self._on_taken,
            on_quarantine=self.allocator.quarantine,
        )

    def run(self, requests: Sequence[Request]) -> PrefillReport:
        """Prefill requests and hand each to the decode worker.

        Pages of finished chunks leave while the next is computed. A request whose transfer fails is reported in
        `failures`; its pages are freed once nothing can read them.

        Raises:
            PromptError: a request cannot be served; nothing was started.
            WorkerDiedError: a worker died.
            CpkvError: the first cause that a rank reported.
        """
        for request in requests:
            check_request(request, self._cluster.shape, self._cluster.settings)
        if len({request.request_id for request in requests}) != len(requests):
            raise PromptError("two requests have one id; give each its own")
        ranks = len(self._cluster.ranks)
        self._report = PrefillReport(sent_pages=[0] * ranks, sent_bytes=[0] * ranks)
        self._waiting.extend(requests)
        try:
            self._run()
        except BaseException as error:
            cause = error if isinstance(error, CpkvError) else TransferError("the prefill was interrupted")
            self._handover.abandon(cause, ranks)
            raise
        self.allocator.check()
        return self._report

    def cancel(self, request_id: str, error: CpkvError) -> None:
        """Give a request up, between two batches; of a request that has ended nothing happens. Any thread may call it.

        Args:
            request_id: of a request that was given to `run`.
            error: why; `PrefillReport.failures` tells it.
        """
        self._cancelled.put((request_id, error))

    def _cancel(self) -> None:
        """Carry out what `cancel` asked for."""
        while not self._cancelled.empty():
            name, error = self._cancelled.get()
            for request in [request for request in self._waiting if request.request_id == name]:
                self._waiting.remove(request)
                self._report.failures[name] = error
            self._handover.cancel(name, error)

    def _run(self) -> None:
        """Batches and transfers until every request has ended."""
        while self._waiting or self._admitted or self._handover.open_requests:
            self._admit()
            self._cancel()
            started = time.perf_counter()
            if self._admitted:
                self._run_batch()
                self._report.compute_seconds += time.perf_counter() - started
                self._announce_progress()
                self._handover.pump()
            else:
                self._handover.pump(NEWS_WAIT_S)
                self._report.transfer_seconds += time.perf_counter() - started
        self._settle()

    def _admit(self) -> None:
        """Give pages to as many waiting requests as there are pages for, and announce them."""
        while self._waiting:
            request = self._waiting[0]
            try:
                pages = self.allocator.allocate(request.request_id, self._placement.pages_for(len(request.token_ids)))
            except CapacityError:
                if not (self._admitted or self._handover.open_requests or self._handover.closing_requests):
                    raise
                return
            self._waiting.popleft()
            entry = Admitted(request, pages)
            try:
                chunk = self._cluster.settings.chunk_size
                self._planner.check_request(request.request_id, entry.total_tokens, pages, chunk)
            except CapacityError as error:
                self._report.failures[request.request_id] = error
                LOG.warning("request %s is refused: %s", request.request_id, error)
                self.allocator.free(request.request_id)
                continue
            self._admitted.append(entry)
            senders = sender_of_positions(pages, self._placement, len(self._cluster.ranks))
            self._handover.begin(
                OpenTransfer(
                    request.request_id, 0, entry.total_tokens, request.max_new_tokens, senders, request.sampling
                )
            )

    def _announce_progress(self) -> None:
        """Every rank has completed the batch, so that its whole pages may leave; the tail page goes with the last."""
        for entry in list(self._admitted):
            name = entry.request.request_id
            if entry.done_tokens == entry.total_tokens:
                assert entry.last_logits is not None
                self._admitted.remove(entry)
                self._report.last_logits[name] = entry.last_logits
                self._sampled[name] = sample_token(entry.last_logits, entry.request.sampling, 0)
                self._handover.sampled(name, self._sampled[name])
            elif self._cluster.settings.overlap:
                self._handover.computed(name, entry.done_tokens // self._cluster.settings.page_size)

    def _run_batch(self) -> None:
        settings = self._cluster.settings
        pieces, segments, choice = self._next_batch()
        spec = BatchSpec(self._batches, segments, settings.cp_strategy, choice.view)
        replies = self._cluster.call_ranks(RunBatch(spec, self._trace))
        self._batches += 1
        self._note_batch(spec, choice, list(replies.values()))
        dtype = compute_dtype_of(torch_dtype(settings.dtype))
        last_logits = {
            request_id: bytes_tensor(raw, dtype)
            for reply in replies.values()
            for request_id, raw in reply.last_logits.items()
        }
        for piece in pieces:
            entry = self._admitted[piece.request]
            entry.done_tokens = piece.end
            if piece.end == entry.total_tokens:
                entry.last_logits = last_logits[entry.request.request_id]

    def _next_batch(self) -> tuple[tuple[Piece, ...], tuple[Segment, ...], ViewChoice]:
        """The next batch that fits the scratch: requests that came last wait for a later one."""
        admitted = self._admitted
        progress = [(entry.done_tokens, entry.total_tokens) for entry in admitted]
        pieces = next_batch(progress, self._cluster.settings.chunk_size)
        if self._cluster.settings.kv_view == "current" and pieces[-1].end < progress[pieces[-1].request][1]:
            # It would have history in the next batch; it fits into that one whole.
            pieces = pieces[:-1]
        while True:
            segments = tuple(_segment(admitted[piece.request], piece.start, piece.end) for piece in pieces)
            try:
                return pieces, segments, self._planner.choose(segments)
            except CapacityError:
                if len(pieces) == 1:
                    raise
                pieces = pieces[:-1]

    def _note_batch(self, spec: BatchSpec, choice: ViewChoice, replies: list[BatchDone]) -> None:
        if (choice.view, choice.reason) != self._last_choice:
            self._last_choice = (choice.view, choice.reason)
            LOG.info("from batch %d on: view %s, since %s", spec.batch_number, choice.view, choice.reason)
        batch = BatchReport(
            view=spec.view,
            reason=choice.reason,
            tokens=sum(segment.length for segment in spec.segments),
            planned_bytes=choice.cost.moved_bytes,
            moved_bytes=max(reply.cost.moved_bytes for reply in replies),
            scratch_bytes=max(reply.cost.scratch_bytes for reply in replies),
            seconds=max(reply.seconds for reply in replies),
            slowest_rank=max(range(len(replies)), key=lambda rank: replies[rank].seconds),
        )
        self._report.batches.append(batch)
        LOG.info(
            "batch %d: %d tokens of %d requests, view %s, %d bytes moved and %d held per rank, %.3f s on rank %d",
            spec.batch_number,
            batch.tokens,
            len(spec.segments),
            batch.view,
            batch.moved_bytes,
            batch.scratch_bytes,
            batch.seconds,
            batch.slowest_rank,
        )

    def _settle(self) -> None:
        """Wait, within bounds, until the pages of failed transfers are free."""
        deadline = time.monotonic() + self._cluster.settings.transfer_timeout_s
        while self._handover.closing_requests and time.monotonic() < deadline:
            self._handover.pump(NEWS_WAIT_S)
        for name in self._handover.closing_requests:
            LOG.warning("request %s: its pages stay in quarantine, a write may still read them", name)

    def _on_taken(self, rank: int, pages: int, num_bytes: int) -> None:
        self._report.sent_pages[rank] += pages
        self._report.sent_bytes[rank] += num_bytes

    def _on_end(self, request_id: str, error: CpkvError | None) -> None:
        first_token = self._sampled.pop(request_id, None)
        self._admitted[:] = [entry for entry in self._admitted if entry.request.request_id != request_id]
        if error is not None:
            self._report.failures[request_id] = error
            LOG.warning("request %s: its transfer failed: %s", request_id, error)
        elif first_token is not None:
            self._report.first_tokens[request_id] = first_token

    def _on_free(self, request_id: str) -> None:
        pages = self.allocator.reclaim(request_id)
        if self._cluster.settings.debug:
            self._cluster.call_ranks(PoisonPages(pages))


def _segment(entry: Admitted, start: int, end: int) -> Segment:
    """Tokens `start` to `end` - 1 of an admitted request."""
    return Segment(
        request_id=entry.request.request_id,
        start=start,
        token_ids=entry.request.token_ids[start:end],
        pages=entry.pages,
        is_last=end == entry.total_tokens,
    )
