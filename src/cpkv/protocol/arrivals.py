"""Which pages of a request have arrived at the decode worker. No I/O: messages in, errors or completion out.

senders    2 0 1 2          position 0 must come from rank 2, once
arrived    x . x .          complete when every position has come exactly once
"""

from __future__ import annotations

from collections.abc import Sequence

from cpkv.errors import ProtocolError


class Arrivals:
    """The arrivals of one attempt of one request.

    Args:
        request_id: for messages.
        attempt: messages of another attempt are refused.
        senders: per logical page position, the rank that must send it.
    """

    def __init__(self, request_id: str, attempt: int, senders: Sequence[int]) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self._senders = tuple(senders)
        self._arrived = [False] * len(self._senders)

    def __repr__(self) -> str:
        """How many positions have arrived."""
        return f"Arrivals({self.request_id}, attempt {self.attempt}, {sum(self._arrived)}/{len(self._arrived)})"

    @property
    def missing(self) -> tuple[int, ...]:
        """Positions that have not arrived."""
        return tuple(position for position, arrived in enumerate(self._arrived) if not arrived)

    def check_attempt(self, attempt: int) -> None:
        """Refuse a message of another attempt.

        Raises:
            ProtocolError: it belongs to an earlier or later attempt.
        """
        if attempt != self.attempt:
            raise ProtocolError(
                f"request {self.request_id}: a message of attempt {attempt} came during attempt {self.attempt}; dropped"
            )

    def record(self, attempt: int, rank: int, positions: Sequence[int]) -> None:
        """Note that a rank's pages are there; all of them or, on an error of `check`, none."""
        self.check(attempt, rank, positions)
        for position in positions:
            self._arrived[position] = True

    def check(self, attempt: int, rank: int, positions: Sequence[int]) -> None:
        """Refuse pages that must not arrive now.

        Raises:
            ProtocolError: another attempt, a position out of range, from the wrong rank, or for the second time.
        """
        self.check_attempt(attempt)
        if len(set(positions)) != len(positions):
            raise ProtocolError(f"request {self.request_id}: rank {rank} names a page position twice in one message")
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
            if self._arrived[position]:
                raise ProtocolError(f"request {self.request_id}: page position {position} was sent twice")

    def check_complete(self, attempt: int) -> None:
        """Refuse to start while positions are missing.

        Raises:
            ProtocolError: naming the first missing position, its sender and the count.
        """
        self.check_attempt(attempt)
        missing = self.missing
        if missing:
            raise ProtocolError(
                f"request {self.request_id}: {len(missing)} of {len(self._senders)} pages never arrived, the first is "
                f"position {missing[0]} of rank {self._senders[missing[0]]}"
            )
