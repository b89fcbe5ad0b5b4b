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
    """

    def __init__(
        self, host: str, port: int, hello: Hello, *, secret: str, timeout_s: float, workers: WorkerSet
    ) -> None:
        self._host = host
        self._port = port
        self._hello = hello
        self._secret = secret
        self._timeout_s = timeout_s
        self._workers = workers
        self._link: DecodeLink | None = None

    @property
    def lost(self) -> bool:
        """Whether there is no connection now; the next question makes one."""
        return self._link is None or self._link.closed

    @property
    def lease_s(self) -> float:
        """How long the decode worker believes in a prefill that says nothing."""
        return self._connected("the handshake").welcome.lease_s

    def ask(self, question: Any) -> Any:
        """The answer to a question, of the type that belongs to it.

        Raises:
            WorkerDiedError: a worker has ended.
            CpkvError: what the decode worker reported, or that it cannot be reached.
        """
        doing = type(question).__name__
        try:
            answer: Any = self._connected(doing).ask(question, ANSWER_OF[type(question)])
        except TransferError:
            if self.lost:
                self._workers.check_alive_soon(doing)
            raise
        self._workers.check_alive(doing)
        return answer

    def _connected(self, doing: str) -> DecodeLink:
        if self._link is None or self._link.closed:
            try:
                self._link = DecodeLink(
                    self._host,
                    self._port,
                    self._hello,
                    secret=self._secret,
                    timeout_s=self._timeout_s,
                    watch=lambda: self._workers.check_alive("a question to the decode worker"),
                )
            except TransferError:
                self._workers.check_alive_soon(doing)
                raise
        return self._link

    def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None
