"""A rank's connection to the decode worker: reports go out, answers come back in order, nobody waits.

post PagesSent 4, 5 ->   | in order |   -> answers: PagesTaken 4, or the error of 4, then that of 5
heartbeat           ->   |          |   -> Done, which is dropped
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from cpkv.errors import CpkvError, ProtocolError
from cpkv.protocol.failures import error_of
from cpkv.protocol.messages import Done, Failed, Heartbeat, PagesSent, PagesTaken
from cpkv.transfer.decode_link import DecodeLink

ANSWER_TIMEOUT_S = 10.0


class ReportLink(Protocol):
    """Reports to a decode worker and its answers."""

    def post(self, report: PagesSent) -> None:
        """Send a report."""

    def heartbeat(self) -> None:
        """Say that the prefill lives."""

    def answers(self) -> list[tuple[PagesSent, PagesTaken | CpkvError]]:
        """Answers that have come, each with its report, in order."""

    def close(self) -> None:
        """End the connection."""


class DecodeReportLink:
    """A connection that has passed the handshake.

    Args:
        link: to the decode worker; asked no more, and closed with this.
    """

    def __init__(self, link: DecodeLink) -> None:
        self._channel = link.channel
        self._asked: deque[PagesSent | Heartbeat] = deque()

    def post(self, report: PagesSent) -> None:
        """Send a report.

        Raises:
            TransferError: the decode worker is gone.
        """
        self._asked.append(report)
        self._channel.send(report)

    def heartbeat(self) -> None:
        """Say that the prefill lives.

        Raises:
            TransferError: the decode worker is gone.
        """
        self._asked.append(Heartbeat())
        self._channel.send(Heartbeat())

    def answers(self) -> list[tuple[PagesSent, PagesTaken | CpkvError]]:
        """Answers that have come, each with its report, in order.

        Raises:
            TransferError: the decode worker is gone, or answered something else.
        """
        answers: list[tuple[PagesSent, PagesTaken | CpkvError]] = []
        while self._channel.readable():
            answer = self._channel.receive(ANSWER_TIMEOUT_S)
            if not self._asked:
                raise ProtocolError(f"the decode worker sent {type(answer).__name__} without being asked")
            question = self._asked.popleft()
            if isinstance(question, Heartbeat) and isinstance(answer, Done):
                continue
            if isinstance(question, PagesSent) and isinstance(answer, Failed | PagesTaken):
                answers.append((question, error_of(answer) if isinstance(answer, Failed) else answer))
                continue
            raise ProtocolError(f"asked {type(question).__name__}, the decode worker answered {type(answer).__name__}")
        return answers

    def close(self) -> None:
        """End the connection."""
        self._channel.close()
