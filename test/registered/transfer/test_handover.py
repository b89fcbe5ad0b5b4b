"""Requests handed from a prefill scheduler to a decode worker, ranks as threads, diagnostics on: order and bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from handover_group import PAGE, RANKS, Group, check_whole, requests_of

from cpkv.engine.commands import RunBatch, SendPages
from cpkv.engine.generation import generate
from cpkv.engine.rank_worker import RankWorker
from cpkv.protocol.messages import (
    FinishTransfer,
    PagesSent,
)
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="transfer")


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
    sends = [(n, c) for n, (_, event, c) in enumerate(order) if event == "begin" and isinstance(c, SendPages)]
    assert {command.request_id for _, command in sends} == {"a", "b"}
    for begun, command in sends:
        for number, (_, event, batch) in enumerate(order):
            if event != "end" or not isinstance(batch, RunBatch):
                continue
            written = {
                token // PAGE
                for segment in batch.spec.segments
                if segment.request_id == command.request_id
                for token in range(segment.start, segment.start + segment.length)
            }
            # On every rank, since any of them may own a page of a batch.
            assert number < begun or not written & set(command.positions), "a page was sent while a batch wrote it"
    batches = [number for number, (_, event, c) in enumerate(order) if event == "begin" and isinstance(c, RunBatch)]
    assert min(number for number, _ in sends) < max(batches), "pages of the first chunk wait for the last"
    group.release("a", "b")


def test_without_overlap_pages_wait_for_the_whole_prompt(start: Callable[..., Group], monkeypatch: Any) -> None:
    order: list[tuple[int, Any]] = []
    honest = RankWorker.handle
    monkeypatch.setattr(
        RankWorker,
        "handle",
        lambda worker, command: (order.append((worker._rank, command)), honest(worker, command))[1],
    )
    group = start(overlap=False)
    group.scheduler().run(requests_of(200))
    kinds = [type(command) for rank, command in order if rank == 0 and isinstance(command, RunBatch | SendPages)]
    assert kinds == [RunBatch] * 3 + [SendPages]
    group.release("a")


def test_each_page_is_sent_once_by_its_owner(start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    pages: dict[str, dict[int, int]] = {}
    honest = RankWorker.handle

    def handle(worker: RankWorker, command: Any) -> Any:
        if isinstance(command, SendPages):
            pages.setdefault(command.request_id, {}).update(zip(command.positions, command.pages, strict=True))
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


def test_each_run_counts_what_it_sent_itself(start: Callable[..., Group]) -> None:
    group = start(debug=False)
    scheduler = group.scheduler()
    first, second = requests_of(100, 33)
    counts = [sum(scheduler.run([request]).sent_pages) for request in (first, second)]
    assert counts == [-(-100 // PAGE), -(-33 // PAGE)]
    group.release("a", "b")
