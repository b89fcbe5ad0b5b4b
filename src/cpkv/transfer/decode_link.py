"""A prefill worker's connection to the decode worker: handshake, then one question and one answer at a time."""

from __future__ import annotations

from typing import Any, TypeVar

from cpkv import errors
from cpkv.errors import HandshakeError, ProtocolError, TransferError
from cpkv.protocol.messages import Failed, FromDecode, Hello, PoolDescription, SenderDescription, Welcome
from cpkv.transfer.channel import Channel, connect

Answer = TypeVar("Answer")


def raise_failure(failure: Failed) -> None:
    """Raise what another worker reported, as its own type.

    Raises:
        CpkvError: always; the class that the peer named, or TransferError for a name that is none of ours.
    """
    kind = getattr(errors, failure.kind, TransferError)
    if not (isinstance(kind, type) and issubclass(kind, errors.CpkvError)):
        kind = TransferError
    raise kind(f"{failure.where}: {failure.message}")


class DecodeLink:
    """A connection that has passed the handshake.

    Args:
        host: where the decode worker listens.
        port: its port.
        pool: what this side's pages are.
        sender: which prefill worker this is.
        timeout_s: how long one answer may take.

    Raises:
        HandshakeError: the pools differ, or the decode worker refuses.
        TransferError: nobody is there.
    """

    def __init__(
        self, host: str, port: int, pool: PoolDescription, sender: SenderDescription, *, timeout_s: float = 60.0
    ) -> None:
        self._channel: Channel = connect(host, port, FromDecode, "the decode worker", timeout_s=min(timeout_s, 8.0))
        self._timeout_s = timeout_s
        try:
            self.welcome = self.ask(Hello(pool, sender), Welcome)
        except HandshakeError:
            self.close()
            raise
        except TransferError as error:
            self.close()
            raise HandshakeError(f"the handshake with the decode worker at {host}:{port} failed: {error}") from error

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._channel.fileno()

    def ask(self, question: Any, answer: type[Answer]) -> Answer:
        """Send a message and wait for its answer.

        Raises:
            CpkvError: what the decode worker reported.
            TransferError: it is gone, or late.
            ProtocolError: it answered something else.
        """
        self._channel.send(question)
        reply = self._channel.receive(self._timeout_s)
        if isinstance(reply, Failed):
            raise_failure(reply)
        if not isinstance(reply, answer):
            raise ProtocolError(f"asked {type(question).__name__}, the decode worker answered {type(reply).__name__}")
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
