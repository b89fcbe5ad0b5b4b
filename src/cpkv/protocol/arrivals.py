"""Which pages of a request have arrived at the decode worker. No I/O: messages in, errors or completion out.

senders    2 0 1 2          position 0 must come from rank 2, once
wanted     x x - x          position 2 was there already, and must not come
arrived    x . - .          complete when every wanted position has come exactly once
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._arrived: set[int] = set()
        self._damaged: dict[int, str] = {}
        self._answers: dict[tuple[int, int], tuple[PagesSent, PagesTaken]] = {}

    def __repr__(self) -> str:
        """How many positions have arrived."""
        return f"Arrivals({self.request_id}, {len(self._arrived)}/{len(self._wanted)})"

    @property
    def missing(self) -> tuple[int, ...]:
        """Positions that have not arrived, ascending."""
        return tuple(sorted(self._wanted - self._arrived))

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
        damaged = [
            position
            for position, sent, arrived in zip(
                report.positions, report.digests, arrived_digests, strict=bool(report.digests)
            )
            if sent != arrived
        ]
        sent_of = dict(zip(report.positions, report.digests, strict=False))
        arrived_of = dict(zip(report.positions, arrived_digests, strict=False))
        for position in damaged:
            if position in self._damaged:
                raise TransferError(
                    f"request {self.request_id}: page position {position} of rank {report.rank} left with digest "
                    f"{sent_of[position][:12]} and arrived with {arrived_of[position][:12]}, twice; the transfer "
                    "engine or the memory of one side damages data"
                )
        for position in damaged:
            self._damaged[position] = arrived_of[position]
        self._arrived.update(position for position in report.positions if position not in damaged)
        answer = PagesTaken(report.request_id, report.attempt, report.report, tuple(damaged))
        if report.positions:
            self._answers[key] = (report, answer)
        return answer

    def _check(self, report: PagesSent) -> None:
        rank, positions = report.rank, report.positions
        if len(set(positions)) != len(positions):
            raise ProtocolError(f"request {self.request_id}: rank {rank} names a page position twice in one message")
        if report.digests and len(report.digests) != len(positions):
            raise ProtocolError(
                f"request {self.request_id}: rank {rank} gives {len(report.digests)} digests for {len(positions)} pages"
            )
        for position in positions:
            if not 0 <= position < len(self._senders):
                raise ProtocolError(
                    f"request {self.request_id}: rank {rank} sent page position {position} of {len(self._senders)}"
                )
            if self._senders[position] != rank:
                raise ProtocolError(
                    f"request {self.request_id}: page position {position} belongs to rank {self._senders[position]} "
                    f"and came from rank {rank}"
                )
            if position not in self._wanted:
                raise ProtocolError(f"request {self.request_id}: page position {position} was there before it was sent")
            if position in self._arrived:
                raise ProtocolError(f"request {self.request_id}: page position {position} was sent twice")

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
