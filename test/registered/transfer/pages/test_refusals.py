"""What a decode worker does not take, and pages that stay out of use while a write may still touch them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cpkv.errors import ProtocolError, TransferError
from cpkv.protocol import messages as m
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.channel import listen
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.inprocess import InProcessFabric
from cpkv.transfer.page_sender import DrainedNews, SendOrder
from cpkv.transfer.server import Connection, MessageServer

register_cpu_ci(est_time=5, suite="transfer")


def test_a_transfer_with_a_missing_page_is_not_finished(prefill: Any, decode: Any) -> None:
    prefill.write("a", 30)
    targets = prefill.open("a")
    pages = prefill.allocator.pages_of("a")
    for rank in (0, 2):
        prefill.send_moves(rank, "a", prefill.moves("a", targets, rank))
    missing = [position for position, page in enumerate(pages) if prefill.placement.owner(page) == 1]
    with pytest.raises(
        ProtocolError,
        match=f"{len(missing)} of 8 pages never arrived, the first is position {missing[0]} of rank 1",
    ):
        prefill.finish("a")
    with pytest.raises(ProtocolError, match="is not complete; finish its transfer first"):
        prefill.scheduler.ask(m.ReleaseRequest("a"), m.Done)
    prefill.send_moves(1, "a", prefill.moves("a", targets, 1))
    prefill.finish("a")


def test_a_page_is_taken_once_and_from_its_owner(prefill: Any) -> None:
    prefill.write("a", 30)
    targets = prefill.open("a")
    prefill.send("a", targets)
    with pytest.raises(ProtocolError, match="was sent twice"):
        prefill.send_moves(1, "a", prefill.moves("a", targets, 1))
    for positions, words in (
        ((99,), "page position 99 of 8"),
        ((-1,), "page position -1 of 8"),
        ((0, 0), "names a page position twice"),
    ):
        with pytest.raises(ProtocolError, match=words):
            prefill.links[1].ask(m.PagesSent("a", 1, 0, 99, positions), m.PagesTaken)
    prefill.finish("a")
    prefill.finish("a")
    with pytest.raises(ProtocolError, match="was finished before, with another first token"):
        prefill.scheduler.ask(m.FinishTransfer("a", 1, first_token=2), m.TransferComplete)
    prefill.write("b", 30)
    prefill.open("b", attempt=2)
    owner = prefill.placement.owner(prefill.allocator.pages_of("b")[0])
    with pytest.raises(ProtocolError, match=f"position 0 belongs to rank {owner} and came from rank {(owner + 1) % 3}"):
        prefill.links[(owner + 1) % 3 + 1].ask(m.PagesSent("b", 2, (owner + 1) % 3, 99, (0,)), m.PagesTaken)


def test_what_belongs_to_an_earlier_attempt_is_refused(prefill: Any, decode: Any) -> None:
    prefill.write("a", 30)
    prefill.open("a", attempt=1)
    prefill.scheduler.ask(m.AbortTransfer("a", 1, "a test", writes_may_land=True), m.Done)
    with pytest.raises(ProtocolError, match="attempt 1 is over: a test; its messages are dropped"):
        prefill.links[1].ask(m.PagesSent("a", 1, 0, 0, (0,)), m.PagesTaken)
    targets = prefill.open("a", attempt=2)
    late = [
        m.PagesSent("a", 1, prefill.placement.owner(prefill.allocator.pages_of("a")[0]), 0, (0,)),
        m.FinishTransfer("a", 1, 7),
    ]
    for message in late:
        with pytest.raises(ProtocolError, match="attempt 1 is over: a test; its messages are dropped"):
            sender = message.rank if isinstance(message, m.PagesSent) else -1
            prefill.links[sender + 1].ask(message, object)
    prefill.send("a", targets, attempt=2)
    prefill.finish("a", attempt=2)
    assert decode.allocator.quarantined_pages == 8
    prefill.scheduler.ask(m.AbortTransfer("a", 1, "late", writes_may_land=True), m.Done)
    assert decode.allocator.quarantined_pages == 8
    prefill.scheduler.ask(m.WritesDrained("a", 1), m.Done)
    assert decode.allocator.quarantined_pages == 0
    decode.check_rows("a", 30, targets)
    decode.allocator.check()


def test_pages_stay_out_of_use_while_a_write_may_touch_them(prefill: Any, decode: Any, fabric: InProcessFabric) -> None:
    prefill.write("a", 30)
    before = [pool.latent.clone() for pool in prefill.pools]
    targets = prefill.open("a")
    fabric.hold()
    sender = prefill.senders[0]
    sender.order(SendOrder("a", 1, prefill.moves("a", targets, 0), prefill.targets))
    for _ in range(20):
        sender.step()
    sender.stop("a", 1)
    sender.step()
    assert sender.busy, "a write that is held can still read the pages"
    assert sender.take_news() == ()
    prefill.scheduler.ask(m.AbortTransfer("a", 1, "held", writes_may_land=True), m.Done)
    assert decode.allocator.quarantined_pages == len(targets)
    # Everything else that the decode worker has goes to others, and nothing of it lies where writes may land.
    others = []
    for number in range(20):
        prefill.write(f"b{number}", 7)
        others.append(prefill.open(f"b{number}", attempt=number + 2))
        prefill.allocator.free(f"b{number}")
    assert not set(targets) & {page for pages in others for page in pages}
    for rank, pool in enumerate(prefill.pools):
        own = [move.source for move in prefill.moves("a", targets, rank)]
        assert_same_bits(pool.latent[own], before[rank][own], f"held pages of rank {rank}")
    decode.pool.poison(list(range(64)))
    fabric.release()
    assert prefill.run_sender(0) == [DrainedNews("a", 1, writes_may_land=False)]
    landed = {move.target for move in prefill.moves("a", targets, 0)}
    written = {page for page in range(64) if bool((decode.content([page]) != 0xFF).any())}
    assert written == landed, "the late writes landed elsewhere than in the quarantine"
    decode.allocator.check()


def test_a_failed_write_names_rank_and_cause_and_harms_no_other_request(
    prefill: Any, decode: Any, fabric: InProcessFabric
) -> None:
    prefill.write("a", 30)
    prefill.write("b", 30)
    targets = prefill.open("a")
    fabric.fail_next("the cable was cut")
    with pytest.raises(TransferError, match="rank 0 could not send . pages of request a: the cable was cut"):
        prefill.send("a", targets)
    prefill.scheduler.ask(m.AbortTransfer("a", 1, "cut", writes_may_land=True), m.Done)
    others = prefill.open("b", attempt=2)
    assert not set(others) & set(targets)
    prefill.send("b", others, attempt=2)
    prefill.finish("b", attempt=2)
    decode.check_rows("b", 30, others)
    prefill.scheduler.ask(m.ReleaseRequest("b"), m.Done)
    assert decode.allocator.quarantined_pages == len(targets)
    assert decode.allocator.free_pages == decode.allocator.capacity_pages - len(targets)
    decode.allocator.check()


def test_memory_that_is_not_registered_is_neither_read_nor_written(prefill: Any) -> None:
    prefill.write("a", 5)
    targets = prefill.open("a")
    rank = prefill.placement.owner(prefill.allocator.pages_of("a")[0])
    (move,) = [move for move in prefill.moves("a", targets, rank) if move.position == 0]
    for wrong in (move._replace(target=64), move._replace(source=prefill.pools[0].local_pages)):
        with pytest.raises(TransferError, match="not inside one region"):
            prefill.send_moves(rank, "a", [wrong])


class LateDecode:
    """Welcomes everybody, and opens a transfer only once it may."""

    def __init__(self, welcome: m.Welcome) -> None:
        self.welcome = welcome
        self.may_answer = threading.Event()

    def answer(self, connection: Connection, message: Any) -> Any:
        if isinstance(message, m.Hello):
            return self.welcome
        self.may_answer.wait(30.0)
        return m.TransferOpened(message.request_id, message.attempt, (0,), (5 if message.request_id == "a" else 9,), ())

    def closed(self, connection: Connection) -> None:
        pass

    def tick(self, now_s: float) -> None:
        pass


def test_a_late_answer_is_not_taken_for_the_next_one(prefill: Any) -> None:
    late = LateDecode(prefill.scheduler.welcome)
    server = MessageServer(listen("127.0.0.1", 0), m.ToDecode, late, secret="", where="late decode worker")
    server.start()
    sender = m.SenderDescription(rank=-1, cp_size=2, strategy="zigzag", instance="test")
    link = DecodeLink("127.0.0.1", server.port, m.Hello(late.welcome.pool, sender), timeout_s=1.0)
    answers = []
    with pytest.raises(TransferError, match="sent no whole message for 1.0 s"):
        link.ask(m.OpenTransfer("a", 1, 3, 1, (0,), m.Sampling()), m.TransferOpened)
    late.may_answer.set()
    try:
        answers.append(link.ask(m.OpenTransfer("b", 2, 3, 1, (0,), m.Sampling()), m.TransferOpened))
    except TransferError:
        pass  # giving the connection up is as good
    finally:
        link.close()
        server.close()
    assert answers in ([], [m.TransferOpened("b", 2, (0,), (9,), ())])


def test_an_interrupted_question_ends_the_connection(prefill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill.write("a", 5)
    link = prefill.scheduler

    def interrupt(timeout_s: float | None = None) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(link.channel, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prefill.open("a")
    with pytest.raises(TransferError):
        link.ask(m.AbortTransfer("a", 1, "interrupted", writes_may_land=False), m.Done)
    assert link.closed
