"""Which attempts are over, so that what comes late from one changes nothing. No I/O, bounded memory.

ended numbers of an instance      .. all below 40 ..  40 x x 43 x 45
                                  floor ^             a message of 42 is late; one of 43 or 46 may be current
"""

from __future__ import annotations

from cpkv.errors import ProtocolError

REMEMBERED_ATTEMPTS = 1024
MAX_CAUSE_CHARS = 1024


class EndedAttempts:
    """The attempts of one instance that are over, and why.

    Args:
        remembered: how many causes are kept; of attempts before those only that they are over is known.
    """

    def __init__(self, remembered: int = REMEMBERED_ATTEMPTS) -> None:
        self._remembered = remembered
        self._causes: dict[int, str] = {}
        self._floor = 0

    def end(self, attempt: int, cause: str) -> None:
        """Note that an attempt is over; the first cause stands."""
        if attempt < self._floor or attempt in self._causes:
            return
        self._causes[attempt] = cause[:MAX_CAUSE_CHARS]
        while len(self._causes) > self._remembered:
            # The lowest number and not the oldest entry: whatever is below the floor counts as over.
            lowest = min(self._causes)
            del self._causes[lowest]
            self._floor = lowest + 1

    def cause_of(self, attempt: int) -> str | None:
        """Why an attempt is over; None when it is not known to be."""
        if attempt < self._floor:
            return "it ended long ago"
        return self._causes.get(attempt)

    def refuse(self, request_id: str, attempt: int) -> None:
        """Refuse a message of an attempt that is over.

        Raises:
            ProtocolError: with the first cause.
        """
        cause = self.cause_of(attempt)
        if cause is not None:
            raise ProtocolError(f"request {request_id}: attempt {attempt} is over: {cause}; its messages are dropped")
