"""The scheduler's connection to the decode worker, made when it is first needed and again after it broke."""

from __future__ import annotations

from typing import Any

from cpkv.engine.worker_set import WorkerSet
from cpkv.errors import TransferError
from cpkv.protocol.messages import ANSWER_OF, Hello
from cpkv.transfer.decode_link import DecodeLink


class DecodeConnection:
    """Questions to the decode worker, one at a time, while every worker of the group is watched.

    Args:
        host: where it listens.
        port: its port.
        hello: who asks.
        secret: shared with it.
        timeout_s: how long an answer may take.
        workers: those that must live.
        watched: whether the decode worker is one of them; then the end of its connection may be the end of it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        hello: Hello,
        *,
        secret: str,
        timeout_s: float,
        workers: WorkerSet,
        watched: bool = True,
    ) -> None:
        self._host = host
        self._port = port
        self._hello = hello
        self._secret = secret
        self._timeout_s = timeout_s
        self._workers = workers
        self._watched = watched
        self._link: DecodeLink | None = None

    @property
    def lost(self) -> bool:
        """Whether there is no connection now; the next question makes one."""
        return self._link is None or self._link.closed

    @property
    def lease_s(self) -> float:
        """How long the decode worker believes in a prefill that says nothing."""
        doing = "the handshake"
        try:
            return self._connected().welcome.lease_s
        except TransferError:
            self._look_for_cause(doing)
            raise

    def ask(self, question: Any) -> Any:
        """The answer to a question, of the type that belongs to it.

        Raises:
            WorkerDiedError: a worker has ended.
            CpkvError: what the decode worker reported, or that it cannot be reached.
        """
        doing = type(question).__name__
        try:
            answer: Any = self._connected().ask(question, ANSWER_OF[type(question)])
        except TransferError:
            self._look_for_cause(doing)
            raise
        self._workers.check_alive(doing)
        return answer

    def _look_for_cause(self, doing: str) -> None:
        """Raise the end of a worker in place of the end of a connection; a process ends a moment after its sockets."""
        if self.lost and self._watched:
            self._workers.check_alive_soon(doing)
        else:
            self._workers.check_alive(doing)

    def _connected(self) -> DecodeLink:
        if self._link is not None:
            # A decode worker that was started anew must not be asked over the connection to its predecessor.
            self._link.close_if_ended()
        if self._link is None or self._link.closed:
            self._link = DecodeLink(
                self._host,
                self._port,
                self._hello,
                secret=self._secret,
                timeout_s=self._timeout_s,
                watch=lambda: self._workers.check_alive("a question to the decode worker"),
            )
        return self._link

    def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None
