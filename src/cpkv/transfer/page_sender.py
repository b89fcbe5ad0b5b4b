"""One prefill rank's side of transfers: the pages that it owns, each to its place at the decode side.

rank 2 owns positions 0 and 4 of a request      position 0: local page 1 -> local page 7 of decode owner 0
                                                position 4: local page 2 -> local page 3 of decode owner 0
per page two runs: latent bytes, index bytes

SendOrder -> parts: writes in flight -> done -> PagesSent to the decode worker -> PagesTaken -> TakenNews
                      |                                                  `-> damaged pages are sent once more
                      `-> failed, or stopped -> FailedNews; nothing under way any more -> DrainedNews

An order is cut into parts, of which few are at the engine at a time. So a long transfer is seen to move on, and where
one is stopped, what is at the engine goes on to its end: "done" then says that its bytes have landed. A write that
failed, or was cancelled, may still land, and `DrainedNews` says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cpkv.errors import CpkvError, ProtocolError, TransferError
from cpkv.layout.transfer_map import PageMove
from cpkv.protocol.attempts import EndedAttempts
from cpkv.protocol.messages import PagesSent, PagesTaken, TransferTarget
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.report_link import ReportLink
from cpkv.transfer.runs import Peer, Region, Runs

PART_BYTES = 128 << 20
# The engine has the next part when it ends one, so that it never runs dry.
PARTS_AT_ONCE = 2


class PageSource(Protocol):
    """Where pages lie; `PagePool` is one."""

    def regions(self) -> Sequence[ByteSpan]:
        """The allocations: latent rows, then index keys."""

    def page_spans(self, local_page: int) -> Sequence[ByteSpan]:
        """The bytes of one page in each allocation; page p lies p lengths behind page 0."""

    def page_digest(self, local_page: int) -> str:
        """SHA-256 over the bytes of one page."""


class ByteSpan(Protocol):
    """A run of memory: its address, and its length in bytes."""

    @property
    def address(self) -> int:
        """Where it begins."""

    @property
    def length(self) -> int:
        """How long it is."""


class SendOrder(NamedTuple):
    """Pages of one attempt to send now; an attempt may get several."""

    request_id: str
    attempt: int
    moves: tuple[PageMove, ...]
    targets: tuple[TransferTarget, ...]


class TakenNews(NamedTuple):
    """These positions have arrived; no write of them is under way."""

    request_id: str
    attempt: int
    positions: tuple[int, ...]
    num_bytes: int


class FailedNews(NamedTuple):
    """An attempt cannot go on; `DrainedNews` follows once no write of it is under way."""

    request_id: str
    attempt: int
    error: CpkvError


class DrainedNews(NamedTuple):
    """No page of an attempt is read any more, and none will be.

    Attributes:
        writes_may_land: a write failed at the engine, which is no fence: it may still land at the decode side.
    """

    request_id: str
    attempt: int
    writes_may_land: bool


News = TakenNews | FailedNews | DrainedNews


class _Part(NamedTuple):
    """Pages that travel as one transfer, to one decode owner.

    Attributes:
        moves: the pages.
        positions: of each page.
        digests: of each page before it left; empty unless they are sent along.
    """

    moves: list[PageMove]
    positions: tuple[int, ...]
    digests: tuple[str, ...]


@dataclass(eq=False)
class _Job:
    """What is under way of one attempt: pages that wait, writes by transfer id, reports that wait for their answer."""

    request_id: str
    attempt: int
    targets: tuple[TransferTarget, ...]
    waiting: list[PageMove] = field(default_factory=list)
    writes: dict[int, _Part] = field(default_factory=dict)
    reports: dict[int, _Part] = field(default_factory=dict)
    stopped: bool = False
    writes_may_land: bool = False


class PageSender:
    """Sends pages of one pool. It never blocks: whoever owns it calls `step` until nothing is `busy`.

    Args:
        rank: this rank.
        backend: moves bytes; the pool's allocations are registered with it here.
        pool: where the pages lie.
        connect: makes a connection to the decode worker; called again after one broke.
        digest_pages: send a digest of each page along, which the decode worker compares.
        part_bytes: what is handed to the engine and reported at a time; one page at least.

    Raises:
        TransferError: the memory cannot be registered.
    """

    def __init__(
        self,
        rank: int,
        backend: TransferBackend,
        pool: PageSource,
        connect: Callable[[], ReportLink],
        *,
        digest_pages: bool = False,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._rank = rank
        self._backend = backend
        self._pool = pool
        self._connect = connect
        self._digest_pages = digest_pages
        self._link: ReportLink | None = None
        self._jobs: dict[tuple[str, int], _Job] = {}
        self._ended = EndedAttempts()
        self._news: deque[News] = deque()
        self._next_report = 0
        # One look, since asking for each page costs more than copying a small one.
        self._first_page = tuple(pool.page_spans(0))
        self._page_bytes = sum(span.length for span in self._first_page)
        self._part_pages = max(1, part_bytes // self._page_bytes)
        self._regions: list[Region] = []
        try:
            for span in pool.regions():
                region = Region(span.address, span.length)
                backend.register(region)
                self._regions.append(region)
        except CpkvError:
            for region in self._regions:
                backend.unregister(region)
            raise

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._jobs)

    def take_news(self) -> tuple[News, ...]:
        """What happened since the last call, in order."""
        news = tuple(self._news)
        self._news.clear()
        return news

    def order(self, order: SendOrder) -> None:
        """Begin to send pages; what comes of it is told by news. An empty order does nothing."""
        if not order.moves:
            return
        # A connection that broke before this order, to a decode worker that is another one by now, must not fail it.
        self._take_answers()
        key = (order.request_id, order.attempt)
        job = self._jobs.get(key)
        cause = self._ended.cause_of(order.attempt)
        if job is None and cause is not None:
            # Nothing may leave after `DrainedNews`, and the scheduler may have given this order before it read that.
            error = f"rank {self._rank} sends no more of request {order.request_id}: {cause}"
            self._news.append(FailedNews(order.request_id, order.attempt, TransferError(error)))
            return
        if job is None:
            job = self._jobs[key] = _Job(order.request_id, order.attempt, order.targets)
        if job.stopped:
            return
        job.waiting.extend(order.moves)
        try:
            if self._link is None:
                self._link = self._connect()
        except CpkvError as error:
            self._fail(job, error)
        self._feed(job)

    def stop(self, request_id: str, attempt: int) -> None:
        """Submit no more of an attempt; `DrainedNews` follows, at the next step when nothing is under way."""
        job = self._jobs.setdefault((request_id, attempt), _Job(request_id, attempt, ()))
        self._stop(job, "it was stopped")

    def step(self) -> bool:
        """Move everything on as far as it goes without waiting; whether anything moved."""
        moved = False
        for job in list(self._jobs.values()):
            moved |= self._settle_writes(job)
        moved |= self._take_answers()
        for key, job in list(self._jobs.items()):
            self._feed(job)
            if job.waiting or job.writes or job.reports:
                continue
            if job.stopped:
                self._news.append(DrainedNews(job.request_id, job.attempt, job.writes_may_land))
            del self._jobs[key]
            moved = True
        return moved

    def wait(self, timeout_s: float) -> bool:
        """Wait as the engine waits best until the oldest write has ended; False at once where none is under way."""
        oldest = min((transfer_id for job in self._jobs.values() for transfer_id in job.writes), default=None)
        if oldest is None:
            return False
        self._backend.wait(oldest, timeout_s)
        return True

    def heartbeat(self) -> None:
        """Tell the decode worker that this prefill lives, also before its first page.

        Whether that worker is there shows when pages are sent.
        """
        try:
            if self._link is None:
                self._link = self._connect()
            self._link.heartbeat()
        except CpkvError as error:
            self._link_lost(error)

    def close(self, drain_s: float) -> bool:
        """Stop everything, take the pool's memory back from the engine, and close the connection.

        Returns:
            Whether the engine can still be used; it was closed when a write did not end within `drain_s` seconds.
        """
        for job in list(self._jobs.values()):
            self._stop(job, "the sender was closed")
            self._cancel(job)
        drained = self._backend.drain(drain_s)
        if drained:
            for region in self._regions:
                self._backend.unregister(region)
        else:
            self._backend.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        return drained

    def _feed(self, job: _Job) -> None:
        """Hand the next parts to the engine."""
        try:
            while job.waiting and len(job.writes) < PARTS_AT_ONCE:
                self._submit(job, self._next_part(job))
        except CpkvError as error:
            self._fail(job, error)

    def _next_part(self, job: _Job) -> list[PageMove]:
        """The next pages for one owner; owner after owner, since the order of moves keeps ranks apart."""
        part = job.waiting[: self._part_pages]
        owner = part[0].owner
        pages = next((number for number, move in enumerate(part) if move.owner != owner), len(part))
        del job.waiting[:pages]
        return part[:pages]

    def _submit(self, job: _Job, moves: list[PageMove]) -> None:
        """One transfer; digests are taken before the bytes leave."""
        owner = moves[0].owner
        if not 0 <= owner < len(job.targets):
            raise ProtocolError(f"request {job.request_id}: a page goes to decode owner {owner} of {len(job.targets)}")
        target = job.targets[owner]
        if len(target.regions) != len(self._regions):
            raise ProtocolError(
                f"request {job.request_id}: decode owner {owner} names {len(target.regions)} regions, and pages have "
                f"bytes in {len(self._regions)}"
            )
        peer = Peer(target.session_id, tuple(Region(region.address, region.length) for region in target.regions))
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        # Region by region, so that neighbouring pages can be merged into one write.
        spans = zip(self._first_page, target.regions, strict=True)
        runs = Runs.of_pages(sources, targets, [(span.address, region.address, span.length) for span, region in spans])
        digests = tuple(map(self._pool.page_digest, sources)) if self._digest_pages else ()
        positions = tuple([move.position for move in moves])
        job.writes[self._backend.submit(peer, runs)] = _Part(moves, positions, digests)

    def _settle_writes(self, job: _Job) -> bool:
        moved = False
        for transfer_id, part in list(job.writes.items()):
            status = self._backend.poll(transfer_id)
            if status.state == "pending":
                continue
            moved = True
            del job.writes[transfer_id]
            if status.state == "failed":
                job.writes_may_land = True
                self._cancel(job)
                if not job.stopped:
                    error = f"rank {self._rank} could not send {len(part.moves)} pages of request {job.request_id}"
                    self._fail(job, TransferError(f"{error}: {status.cause}"))
            elif not job.stopped:
                self._report(job, part)
        return moved

    def _report(self, job: _Job, part: _Part) -> None:
        report = self._next_report
        self._next_report += 1
        job.reports[report] = part
        try:
            if self._link is None:
                raise TransferError(f"rank {self._rank} lost its connection to the decode worker")
            self._link.post(PagesSent(job.request_id, job.attempt, self._rank, report, part.positions, part.digests))
        except TransferError as error:
            self._link_lost(error)

    def _take_answers(self) -> bool:
        if self._link is None:
            return False
        try:
            answers = self._link.answers()
        except TransferError as error:
            self._link_lost(error)
            return True
        for question, answer in answers:
            self._take_answer(question, answer)
        return bool(answers)

    def _take_answer(self, question: PagesSent, answer: PagesTaken | CpkvError) -> None:
        job = self._jobs.get((question.request_id, question.attempt))
        part = job.reports.pop(question.report, None) if job is not None else None
        if job is None or part is None or job.stopped:
            return
        if isinstance(answer, CpkvError):
            self._fail(job, answer)
            return
        if (answer.request_id, answer.attempt, answer.report) != (job.request_id, job.attempt, question.report):
            self._link_lost(ProtocolError(f"the decode worker answered {answer} to {question}"))
            return
        arrived = part.positions
        if answer.damaged:
            arrived = tuple(position for position in arrived if position not in answer.damaged)
            job.waiting.extend(move for move in part.moves if move.position in answer.damaged)
        if arrived:
            num_bytes = len(arrived) * self._page_bytes
            self._news.append(TakenNews(job.request_id, job.attempt, arrived, num_bytes))

    def _link_lost(self, error: CpkvError) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        for job in list(self._jobs.values()):
            if not job.stopped:
                self._fail(job, error)

    def _fail(self, job: _Job, error: CpkvError) -> None:
        self._news.append(FailedNews(job.request_id, job.attempt, error))
        self._stop(job, str(error))

    def _stop(self, job: _Job, cause: str) -> None:
        """What is at the engine goes on to its end: cancelled, nobody could say whether its bytes have landed."""
        job.stopped = True
        job.waiting.clear()
        job.reports.clear()
        self._ended.end(job.attempt, cause)

    def _cancel(self, job: _Job) -> None:
        for transfer_id in job.writes:
            self._backend.cancel(transfer_id)
