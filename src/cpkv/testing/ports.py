"""Free ports for tests."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def taken_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that somebody listens on while the body runs."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def closed_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
