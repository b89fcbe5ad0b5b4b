"""Servers of control connections that end with their test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cpkv.protocol.messages import ToDecode
from cpkv.testing.control import StubHandler
from cpkv.transfer.channel import listen
from cpkv.transfer.server import MessageServer


@pytest.fixture
def stub() -> StubHandler:
    return StubHandler()


@pytest.fixture
def start_server(stub: StubHandler) -> Iterator[Callable[..., MessageServer]]:
    """Starts servers of the stub; closes them with the test."""
    servers: list[MessageServer] = []

    def make(*, port: int = 0, **more: Any) -> MessageServer:
        servers.append(MessageServer(listen("127.0.0.1", port), ToDecode, stub, where="stub", **more))
        servers[-1].start()
        return servers[-1]

    yield make
    stub.go_on.set()
    for server in servers:
        server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "stub server"]
