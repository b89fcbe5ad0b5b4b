"""The harness's scheduler: what the engine's does, with chunks that are filled and steps that are compared.

queued -> announced -> computing, chunk by chunk -> sending -> decoding -> right
   |          |             |                          |          |
   `----------`-------------`--------------------------`----------`------> aborted by its client, or failed with a cause
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from cpkv.config.settings import EngineSettings
from cpkv.errors import CapacityError, CpkvError, TransferError, WorkerDiedError
from cpkv.layout.schedule import next_batch
from cpkv.layout.transfer_map import sender_of_positions
from cpkv.protocol.messages import DecodeStep, OpenTransfer, ReleaseRequest, RowDigest, Sampling
from cpkv.testing.faults.commands import PageFill
from cpkv.testing.faults.contents import VOCAB_SIZE, content_seed, expected_digest, seeded_geometry
from cpkv.testing.faults.plan import FaultPlan, Moment, PlannedRequest
from cpkv.testing.faults.processes import PrefillGroup
from cpkv.testing.faults.tries import Outcomes, Try

LOG = logging.getLogger(__name__)
CHUNK_PAGES = 8
IDLE_WAIT_S = 0.01
RELEASE_AGAIN_S = 1.0


class SeededScheduler:
    """Requests of all lives of the prefill.

    Args:
        settings: of the workers.
        plan: what is asked.
        outcomes: judges every end.
        note: told before what a fault may wait for.
        keep_going: told when something begins.
    """

    def __init__(
        self,
        settings: EngineSettings,
        plan: FaultPlan,
        outcomes: Outcomes,
        *,
        note: Callable[[Moment], None],
        keep_going: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._outcomes = outcomes
        self._note = note
        self._keep_going = keep_going
        self._waiting: deque[tuple[PlannedRequest, int]] = deque()
        self._admitted: list[Try] = []
        self._owed_releases: list[str] = []
        self._release_at = 0.0
        self._arrived = 0

    @property
    def unfinished(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._waiting) + len(self._admitted)

    @property
    def owes_releases(self) -> bool:
        """Whether the decode worker still has to be told of requests that are over."""
        return bool(self._owed_releases)

    def arrive(self, count: int) -> None:
        """The next requests of the plan."""
        for planned in self._plan.requests[self._arrived : self._arrived + count]:
            self.queue(planned, 0)
        self._arrived += count

    def queue(self, planned: PlannedRequest, number: int) -> None:
        """A request arrives, or comes again."""
        self._waiting.append((planned, number))

    def fail_all(self, error: CpkvError) -> None:
        """A life of the prefill is over, and everything that it had admitted."""
        for tried in list(self._admitted):
            self._end_failed(tried, error)
        self._owed_releases.clear()

    def turn(self, group: PrefillGroup) -> None:
        """Everything once.

        Raises:
            WorkerDiedError: a rank has ended.
        """
        self._admit(group)
        self._compute(group)
        self._abort(group)
        busy = any(tried.phase in ("announced", "computing") for tried in self._admitted)
        group.handover.pump(0.0 if busy else IDLE_WAIT_S)
        self._decode_steps(group)
        self._abort(group)
        self._release_owed(group)

    def _admit(self, group: PrefillGroup) -> None:
        for planned, number in list(self._waiting):
            if planned.abort is not None and planned.abort.phase == "queued":
                self._waiting.remove((planned, number))
                self._outcomes.never_admitted(planned)
                continue
            name = planned.request_id
            if name in group.handover.closing_requests:
                continue
            try:
                pages = group.allocator.allocate(name, group.placement.pages_for(planned.prompt_tokens))
            except CapacityError:
                return
            self._waiting.remove((planned, number))
            seed = content_seed(self._plan.seed, name, number, group.instance)
            self._admitted.append(Try(planned, number, seed, pages, time.monotonic()))
            self._keep_going()
            senders = sender_of_positions(pages, group.placement, self._settings.cp_size)
            LOG.info("request %s: try %d admitted by %s", name, number, group.instance)
            group.handover.begin(
                OpenTransfer(name, 0, planned.prompt_tokens, planned.steps + 1, senders, Sampling(seed=seed))
            )

    def _compute(self, group: PrefillGroup) -> None:
        computing = [tried for tried in self._admitted if tried.phase in ("announced", "computing")]
        page_size = self._settings.page_size
        pieces = next_batch(
            [(tried.done_tokens, tried.planned.prompt_tokens) for tried in computing], CHUNK_PAGES * page_size
        )
        if not pieces:
            return
        fills = []
        for piece in pieces:
            tried = computing[piece.request]
            # The piece that holds a page's last token completes it; until then it is poison.
            is_last = piece.end == tried.planned.prompt_tokens
            end = len(tried.pages) if is_last else piece.end // page_size
            positions = tuple(range(piece.start // page_size, end))
            pages = tuple(tried.pages[position] for position in positions)
            fills.append(PageFill(tried.request_id, tried.seed, positions, pages))
        self._note("compute")
        group.fill(tuple(fills))
        for piece in pieces:
            tried = computing[piece.request]
            if tried not in self._admitted:
                continue
            tried.done_tokens = piece.end
            tried.enter("computing")
            if piece.end == tried.planned.prompt_tokens:
                tried.enter("sending")
                group.handover.sampled(tried.request_id, tried.seed % VOCAB_SIZE)
            elif self._settings.overlap:
                group.handover.computed(tried.request_id, piece.end // page_size)
            self._note("send")

    def on_end(self, request_id: str, error: CpkvError | None) -> None:
        """A request was handed over, or its transfer has failed."""
        tried = next(tried for tried in self._admitted if tried.request_id == request_id)
        if error is None:
            tried.enter("decoding")
        elif tried.aborting:
            self._admitted.remove(tried)
            self._outcomes.aborted(tried)
        else:
            self._end_failed(tried, error)

    def _end_failed(self, tried: Try, error: CpkvError) -> None:
        self._admitted.remove(tried)
        self._outcomes.failed(tried, error)

    def _abort(self, group: PrefillGroup) -> None:
        for tried in list(self._admitted):
            tried.turns += 1
            if not tried.is_abort_due():
                continue
            tried.aborting = True
            if tried.phase == "decoding":
                self._admitted.remove(tried)
                self._owed_releases.append(tried.request_id)
                self._outcomes.aborted(tried)
            else:
                cause = f"request {tried.request_id}: its client went away while it was {tried.phase}"
                group.handover.cancel(tried.request_id, TransferError(cause))

    def _decode_steps(self, group: PrefillGroup) -> None:
        for tried in [tried for tried in self._admitted if tried.phase == "decoding"]:
            try:
                self._decode_step(group, tried)
            except WorkerDiedError:
                raise
            except CpkvError as error:
                self._owed_releases.append(tried.request_id)
                self._end_failed(tried, error)

    def _decode_step(self, group: PrefillGroup, tried: Try) -> None:
        name = tried.request_id
        decoded = group.decode.ask(DecodeStep((name,)))
        tried.steps += 1
        if decoded.tokens != (tried.seed % VOCAB_SIZE,):
            self._outcomes.violation(f"request {name}: decoded {decoded.tokens}, not {tried.seed % VOCAB_SIZE}")
        if tried.steps < tried.planned.steps or tried.planned.abort is not None:
            return
        digest = group.decode.ask(RowDigest(name)).digest
        if digest != expected_digest(seeded_geometry(self._settings.page_size), tried.seed, len(tried.pages)):
            self._outcomes.violation(f"request {name}: the digest of its prompt is wrong")
        group.decode.ask(ReleaseRequest(name))
        self._admitted.remove(tried)
        self._outcomes.right(tried)

    def _release_owed(self, group: PrefillGroup) -> None:
        """Give pages of requests back that ended while they were decoded, again until that is answered."""
        if not self._owed_releases or time.monotonic() < self._release_at:
            return
        for name in list(self._owed_releases):
            try:
                group.decode.ask(ReleaseRequest(name))
            except WorkerDiedError:
                raise
            except CpkvError as error:
                if group.decode.lost and isinstance(error, TransferError):
                    self._release_at = time.monotonic() + RELEASE_AGAIN_S
                    return
            self._owed_releases.remove(name)
