"""What the harness says to its worker processes, beside the engine's own commands, and what they answer."""

from __future__ import annotations

import msgspec

from cpkv.config.settings import EngineSettings
from cpkv.engine.commands import (
    ConnectDecode,
    NewsAre,
    PoisonPages,
    ReadNews,
    SendPages,
    StopPages,
    StopWorker,
    WorkerReady,
)
from cpkv.protocol.messages import Done, Failed


class StartSeededRank(msgspec.Struct, frozen=True, tag=True):
    """Become a rank with a pool of seeded pages; `pause_seed` is for pauses between its writes."""

    rank: int
    settings: EngineSettings
    secret: str
    pause_seed: int


class StartSeededDecode(msgspec.Struct, frozen=True, tag=True):
    """Become the decode worker; `num_pages` over all `owners`, `port` 0 takes a free one."""

    settings: EngineSettings
    secret: str
    num_pages: int
    owners: int
    port: int
    shuffle_seed: int


class PageFill(msgspec.Struct, frozen=True):
    """Pages of one request that a chunk completes, by logical position."""

    request_id: str
    content_seed: int
    positions: tuple[int, ...]
    pages: tuple[int, ...]


class FillPages(msgspec.Struct, frozen=True, tag=True):
    """Compute a chunk: each rank fills the pages that it owns."""

    fills: tuple[PageFill, ...]


class ReadState(msgspec.Struct, frozen=True, tag=True):
    """Ask how a worker stands; the decode worker checks its books and its free pages on the way."""


class StateIs(msgspec.Struct, frozen=True, tag=True):
    """How a worker stands.

    Attributes:
        threads: of Python, alive.
        descriptors: open files.
        free: pages.
        capacity: pages.
        quarantined: pages.
        arriving: transfers under way.
        engines: transfer engines that were made.
    """

    threads: int
    descriptors: int
    free: int = 0
    capacity: int = 0
    quarantined: int = 0
    arriving: int = 0
    engines: int = 0


SeededCommand = (
    StartSeededRank
    | StartSeededDecode
    | ConnectDecode
    | FillPages
    | SendPages
    | StopPages
    | ReadNews
    | PoisonPages
    | ReadState
    | StopWorker
)
SeededReply = WorkerReady | NewsAre | StateIs | Done | Failed
