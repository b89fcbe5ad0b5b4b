"""What the scheduler says to its ranks and to the decode worker that it starts, and what they answer."""

from __future__ import annotations

import msgspec

from cpkv.config.settings import EngineSettings
from cpkv.layout.plan import BatchSpec
from cpkv.protocol.messages import Done, Failed, TransferTarget


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Become a rank.

    Attributes:
        rank: number in the group.
        settings: the same for every rank.
        checkpoint: folder with config.json.
        prepared: file with the weights, to be mapped.
        model: fingerprint of configuration and weights.
        secret: shared by the workers of one run; a handshake without it is refused.
        rendezvous: where gloo ranks meet; empty for threads, which are given their communicator.
        threads: compute threads.
    """

    rank: int
    settings: EngineSettings
    checkpoint: str
    prepared: str
    model: str
    secret: str
    rendezvous: str
    threads: int


class StartDecode(msgspec.Struct, frozen=True, tag=True):
    """Become the decode worker; `num_pages` are its own, `port` 0 takes a free one."""

    settings: EngineSettings
    checkpoint: str
    prepared: str
    model: str
    secret: str
    num_pages: int
    port: int
    threads: int
    shuffle_seed: int | None
    cp_size: int = 1


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """Started.

    Attributes:
        facts: what must be equal over the ranks, by name.
        host: the machine that it runs on; ranks of one host can share memory.
        device: of a rank's model and pages.
        unified_reason: why a rank's memory cannot be shared with other processes; None when it can.
        port: where the decode worker listens; 0 for a rank.
    """

    facts: dict[str, str]
    host: str = ""
    device: str = "cpu"
    unified_reason: str | None = None
    port: int = 0


class OpenPool(msgspec.Struct, frozen=True, tag=True):
    """Make the pool of a run; the last one must be closed.

    Attributes:
        shared: one copy over the ranks, or every page on every rank.
        local_pages: pages of each rank, the trash page included.
        unified: in memory that every rank maps.
        scratch_bytes: what views may hold beside it; None for as much as they need.
    """

    shared: bool
    local_pages: int
    unified: bool
    scratch_bytes: int | None


class PoolOpened(msgspec.Struct, frozen=True, tag=True):
    """Bytes that the rank holds at rest."""

    allocated_bytes: int


class ClosePool(msgspec.Struct, frozen=True, tag=True):
    """Free the pool, once nothing can read it any more."""


class ConnectDecode(msgspec.Struct, frozen=True, tag=True):
    """Be ready to send pages of the open pool to the decode worker.

    Attributes:
        host: where it listens.
        port: its port.
        lease_s: it takes a prefill that says nothing for so long for dead.
        instance: the life of the scheduler that attempts are counted in.
    """

    host: str
    port: int
    lease_s: float
    instance: str


class Trace(msgspec.Struct, frozen=True):
    """What a batch leaves behind in a folder, for references and dumps."""

    folder: str
    want_logits: bool
    want_choices: bool


class RunBatch(msgspec.Struct, frozen=True, tag=True):
    """Run a batch."""

    spec: BatchSpec
    trace: Trace | None = None


class CountersAre(msgspec.Struct, frozen=True, tag=True):
    """View counters of a rank, of one batch or of all; see `ViewCounters`."""

    batches: dict[str, int]
    moved_bytes: int
    history_bytes: int
    scratch_bytes: int
    gather_seconds: float
    wait_seconds: float


class BatchDone(msgspec.Struct, frozen=True, tag=True):
    """Logits (raw bytes in the compute dtype) of last prompt tokens that this rank computed."""

    last_logits: dict[str, bytes]
    cost: CountersAre
    seconds: float


class SendPages(msgspec.Struct, frozen=True, tag=True):
    """Begin to send pages of a request that this rank holds; what comes of it is told by `NewsAre`.

    Attributes:
        positions: logical page positions.
        pages: the prefill's page of each.
        target_pages: the decode side's page of each.
        targets: memory by decode owner.
    """

    request_id: str
    attempt: int
    positions: tuple[int, ...]
    pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    targets: tuple[TransferTarget, ...]


class StopPages(msgspec.Struct, frozen=True, tag=True):
    """Submit no more pages of an attempt."""

    request_id: str
    attempt: int


class ReadNews(msgspec.Struct, frozen=True, tag=True):
    """Tell what became of pages, waiting up to `wait_s` seconds for the first piece."""

    wait_s: float


class PagesNews(msgspec.Struct, frozen=True, tag=True):
    """One piece of news of an attempt.

    Attributes:
        positions: of pages that have arrived; no write of them is under way.
        num_bytes: of those.
        failed: why the attempt cannot go on.
        drained: no page of it is read any more, and none will be.
        writes_may_land: with `drained`: a write failed, and may still land at the decode side.
    """

    request_id: str
    attempt: int
    positions: tuple[int, ...] = ()
    num_bytes: int = 0
    failed: Failed | None = None
    drained: bool = False
    writes_may_land: bool = False


class NewsAre(msgspec.Struct, frozen=True, tag=True):
    """News of a rank, in order."""

    news: tuple[PagesNews, ...]


class PoisonPages(msgspec.Struct, frozen=True, tag=True):
    """Diagnostics: these logical pages were freed; fill them so that a late read shows."""

    pages: tuple[int, ...]


class ReadCounters(msgspec.Struct, frozen=True, tag=True):
    """Ask for the view counters since the pool was opened."""


class DumpPool(msgspec.Struct, frozen=True, tag=True):
    """Let the decode worker write its pool and page table as safetensors."""

    path: str


class TraceDecode(msgspec.Struct, frozen=True, tag=True):
    """Let every decode step leave its choices in a folder; an empty name ends that."""

    folder: str


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """End."""


Command = (
    StartRank
    | StartDecode
    | OpenPool
    | ClosePool
    | ConnectDecode
    | RunBatch
    | SendPages
    | StopPages
    | ReadNews
    | PoisonPages
    | ReadCounters
    | DumpPool
    | TraceDecode
    | StopWorker
)
Reply = WorkerReady | PoolOpened | BatchDone | NewsAre | CountersAre | Done | Failed
