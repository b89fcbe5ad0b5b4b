"""Which pages of a request have arrived at the decode worker. No I/O: messages in, errors or completion out.

senders    2 0 1 2          position 0 must come from rank 2, once
wanted     x x - x          position 2 was there already, and must not come
arrived    x . - .          complete when every wanted position has come exactly once
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from cpkv.errors import ProtocolError, TransferError
from cpkv.protocol.messages import PagesSent, PagesTaken


class Arrivals:
    """The arrivals of one attempt of one request.

    Args:
        request_id: for messages.
        senders: per logical page position, the rank that must send it.
        wanted: positions that must arrive.
    """

    def __init__(self, request_id: str, senders: Sequence[int], wanted: Sequence[int]) -> None:
        self.request_id = request_id
        self._senders = tuple(senders)
        self._wanted = frozenset(wanted)
        # What each rank has yet to send: a report of thousands of pages is then checked and noted by three calls.
        self._due: dict[int, set[int]] = {}
        for position in self._wanted:
            self._due.setdefault(self._senders[position], set()).add(position)
        self._damaged: set[int] = set()
        self._answers: dict[tuple[int, int], tuple[PagesSent, PagesTaken]] = {}

    def __repr__(self) -> str:
        """How many positions have arrived."""
        arrived = len(self._wanted) - sum(map(len, self._due.values()))
        return f"Arrivals({self.request_id}, {arrived}/{len(self._wanted)})"

    @property
    def missing(self) -> tuple[int, ...]:
        """Positions that have not arrived, ascending."""
        return tuple(sorted(chain.from_iterable(self._due.values())))

    def take(self, report: PagesSent, arrived_digests: Sequence[str]) -> PagesTaken:
        """Note that a rank's pages are there: all of them or, on an error, none.

        A report that comes again is answered again.

        Args:
            report: what the rank says.
            arrived_digests: of the pages as they lie here; as many as the report has, which may be none.

        Raises:
            ProtocolError: a position out of range, unwanted, from the wrong rank, or for the second time.
            TransferError: a page is damaged for the second time.
        """
        key = (report.rank, report.report)
        if key in self._answers:
            earlier, answer = self._answers[key]
            if earlier != report:
                raise ProtocolError(
                    f"request {self.request_id}: rank {report.rank} gave report {report.report} two meanings"
                )
            return answer
        self._check(report)
        damaged = self._damaged_of(report, arrived_digests) if report.digests else ()
        answer = PagesTaken(report.request_id, report.attempt, report.report, damaged)
        if report.positions:
            self._due[report.rank].difference_update(report.positions)
            self._due[report.rank].update(damaged)
            self._answers[key] = (report, answer)
        return answer

    def _check(self, report: PagesSent) -> None:
        rank, positions = report.rank, report.positions
        named = set(positions)
        if len(named) != len(positions):
            raise ProtocolError(f"request {self.request_id}: rank {rank} names a page position twice in one message")
        if report.digests and len(report.digests) != len(positions):
            raise ProtocolError(
                f"request {self.request_id}: rank {rank} gives {len(report.digests)} digests for {len(positions)} pages"
            )
        due = self._due.get(rank, set())
        if not named <= due:
            position = next(position for position in positions if position not in due)
            raise ProtocolError(f"request {self.request_id}: {self._why_not_due(position, rank)}")

    def _why_not_due(self, position: int, rank: int) -> str:
        """What is wrong with a position that is not among those which a rank has yet to send."""
        if not 0 <= position < len(self._senders):
            return f"rank {rank} sent page position {position} of {len(self._senders)}"
        if self._senders[position] != rank:
            return f"page position {position} belongs to rank {self._senders[position]} and came from rank {rank}"
        if position not in self._wanted:
            return f"page position {position} was there before it was sent"
        return f"page position {position} was sent twice"

    def _damaged_of(self, report: PagesSent, arrived_digests: Sequence[str]) -> tuple[int, ...]:
        """Positions that differ from what was sent, noted; TransferError where one did before, and none is noted."""
        pairs = zip(report.positions, report.digests, arrived_digests, strict=True)
        damaged = [(position, sent, arrived) for position, sent, arrived in pairs if sent != arrived]
        for position, sent, arrived in damaged:
            if position in self._damaged:
                raise TransferError(
                    f"request {self.request_id}: page position {position} of rank {report.rank} left with digest "
                    f"{sent[:12]} and arrived with {arrived[:12]}, twice; the transfer engine or the memory of one "
                    "side damages data"
                )
        self._damaged.update(position for position, _, _ in damaged)
        return tuple(position for position, _, _ in damaged)

    def check_complete(self) -> None:
        """Refuse to start while positions are missing.

        Raises:
            ProtocolError: naming the first missing position, its sender and the count.
        """
        missing = self.missing
        if missing:
            raise ProtocolError(
                f"request {self.request_id}: {len(missing)} of {len(self._wanted)} pages never arrived, the first is "
                f"position {missing[0]} of rank {self._senders[missing[0]]}"
            )
