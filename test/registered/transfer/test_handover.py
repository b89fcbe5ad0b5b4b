"""Requests handed from a prefill scheduler to a decode worker, ranks as threads, with diagnostics on: order, failures,
and pages that are neither lost, nor freed twice, nor used again too early.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpkv.cache.allocator import PageAllocator
from cpkv.config.settings import EngineSettings
from cpkv.engine import cluster as cluster_module
from cpkv.engine.cluster import Cluster
from cpkv.engine.commands import RowDigest, RowDigestIs, RunBatch, SendPages
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.engine.generation import generate
from cpkv.engine.prefill import PrefillReport, PrefillScheduler
from cpkv.engine.rank_worker import RankWorker
from cpkv.engine.request import Request
from cpkv.errors import TransferError
from cpkv.protocol.messages import (
    AbortTransfer,
    DecodedTokens,
    DecodeStep,
    Done,
    FinishTransfer,
    PagesSent,
    ReleaseRequest,
)
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.leaks import nothing_left_behind
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.backend import TransferStatus
from cpkv.transfer.inprocess import InProcessFabric
from cpkv.transfer.runs import Run

register_cpu_ci(est_time=25, suite="transfer")

RANKS = 3
PAGE = 16
SETTINGS = EngineSettings(
    num_pages=48,
    enable_cp_shared_kv=True,
    cp_size=RANKS,
    page_size=PAGE,
    chunk_size=70,
    transfer="inprocess",
    transfer_timeout_s=20.0,
    debug=True,
)


class SelectiveFabric(InProcessFabric):
    """A fabric that holds the writes that it sees while `holding`, for good, until `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.holding = False
        self.held: set[Run] = set()

    def copy(self, session_id: str, run: Run) -> TransferStatus:
        if self.holding:
            self.held.add(run)
        if run in self.held:
            return TransferStatus("pending")
        return super().copy(session_id, run)

    def release(self) -> None:
        self.holding = False
        self.held.clear()
        super().release()


@dataclasses.dataclass
class Group:
    """A running cluster and what is inside of it: the fabric, and the decode worker's allocator."""

    cluster: Cluster
    fabric: SelectiveFabric
    decode_allocator: PageAllocator
    decode_log: list[Any]

    def scheduler(self, shared: bool = True) -> PrefillScheduler:
        self.cluster.open_pool(shared)
        return PrefillScheduler(self.cluster, shared=shared)

    def release(self, *names: str) -> None:
        """End requests at the decode worker."""
        for name in names:
            self.cluster.ask_decode(ReleaseRequest(name), Done)


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
    monkeypatch.setattr(cluster_module, "InProcessFabric", lambda: fabric)
    running: list[Cluster] = []

    def make(*, decode_pages: int = 48, **changes: Any) -> Group:
        settings = EngineSettings(**{name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__} | changes)
        running.append(Cluster(settings, checkpoint, decode_pages=decode_pages, shuffle_seed=5))
        return Group(running[-1], fabric, workers[-1]._server._requests._allocator, log)

    with nothing_left_behind():
        yield make
        for cluster in running:
            cluster.close()


def requests_of(*lengths: int) -> list[Request]:
    """Requests a, b, c ... of these lengths."""
    return [
        Request("abcdefg"[number], tuple((7 * number + 3 * i) % 500 for i in range(length)), 4)
        for number, length in enumerate(lengths)
    ]


def check_whole(allocator: PageAllocator, quarantined: int = 0) -> None:
    """No page is lost, held or freed twice."""
    allocator.check()
    assert allocator.quarantined_pages == quarantined
    assert allocator.free_pages == allocator.capacity_pages - quarantined
    assert not allocator.request_ids


@pytest.mark.parametrize("current_reuse", [True, False])
def test_both_modes_bring_the_same_bits(start: Callable[..., Group], current_reuse: bool) -> None:
    group = start(current_reuse=current_reuse)
    requests = requests_of(150, 1, PAGE, 97)
    shared = generate(group.cluster, requests, shared=True)
    replicated = generate(group.cluster, requests, shared=False)
    assert shared.row_digests == replicated.row_digests
    assert shared.same_bits(replicated)
    pages = sum(-(-len(request.token_ids) // PAGE) for request in requests)
    for result in (shared, replicated):
        assert sum(result.prefill.sent_pages) == pages
        assert sum(result.prefill.sent_bytes) == pages * group.cluster.geometry.page_bytes
    check_whole(group.decode_allocator)


def test_pages_are_sent_after_the_batch_that_wrote_them(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, order = threading.Lock(), list[tuple[int, str, Any]]()
    honest = RankWorker.handle

    def handle(worker: RankWorker, command: Any) -> Any:
        with lock:
            order.append((worker._rank, "begin", command))
        reply = honest(worker, command)
        with lock:
            order.append((worker._rank, "end", command))
        return reply

    monkeypatch.setattr(RankWorker, "handle", handle)
    group = start()
    report = group.scheduler().run(requests_of(150, 40))
    assert [batch.tokens for batch in report.batches] == [70, 70, 50]
    sends = {command.request_id for _, _, command in order if isinstance(command, SendPages)}
    assert sends == {"a", "b"}
    for name in sends:
        begun = min(
            number
            for number, (_, event, command) in enumerate(order)
            if event == "begin" and isinstance(command, SendPages) and command.request_id == name
        )
        last = [
            number
            for number, (_, event, command) in enumerate(order)
            if event == "end"
            and isinstance(command, RunBatch)
            and any(segment.request_id == name for segment in command.spec.segments)
        ]
        # On every rank, since any of them may own a page of the last batch.
        assert max(last) < begun, f"pages of {name} were sent while a batch still wrote them"
    group.release("a", "b")


def test_each_page_is_sent_once_by_its_owner(start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    pages: dict[str, tuple[int, ...]] = {}
    honest = RankWorker.handle

    def handle(worker: RankWorker, command: Any) -> Any:
        if isinstance(command, SendPages):
            pages[command.request_id] = command.pages
        return honest(worker, command)

    monkeypatch.setattr(RankWorker, "handle", handle)
    group = start(chunk_size=23)
    group.scheduler().run(requests_of(100, 33, 5))
    group.release("a", "b", "c")
    for name, held in pages.items():
        sent = [
            message for message in group.decode_log if isinstance(message, PagesSent) and message.request_id == name
        ]
        assert sorted(position for message in sent for position in message.positions) == list(range(len(held)))
        assert all(held[position] % RANKS == message.rank for message in sent for position in message.positions)
        finish = [m for m in group.decode_log if isinstance(m, (PagesSent, FinishTransfer)) and m.request_id == name]
        assert isinstance(finish[-1], FinishTransfer)


def test_a_failed_transfer_is_reported_and_others_go_on(start: Callable[..., Group], monkeypatch: Any) -> None:
    freed: list[str] = []
    for name in ("free", "release_quarantine"):
        honest = getattr(PageAllocator, name)
        monkeypatch.setattr(
            PageAllocator,
            name,
            lambda allocator, request_id, honest=honest: (
                freed.append(f"{allocator.placement.cp_size} {request_id}"),
                honest(allocator, request_id),
            )[1],
        )
    group = start()
    scheduler = group.scheduler()
    group.fabric.fail_next("the cable was cut")
    report = scheduler.run(requests_of(100, 90, 30))
    check_failure(report, "a", "the cable was cut")
    assert set(report.first_tokens) == {"b", "c"}
    assert sorted(freed) == [f"{RANKS} {name}" for name in "abc"], (
        "each request's pages are freed once, not once a rank"
    )
    check_whole(scheduler.allocator)
    # Nobody can tell whether a failed write still lands, so the decode worker keeps these pages for good.
    abort = next(message for message in group.decode_log if isinstance(message, AbortTransfer))
    assert (abort.request_id, abort.writes_may_land) == ("a", True)
    decoded = group.cluster.ask_decode(DecodeStep(("b", "c")), DecodedTokens)
    assert len(decoded.tokens) == 2
    group.release("b", "c")
    check_whole(group.decode_allocator, quarantined=-(-(100 + 4) // PAGE))


@pytest.mark.parametrize("part", ["latent", "index"])
def test_a_page_that_changes_on_its_way_is_noticed(start: Callable[..., Group], monkeypatch: Any, part: str) -> None:
    honest = SelectiveFabric.copy
    changed: list[Run] = []

    def copy(fabric: SelectiveFabric, session_id: str, run: Run) -> TransferStatus:
        status = honest(fabric, session_id, run)
        pages = group.cluster.geometry
        wanted = pages.latent_page_bytes if part == "latent" else pages.index_page_bytes
        if not changed and run.length % wanted == 0:
            changed.append(run)
            ctypes.memset(run.target + run.length - 1, ctypes.c_ubyte.from_address(run.source).value ^ 0x55, 1)
        return status

    monkeypatch.setattr(SelectiveFabric, "copy", copy)
    group = start()
    report = group.scheduler().run(requests_of(60))
    assert re.search(
        "request a: page position . of rank . left with digest [0-9a-f]{12} and arrived with [0-9a-f]{12}",
        str(report.failures["a"]),
    )


def test_freed_pages_are_poisoned_at_both_ends(start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    pools: dict[int, list[Any]] = {}
    for kind, name in ((RankWorker, "_open_pool"), (DecodeWorker, "ready")):
        honest = getattr(kind, name)

        def remember(worker: Any, *arguments: Any, honest: Any = honest) -> Any:
            reply = honest(worker, *arguments)
            pools.setdefault(getattr(worker, "_rank", -1), []).append(worker._pool)
            return reply

        monkeypatch.setattr(kind, name, remember)
    group = start()
    group.scheduler().run(requests_of(60, 20))
    written = [bool((pool.latent[1:] != 0xFF).any()) for pool in pools[-1]]
    assert written == [True], "the decode worker holds the requests"
    group.release("a", "b")
    assert sorted(pools) == [-1, *range(RANKS)]
    for rank, (pool,) in pools.items():
        # Local page 0 is where padding goes.
        for part in (pool.latent, pool.index):
            assert bool((part[1:] == 0xFF).all()), f"a page of {rank} still holds what was freed"
    # A pool in shared memory stays mapped as long as it is held.
    pools.clear()


def check_failure(report: PrefillReport, name: str, cause: str) -> None:
    assert list(report.failures) == [name]
    assert name not in report.first_tokens
    message = str(report.failures[name])
    assert isinstance(report.failures[name], TransferError)
    assert "could not send" in message
    assert f"of request {name}: {cause}" in message
    assert "prefill rank " in message


def test_a_request_that_failed_can_be_tried_again(start: Callable[..., Group]) -> None:
    group = start()
    scheduler = group.scheduler()
    (request,) = requests_of(60)
    group.fabric.fail_next("once")
    check_failure(scheduler.run([request]), "a", "once")
    report = scheduler.run([request])
    assert not report.failures
    aborted, opened = (
        [message.attempt for message in group.decode_log if type(message).__name__ == kind]
        for kind in ("AbortTransfer", "OpenTransfer")
    )
    assert aborted == opened[:1]
    assert len(set(opened)) == 2, "an attempt has a number of its own"
    group.release("a")
    check_whole(scheduler.allocator)


def test_pages_are_not_used_again_while_a_write_still_reads_them(start: Callable[..., Group]) -> None:
    group = start(transfer_timeout_s=1.0, debug=False)
    scheduler = group.scheduler()
    first, second = requests_of(60, 60)
    group.fabric.holding = True
    report = scheduler.run([first])
    group.fabric.holding = False
    check_failure(report, "a", "the inprocess engine was not done after 1 s")
    held = len(group.fabric.held)
    assert held > 0
    assert scheduler.allocator.quarantined_pages == 4
    scheduler.allocator.check()
    stuck = {page for pages in scheduler.allocator._quarantined.values() for page in pages}
    # The second request goes through the same engines while the writes of the first are still in flight.
    report = scheduler.run([second])
    assert not report.failures
    assert not stuck & set(scheduler.allocator.allocate("probe", scheduler.allocator.free_pages))
    before = group.cluster.command_decode(RowDigest("b"), RowDigestIs).digest
    group.fabric.release()
    group.cluster.close_pool()
    assert group.cluster.command_decode(RowDigest("b"), RowDigestIs).digest == before, (
        "a late write hit the next request"
    )
    group.release("b")
    check_whole(group.decode_allocator, quarantined=4)


def test_a_write_that_ends_late_frees_its_pages(start: Callable[..., Group]) -> None:
    group = start(transfer_timeout_s=1.0, debug=False)
    scheduler = group.scheduler()
    first, second = requests_of(60, 60)
    group.fabric.holding = True
    scheduler.run([first])
    group.fabric.release()
    scheduler.run([second])
    group.release("b")
    check_whole(scheduler.allocator)


def test_an_engine_that_had_to_be_closed_is_replaced(start: Callable[..., Group]) -> None:
    group = start(transfer_timeout_s=1.0, debug=False)
    (request,) = requests_of(30)
    group.fabric.holding = True
    report = group.scheduler().run([request])
    assert report.failures
    group.cluster.close_pool()
    group.fabric.release()
    report = group.scheduler().run([request])
    assert not report.failures
    group.release("a")
