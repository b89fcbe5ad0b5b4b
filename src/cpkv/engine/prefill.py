"""The prefill scheduler: admits requests, cuts batches, runs them on every rank, hands the pages to the decode worker.

waiting -> admitted (pages of the whole prompt) -> batches -> last logits -> first token -> transfer -> pages free
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.engine.cluster import Cluster
from cpkv.engine.commands import BatchDone, DrainTransfers, PagesReport, PoisonPages, RunBatch, SendPages, Trace
from cpkv.engine.request import Request, check_request
from cpkv.engine.sampling import sample_token
from cpkv.engine.tensors import bytes_tensor
from cpkv.errors import CapacityError, CpkvError, PromptError, ProtocolError, WorkerDiedError
from cpkv.layout.plan import BatchSpec, Segment
from cpkv.layout.planner import ViewChoice
from cpkv.layout.schedule import Piece, next_batch
from cpkv.layout.transfer_map import sender_of_positions
from cpkv.model.norms import compute_dtype_of
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.protocol.messages import AbortTransfer, Done, FinishTransfer, OpenTransfer, TransferComplete, TransferOpened

LOG = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class BatchReport:
    """What one batch cost.

    Attributes:
        view: which view it used.
        reason: why that one.
        tokens: computed, over all requests.
        planned_bytes: that the planner expected page gathers to bring to a rank.
        moved_bytes: that they brought to the rank that got most.
        scratch_bytes: that the rank which held most held beside its pool.
        seconds: of the slowest rank.
        slowest_rank: which one that was.
    """

    view: str
    reason: str
    tokens: int
    planned_bytes: int
    moved_bytes: int
    scratch_bytes: int
    seconds: float
    slowest_rank: int


@dataclass
class PrefillReport:
    """What a prefill run did.

    Attributes:
        last_logits: request -> logits [vocab_size] of its last prompt token.
        first_tokens: request -> the token sampled from them.
        failures: request -> why its transfer failed; other requests went on.
        sent_pages: pages sent by rank.
        sent_bytes: bytes sent by rank.
        batches: what each batch cost, in order.
        compute_seconds: spent in batches.
        transfer_seconds: spent in transfers.
    """

    last_logits: dict[str, torch.Tensor] = field(default_factory=dict)
    first_tokens: dict[str, int] = field(default_factory=dict)
    failures: dict[str, CpkvError] = field(default_factory=dict)
    sent_pages: list[int] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    batches: list[BatchReport] = field(default_factory=list)
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0


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
        self._undrained: list[str] = []

    def run(self, requests: Sequence[Request]) -> PrefillReport:
        """Prefill requests and hand each to the decode worker, in order of arrival.

        A request whose transfer fails is reported in `failures`; its pages are freed once nothing can read them.

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
        report = PrefillReport(sent_pages=[0] * ranks, sent_bytes=[0] * ranks)
        self._release_drained()
        waiting, admitted = deque(requests), list[Admitted]()
        while waiting or admitted:
            self._admit(waiting, admitted, report)
            if not admitted:
                break
            started = time.perf_counter()
            self._run_batch(admitted, report)
            report.compute_seconds += time.perf_counter() - started
            for entry in [entry for entry in admitted if entry.done_tokens == entry.total_tokens]:
                admitted.remove(entry)
                started = time.perf_counter()
                self._hand_over(entry, report)
                report.transfer_seconds += time.perf_counter() - started
        self.allocator.check()
        return report

    def _admit(self, waiting: deque[Request], admitted: list[Admitted], report: PrefillReport) -> None:
        while waiting:
            request = waiting[0]
            try:
                pages = self.allocator.allocate(request.request_id, self._placement.pages_for(len(request.token_ids)))
            except CapacityError:
                if not admitted:
                    raise
                return
            waiting.popleft()
            entry = Admitted(request, pages)
            try:
                chunk = self._cluster.settings.chunk_size
                self._planner.check_request(request.request_id, entry.total_tokens, pages, chunk)
            except CapacityError as error:
                report.failures[request.request_id] = error
                LOG.warning("request %s is refused: %s", request.request_id, error)
                self.allocator.free(request.request_id)
                continue
            admitted.append(entry)

    def _run_batch(self, admitted: list[Admitted], report: PrefillReport) -> None:
        settings = self._cluster.settings
        pieces, segments, choice = self._next_batch(admitted)
        spec = BatchSpec(self._batches, segments, settings.cp_strategy, choice.view)
        replies = self._cluster.call_ranks(RunBatch(spec, self._trace))
        self._batches += 1
        self._note_batch(spec, choice, list(replies.values()), report)
        dtype = compute_dtype_of(torch_dtype(settings.dtype))
        last_logits = {
            request_id: bytes_tensor(raw, dtype)
            for reply in replies.values()
            for request_id, raw in reply.last_logits.items()
        }
        for piece in pieces:
            entry = admitted[piece.request]
            entry.done_tokens = piece.end
            if piece.end == entry.total_tokens:
                entry.last_logits = last_logits[entry.request.request_id]

    def _next_batch(self, admitted: Sequence[Admitted]) -> tuple[tuple[Piece, ...], tuple[Segment, ...], ViewChoice]:
        """The next batch that fits the scratch: requests that came last wait for a later one."""
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

    def _note_batch(self, spec: BatchSpec, choice: ViewChoice, replies: list[BatchDone], report: PrefillReport) -> None:
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
        report.batches.append(batch)
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

    def _hand_over(self, entry: Admitted, report: PrefillReport) -> None:
        """Sample the first token, send the pages, free them."""
        request = entry.request
        assert entry.last_logits is not None
        first_token = sample_token(entry.last_logits, request.sampling, 0)
        report.last_logits[request.request_id] = entry.last_logits
        # Drawn, not counted, so that no late message of another run or scheduler is taken for one of this attempt.
        attempt = secrets.randbits(63)
        try:
            opened = self._open_transfer(entry, attempt)
        except WorkerDiedError:
            raise
        except CpkvError as error:
            report.failures[request.request_id] = error
            LOG.warning("request %s: the decode worker did not take it: %s", request.request_id, error)
            self._poison(self.allocator.free(request.request_id))
            return
        try:
            self._send(entry, opened, first_token, report)
        except WorkerDiedError:
            raise
        except CpkvError as error:
            report.failures[request.request_id] = error
            LOG.warning("request %s: its transfer failed: %s", request.request_id, error)
            self._clean_up(request.request_id, attempt, str(error))
            return
        report.first_tokens[request.request_id] = first_token
        self._poison(self.allocator.free(request.request_id))

    def _open_transfer(self, entry: Admitted, attempt: int) -> TransferOpened:
        request = entry.request
        opened = self._cluster.ask_decode(
            OpenTransfer(
                request_id=request.request_id,
                attempt=attempt,
                prompt_tokens=entry.total_tokens,
                max_new_tokens=request.max_new_tokens,
                senders=sender_of_positions(entry.pages, self._placement, len(self._cluster.ranks)),
                sampling=request.sampling,
            ),
            TransferOpened,
        )
        if (opened.request_id, opened.attempt) != (request.request_id, attempt):
            raise ProtocolError(f"request {request.request_id}: the decode worker opened {opened.request_id} instead")
        return opened

    def _send(self, entry: Admitted, opened: TransferOpened, first_token: int, report: PrefillReport) -> None:
        name, attempt = opened.request_id, opened.attempt
        replies = self._cluster.call_ranks(SendPages(name, attempt, entry.pages, opened.pages))
        for rank, worker in enumerate(self._cluster.ranks):
            sent: PagesReport = replies[worker]
            report.sent_pages[rank] += sent.pages
            report.sent_bytes[rank] += sent.num_bytes
        self._cluster.ask_decode(FinishTransfer(name, attempt, first_token), TransferComplete)

    def _clean_up(self, request_id: str, attempt: int, cause: str) -> None:
        """After a failed transfer: the decode worker quarantines its pages, ours wait until no write reads them."""
        self.allocator.quarantine(request_id)
        try:
            self._cluster.ask_decode(AbortTransfer(request_id, attempt, cause, writes_may_land=True), Done)
        except WorkerDiedError:
            raise
        except CpkvError as error:
            LOG.warning("request %s: the decode worker did not take the abort: %s", request_id, error)
        self._undrained.append(request_id)
        self._release_drained()
        if self._undrained:
            LOG.warning("request %s: its pages stay in quarantine, a write may still read them", request_id)

    def _release_drained(self) -> None:
        """Free the pages of failed transfers once no write can read them any more."""
        if self._undrained and all(reply.drained for reply in self._cluster.call_ranks(DrainTransfers()).values()):
            for request_id in self._undrained:
                self._poison(self.allocator.release_quarantine(request_id))
            self._undrained.clear()

    def _poison(self, pages: tuple[int, ...]) -> None:
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
