"""Hand-overs that fail: the cause is told, others go on, and no page is lost, freed twice or used too early."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import pytest
from handover_group import PAGE, RANKS, Group, SelectiveFabric, check_whole, requests_of

from cpkv.cache.allocator import PageAllocator
from cpkv.engine import rank_transfers
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.engine.generation import generate
from cpkv.engine.prefill import PrefillScheduler
from cpkv.engine.prefill_report import PrefillReport
from cpkv.engine.rank_worker import RankWorker
from cpkv.errors import TransferError
from cpkv.protocol.messages import (
    AbortTransfer,
    DecodedTokens,
    DecodeStep,
    RowDigest,
    RowDigestIs,
)
from cpkv.testing.registration import register_cpu_ci
from cpkv.testing.waiting import eventually
from cpkv.transfer.backend import TransferStatus
from cpkv.transfer.runs import Run

register_cpu_ci(est_time=15, suite="transfer")


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
    # Nobody can tell whether a failed write still lands: these pages wait until the engine is rebuilt.
    abort = next(message for message in group.decode_log if isinstance(message, AbortTransfer))
    assert (abort.request_id, abort.writes_may_land) == ("a", True)
    decoded = group.cluster.ask_decode(DecodeStep(("b", "c")), DecodedTokens)
    assert len(decoded.tokens) == 2
    group.release("b", "c")
    check_whole(group.decode_allocator, quarantined=-(-(100 + 4) // PAGE))


@pytest.mark.parametrize("part", ["latent", "index"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_page_that_changes_on_its_way_is_noticed(
    start: Callable[..., Group], monkeypatch: Any, part: str, times: int
) -> None:
    """Once, and it is sent again; twice, and the request fails with position, rank and both digests."""
    honest = SelectiveFabric.copy
    changed: list[Run] = []

    def copy(fabric: SelectiveFabric, session_id: str, run: Run) -> TransferStatus:
        status = honest(fabric, session_id, run)
        pages = group.cluster.geometry
        wanted = pages.latent_page_bytes if part == "latent" else pages.index_page_bytes
        if (
            status.state == "done"
            and len(changed) < times
            and run.length % wanted == 0
            and run.target
            in (
                *(earlier.target for earlier in changed[:1]),
                *([] if changed else [run.target]),
            )
        ):
            changed.append(run)
            ctypes.memset(run.target + run.length - 1, ctypes.c_ubyte.from_address(run.source).value ^ 0x55, 1)
        return status

    monkeypatch.setattr(SelectiveFabric, "copy", copy)
    group = start()
    requests = requests_of(60)
    if times == 1:
        result = generate(group.cluster, requests, shared=True)
        assert len(changed) == 1
        assert result.same_bits(generate(group.cluster, requests, shared=False))
        return
    report = group.scheduler().run(requests)
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
            pool = worker._pool if isinstance(worker, RankWorker) else worker._requests._pool
            pools.setdefault(getattr(worker, "_rank", -1), []).append(pool)
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
    assert re.fullmatch(r"request a: 4 pages of ranks \[.*\] did not come within 1 s", str(report.failures["a"]))
    held = len(group.fabric.held)
    assert held > 0
    assert scheduler.allocator.quarantined_pages == 4
    scheduler.allocator.check()
    stuck = {page for pages in scheduler.allocator._quarantined.values() for page in pages}
    # The second request goes through the same engines while the writes of the first are still in flight.
    report = scheduler.run([second])
    assert not report.failures
    assert not stuck & set(scheduler.allocator.allocate("probe", scheduler.allocator.free_pages))
    before = group.cluster.ask_decode(RowDigest("b"), RowDigestIs).digest
    group.fabric.release()
    group.cluster.close_pool()
    assert group.cluster.ask_decode(RowDigest("b"), RowDigestIs).digest == before, "a late write hit the next request"
    group.release("b")
    eventually(lambda: not group.decode_allocator.quarantined_pages, "the engine was rebuilt", 10.0)
    check_whole(group.decode_allocator)


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


def test_an_engine_that_had_to_be_closed_is_replaced(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_transfers, "DRAIN_TIMEOUT_S", 0.2)
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


def test_an_interrupted_prefill_tells_the_decode_worker(start: Callable[..., Group], monkeypatch: Any) -> None:
    """Its pages there are free, or in quarantine where a write may land; nothing waits for a lease to end."""
    group = start(debug=False)
    scheduler = group.scheduler()
    honest, batches = PrefillScheduler._run_batch, list[int]()

    def run_batch(self: PrefillScheduler, *arguments: Any) -> None:
        if batches:
            raise KeyboardInterrupt
        batches.append(1)
        honest(self, *arguments)

    monkeypatch.setattr(PrefillScheduler, "_run_batch", run_batch)
    with pytest.raises(KeyboardInterrupt):
        scheduler.run(requests_of(150, 40))
    assert not group.decode_allocator.request_ids
    group.decode_allocator.check()
    causes = {message.cause for message in group.decode_log if isinstance(message, AbortTransfer)}
    assert causes == {"the prefill was interrupted"}


@pytest.mark.parametrize("moment", ["waiting", "computing", "sending"])
def test_a_client_that_goes_takes_no_other_with_it(start: Callable[..., Group], monkeypatch: Any, moment: str) -> None:
    group = start(num_pages=18, debug=False)
    scheduler = group.scheduler()
    victim = {"waiting": "c", "computing": "a", "sending": "a"}[moment]
    honest, batches = PrefillScheduler._run_batch, list[int]()

    cancel = PrefillScheduler._cancel

    def run_batch(self: PrefillScheduler, *arguments: Any) -> None:
        honest(self, *arguments)
        batches.append(1)
        if len(batches) == (2 if moment == "sending" else 1):
            # Nothing arrives before it is given up, however fast the engine is.
            group.fabric.holding = moment == "sending"
            self.cancel(victim, TransferError("its client went away"))

    def release_then(self: PrefillScheduler) -> None:
        cancel(self)
        group.fabric.release()

    monkeypatch.setattr(PrefillScheduler, "_run_batch", run_batch)
    monkeypatch.setattr(PrefillScheduler, "_cancel", release_then)
    report = scheduler.run(requests_of(100, 60, 70))
    assert {name: str(error) for name, error in report.failures.items()} == {victim: "its client went away"}
    assert set(report.first_tokens) == set("abc") - {victim}
    group.release(*report.first_tokens)
    check_whole(scheduler.allocator)
    eventually(lambda: not group.decode_allocator.quarantined_pages, "nothing is in quarantine")
    check_whole(group.decode_allocator)
