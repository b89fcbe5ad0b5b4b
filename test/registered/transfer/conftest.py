"""A cluster of threads for tests of whole hand-overs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from handover_group import SETTINGS, Group, SelectiveFabric

from cpkv.config.settings import EngineSettings
from cpkv.engine import thread_workers
from cpkv.engine.cluster import Cluster
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.leaks import nothing_left_behind


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hot_checkpoint(tmp_path_factory.mktemp("hot"), "glm52")


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    """Starts a cluster of threads, with some settings changed."""
    # A folder of its own, since others on the machine make and remove workspaces too.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fabric = SelectiveFabric()
    workers: list[DecodeWorker] = []
    log: list[Any] = []
    honest = DecodeWorker.__init__

    def init(worker: DecodeWorker, *arguments: Any) -> None:
        honest(worker, *arguments)
        workers.append(worker)
        requests = worker._server._requests
        handle = requests.handle
        requests.handle = lambda message, sender: (log.append(message), handle(message, sender))[1]  # type: ignore[method-assign]

    monkeypatch.setattr(DecodeWorker, "__init__", init)
    monkeypatch.setattr(thread_workers, "InProcessFabric", lambda: fabric)
    running: list[Cluster] = []

    def make(*, decode_pages: int = 48, **changes: Any) -> Group:
        settings = EngineSettings(**{name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__} | changes)
        running.append(Cluster(settings, checkpoint, decode_pages=decode_pages, shuffle_seed=5))
        return Group(running[-1], fabric, workers[-1]._receiver.allocator, log)

    with nothing_left_behind():
        yield make
        for cluster in running:
            cluster.close()
