"""A rank's connection to the decode worker: reports go out, answers come back in order, nobody waits.

post PagesSent 4, 5 ->   | in order |   -> answers: PagesTaken 4, or the error of 4, then that of 5
heartbeat           ->   |          |   -> Done, which is dropped
"""

from __future__ import annotations

import select
from collections import deque
from typing import Protocol

from cpkv.errors import CpkvError, HandshakeError, ProtocolError, TransferError
from cpkv.protocol.failures import error_of
from cpkv.protocol.messages import Done, Failed, FromDecode, Heartbeat, Hello, PagesSent, PagesTaken, Welcome
from cpkv.transfer.channel import Channel, connect

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
        host: where the decode worker listens.
        port: its port.
        hello: what this side's pages are, and which rank this is.
        secret: shared by the workers.
        timeout_s: for the handshake.

    Raises:
        HandshakeError: the pools differ, or the decode worker refuses.
        TransferError: nobody is there.
    """

    def __init__(self, host: str, port: int, hello: Hello, *, secret: str, timeout_s: float) -> None:
        self._channel: Channel = connect(
            host, port, FromDecode, "the decode worker", secret=secret, timeout_s=min(timeout_s, ANSWER_TIMEOUT_S)
        )
        self._asked: deque[PagesSent | Heartbeat] = deque()
        try:
            self._channel.send(hello)
            welcome = self._channel.receive(timeout_s)
        except TransferError as error:
            self.close()
            raise HandshakeError(f"the handshake with the decode worker at {host}:{port} failed: {error}") from error
        if isinstance(welcome, Failed):
            self.close()
            raise error_of(welcome)
        if not isinstance(welcome, Welcome):
            self.close()
            raise ProtocolError(f"the decode worker at {host}:{port} answered {type(welcome).__name__} to Hello")
        self.lease_s = welcome.lease_s

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
        while select.select([self._channel], [], [], 0)[0]:
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
