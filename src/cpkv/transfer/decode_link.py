"""A prefill worker's connection to the decode worker: handshake, then one question and one answer at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from cpkv.errors import HandshakeError, TransferError
from cpkv.protocol.failures import checked_answer
from cpkv.protocol.messages import FromDecode, Hello, Welcome
from cpkv.transfer.channel import Channel, connect

WATCH_INTERVAL_S = 0.1

Answer = TypeVar("Answer")


class DecodeLink:
    """A connection that has passed the handshake.

    Args:
        host: where the decode worker listens.
        port: its port.
        hello: what this side's pages are, and which prefill worker this is.
        secret: shared with it.
        watch: called while an answer is awaited; what it raises ends the wait.
        timeout_s: how long one answer may take.

    Attributes:
        welcome: what the decode worker answered to `hello`.
        channel: the connection itself, for who asks without waiting.

    Raises:
        HandshakeError: the secrets, versions or pools differ, or the decode worker refuses.
        TransferError: nobody is there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        hello: Hello,
        *,
        secret: str = "",
        timeout_s: float = 60.0,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.channel: Channel = connect(
            host, port, FromDecode, "the decode worker", secret=secret, timeout_s=min(timeout_s, 8.0)
        )
        self._timeout_s = timeout_s
        self._watch = watch
        try:
            self.welcome = self.ask(hello, Welcome)
        except HandshakeError:
            self.close()
            raise
        except TransferError as error:
            self.close()
            raise HandshakeError(f"the handshake with the decode worker at {host}:{port} failed: {error}") from error

    @property
    def closed(self) -> bool:
        """Whether this link can be asked no more."""
        return self.channel.fileno() < 0

    def close_if_ended(self) -> None:
        """Close a connection that the other end has ended: there is something to read although nothing was asked."""
        if not self.closed and self.channel.readable():
            self.close()

    def ask(self, question: Any, answer: type[Answer]) -> Answer:
        """Send a message and wait for its answer.

        Raises:
            CpkvError: what the decode worker reported.
            TransferError: it is gone, or late.
            ProtocolError: it answered something else.
        """
        if self.closed:
            raise TransferError("the connection to the decode worker was closed after an error; connect again")
        try:
            self.channel.send(question)
            reply = self.channel.receive(self._wait())
        except BaseException:
            # The answer may still come, and would be taken for that of the next question.
            self.close()
            raise
        checked: Answer = checked_answer(question, reply, (answer,), self.channel.peer)
        return checked

    def _wait(self) -> float:
        """Wait until an answer begins to arrive, watching meanwhile; what is left of the time."""
        deadline = time.monotonic() + self._timeout_s
        while not self.channel.readable(min(WATCH_INTERVAL_S, max(0.0, deadline - time.monotonic()))):
            self._watch()
            if time.monotonic() > deadline:
                raise TransferError(f"{self.channel.peer} sent no whole message for {self._timeout_s} s")
        return max(deadline - time.monotonic(), WATCH_INTERVAL_S)

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()
