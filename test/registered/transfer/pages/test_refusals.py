"""What a decode worker does not take, and pages that stay out of use while a write may still touch them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cpkv.errors import ProtocolError, TransferError
from cpkv.protocol import messages as m
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.channel import Channel, listen
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.inprocess import InProcessFabric

register_cpu_ci(est_time=5, suite="transfer")


def test_a_transfer_with_a_missing_page_is_not_finished(prefill: Any, decode: Any) -> None:
    prefill.write("a", 30)
    targets = prefill.open("a")
    pages = prefill.allocator.pages_of("a")
    for rank in (0, 2):
        prefill.senders[rank].send("a", 1, prefill.moves("a", targets, rank))
    missing = [position for position, page in enumerate(pages) if prefill.placement.owner(page) == 1]
    with pytest.raises(
        ProtocolError,
        match=f"{len(missing)} of 8 pages never arrived, the first is position {missing[0]} of rank 1",
    ):
        prefill.finish("a")
    with pytest.raises(ProtocolError, match="is not complete; finish its transfer first"):
        prefill.scheduler.ask(m.DecodeStep(("a",)), m.DecodedTokens)
    prefill.senders[1].send("a", 1, prefill.moves("a", targets, 1))
    prefill.finish("a")


def test_a_page_is_taken_once_and_from_its_owner(prefill: Any) -> None:
    prefill.write("a", 30)
    targets = prefill.open("a")
    prefill.send("a", targets)
    with pytest.raises(ProtocolError, match="was sent twice"):
        prefill.senders[1].send("a", 1, prefill.moves("a", targets, 1))
    for positions, words in (
        ((99,), "page position 99 of 8"),
        ((-1,), "page position -1 of 8"),
        ((0, 0), "names a page position twice"),
    ):
        with pytest.raises(ProtocolError, match=words):
            prefill.links[1].ask(m.PagesSent("a", 1, 0, positions), m.Done)
    prefill.finish("a")
    with pytest.raises(ProtocolError, match="was finished before"):
        prefill.finish("a")
    prefill.write("b", 30)
    prefill.open("b")
    owner = prefill.placement.owner(prefill.allocator.pages_of("b")[0])
    with pytest.raises(ProtocolError, match=f"position 0 belongs to rank {owner} and came from rank {(owner + 1) % 3}"):
        prefill.links[(owner + 1) % 3 + 1].ask(m.PagesSent("b", 1, (owner + 1) % 3, (0,)), m.Done)


def test_what_belongs_to_an_earlier_attempt_is_refused(prefill: Any, decode: Any) -> None:
    prefill.write("a", 30)
    prefill.open("a", attempt=1)
    prefill.scheduler.ask(m.AbortTransfer("a", 1, "a test", writes_may_land=True), m.Done)
    with pytest.raises(ProtocolError, match="request a is not open here"):
        prefill.links[1].ask(m.PagesSent("a", 1, 0, (0,)), m.Done)
    targets = prefill.open("a", attempt=2)
    late = [
        m.PagesSent("a", 1, prefill.placement.owner(prefill.allocator.pages_of("a")[0]), (0,)),
        m.FinishTransfer("a", 1, 7),
        m.AbortTransfer("a", 1, "late", writes_may_land=False),
    ]
    for message in late:
        with pytest.raises(ProtocolError, match="a message of attempt 1 came during attempt 2; dropped"):
            sender = message.rank if isinstance(message, m.PagesSent) else -1
            prefill.links[sender + 1].ask(message, object)
    prefill.send("a", targets, attempt=2)
    prefill.finish("a", attempt=2)
    assert decode.allocator.quarantined_pages == 8
    decode.allocator.check()


def test_pages_stay_out_of_use_while_a_write_may_touch_them(prefill: Any, decode: Any, fabric: InProcessFabric) -> None:
    prefill.write("a", 30)
    before = [pool.latent.clone() for pool in prefill.pools]
    targets = prefill.open("a")
    fabric.hold()
    with pytest.raises(TransferError, match="rank 0 could not send . pages of request a: .*was not done after 0 s"):
        prefill.send("a", targets, timeout_s=0.01)
    assert not prefill.senders[0].drain(0.01), "a write that is held can still read the pages"
    prefill.scheduler.ask(m.AbortTransfer("a", 1, "held", writes_may_land=True), m.Done)
    assert decode.allocator.quarantined_pages == len(targets)
    # Everything else that the decode worker has goes to others, and nothing of it lies where writes may land.
    others = []
    for number in range(20):
        prefill.write(f"b{number}", 7)
        others.append(prefill.open(f"b{number}"))
        prefill.allocator.free(f"b{number}")
    assert not set(targets) & {page for pages in others for page in pages}
    for rank, pool in enumerate(prefill.pools):
        own = [move.source for move in prefill.moves("a", targets, rank)]
        assert_same_bits(pool.latent[own], before[rank][own], f"held pages of rank {rank}")
    decode.pool.poison(list(range(64)))
    fabric.release()
    assert prefill.senders[0].drain(30.0)
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
    assert prefill.senders[0].drain(1.0)
    prefill.scheduler.ask(m.AbortTransfer("a", 1, "cut", writes_may_land=True), m.Done)
    others = prefill.open("b")
    assert not set(others) & set(targets)
    prefill.send("b", others)
    prefill.finish("b")
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
            prefill.senders[rank].send("a", 1, [wrong])


def test_a_late_answer_is_not_taken_for_the_next_one(prefill: Any) -> None:
    listener, late = listen("127.0.0.1", 0), threading.Event()
    welcome = prefill.scheduler.welcome

    def serve() -> None:
        connection, _ = listener.accept()
        channel = Channel(connection, m.ToDecode, "a prefill worker")
        channel.receive(30.0)
        channel.send(welcome)
        channel.receive(30.0)
        late.wait(30.0)
        channel.send(m.TransferOpened("a", 1, (5,)))
        try:
            channel.receive(30.0)
            channel.send(m.TransferOpened("b", 2, (9,)))
        except TransferError:
            pass
        channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    sender = m.SenderDescription(rank=-1, cp_size=2, strategy="zigzag")
    link = DecodeLink("127.0.0.1", listener.getsockname()[1], m.Hello("", welcome.pool, sender), timeout_s=1.0)
    answers = []
    with pytest.raises(TransferError, match="sent no whole message for 1.0 s"):
        link.ask(m.OpenTransfer("a", 1, 3, 1, (0,), m.Sampling()), m.TransferOpened)
    late.set()
    try:
        answers.append(link.ask(m.OpenTransfer("b", 2, 3, 1, (0,), m.Sampling()), m.TransferOpened))
    except TransferError:
        pass  # giving the connection up is as good
    finally:
        link.close()
        thread.join()
        listener.close()
    assert answers in ([], [m.TransferOpened("b", 2, (9,))])


def test_an_interrupted_question_ends_the_connection(prefill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill.write("a", 5)
    link = prefill.scheduler

    def interrupt(timeout_s: float | None = None) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(link._channel, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prefill.open("a")
    with pytest.raises(TransferError):
        link.ask(m.AbortTransfer("a", 1, "interrupted", writes_may_land=False), m.Done)
    assert link.closed
