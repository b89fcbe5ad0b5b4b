"""Requests on their way, and what became of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cpkv.errors import CpkvError, NumericsError
from cpkv.testing.faults.disturbances import Disturbances
from cpkv.testing.faults.plan import ABORT_PHASES, AbortPhase, PlannedRequest
from cpkv.testing.faults.report import FaultReport, kind_of

LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Try:
    """One try of one request, from its admission on.

    Attributes:
        planned: the request.
        number: 0, or more when it comes again after a failure.
        seed: that the bytes of its pages follow from.
        pages: of the prefill, by logical position.
        began_at: time.monotonic() at its admission.
        done_tokens: that are computed.
        steps: of decoding, done.
        phase: where it is.
        turns: of the scheduler in this phase.
        aborting: its client has gone.
    """

    planned: PlannedRequest
    number: int
    seed: int
    pages: tuple[int, ...]
    began_at: float
    done_tokens: int = 0
    steps: int = 0
    phase: AbortPhase = "announced"
    turns: int = 0
    aborting: bool = False

    @property
    def request_id(self) -> str:
        """The request."""
        return self.planned.request_id

    def enter(self, phase: AbortPhase) -> None:
        """Go to a phase."""
        if phase != self.phase:
            self.phase, self.turns = phase, 0

    def is_abort_due(self) -> bool:
        """Whether the client goes now."""
        abort = self.planned.abort
        if abort is None or self.aborting:
            return False
        planned, here = ABORT_PHASES.index(abort.phase), ABORT_PHASES.index(self.phase)
        return here > planned or (here == planned and self.turns >= abort.turns)


Outcome = Literal["right", "aborted", "failed"]


class Outcomes:
    """Judges every end, and counts it.

    Args:
        report: filled here.
        disturbances: what excuses failures.
        on_retry: takes a request that comes again, and the number of its next try.
        on_end: told about every end.
    """

    def __init__(
        self,
        report: FaultReport,
        disturbances: Disturbances,
        on_retry: Callable[[PlannedRequest, int], None],
        on_end: Callable[[], None],
    ) -> None:
        self._report = report
        self._disturbances = disturbances
        self._on_retry = on_retry
        self._on_end = on_end

    @property
    def ended(self) -> int:
        """Requests that are over."""
        return self._report.right + self._report.aborted + self._report.failed

    def right(self, tried: Try) -> None:
        """Every byte was right."""
        self._report.right += 1
        self._end(tried, "right")

    def aborted(self, tried: Try) -> None:
        """Its client has gone, and everybody knows."""
        self._report.aborted += 1
        self._end(tried, "aborted")

    def never_admitted(self, planned: PlannedRequest) -> None:
        """Its client has gone before it was admitted."""
        LOG.info("request %s: aborted in the queue", planned.request_id)
        self._report.aborted += 1
        self._on_end()

    def failed(self, tried: Try, error: CpkvError) -> None:
        """It ended with an error: one that a fault excuses, and that names who it was."""
        LOG.info("request %s: failed: %s", tried.request_id, error)
        self._report.causes[kind_of(error)] += 1
        now = time.monotonic()
        wrong = self._disturbances.why_wrong(tried.began_at, now, error)
        if isinstance(error, NumericsError):
            wrong = "wrong bytes"
        if wrong:
            self.violation(f"request {tried.request_id} failed, {wrong}: {type(error).__name__}: {error}")
        if tried.number < tried.planned.retries:
            self._on_retry(tried.planned, tried.number + 1)
        else:
            self._report.failed += 1
        self._end(tried, "failed")

    def violation(self, text: str) -> None:
        """Something that must never happen."""
        LOG.error("violation: %s", text)
        self._report.violations.append(text)

    def _end(self, tried: Try, outcome: Outcome) -> None:
        seconds = time.monotonic() - tried.began_at
        LOG.info("request %s: try %d is over after %.3f s: %s", tried.request_id, tried.number, seconds, outcome)
        self._report.slowest_s = max(self._report.slowest_s, seconds)
        if seconds > self._report.bound_s:
            self.violation(
                f"request {tried.request_id} took {seconds:.1f} s to end ({outcome}), over the bound of "
                f"{self._report.bound_s:.0f} s"
            )
        self._on_end()
