"""The loop that every worker runs: one command, one reply, until told to stop or left alone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol

from cpkv.engine.commands import StopWorker
from cpkv.errors import CpkvError, ProtocolError, TransferError
from cpkv.protocol.failures import failure_of
from cpkv.protocol.messages import Done
from cpkv.transfer.channel import Channel

LOG = logging.getLogger(__name__)


class Worker(Protocol):
    """What the loop needs of a rank or a decode worker."""

    def ready(self) -> Any:
        """The first reply."""

    def handle(self, command: Any) -> Any:
        """Act on a command and return the reply."""

    def close(self) -> None:
        """Release everything."""


def serve_commands(
    channel: Channel, where: str, make_worker: Callable[[Any], Worker], on_failure: Callable[[Any, str], None]
) -> None:
    """Run a worker until `StopWorker` or the end of the connection.

    Args:
        channel: to whoever commands.
        where: the worker's name, for errors.
        make_worker: makes the worker from the first command.
        on_failure: called with the command and the cause when one fails, before the reply.
    """
    worker: Worker | None = None
    try:
        while True:
            command = channel.receive()
            if isinstance(command, StopWorker):
                if worker is not None:
                    worker.close()
                    worker = None
                channel.send(Done())
                return
            try:
                if worker is None:
                    worker = make_worker(command)
                    reply = worker.ready()
                else:
                    reply = worker.handle(command)
            except Exception as error:  # every cause must reach the scheduler
                if not isinstance(error, CpkvError):
                    LOG.exception("%s failed", where)
                on_failure(command, str(error))
                reply = failure_of(error, where)
            try:
                channel.send(reply)
            except ProtocolError as error:
                channel.send(failure_of(error, where))
    except TransferError as error:
        print(f"{where}: the scheduler is gone ({error}); ending", file=sys.stderr)  # noqa: T201
    finally:
        if worker is not None:
            worker.close()
        channel.close()
