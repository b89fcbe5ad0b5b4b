"""The decode side of transfers, by plain examples: who holds which pages after which message."""

from __future__ import annotations

import pytest

from cpkv.cache.allocator import PageAllocator
from cpkv.errors import BusyError, CapacityError, PromptError, ProtocolError, TransferError
from cpkv.layout.placement import PagePlacement
from cpkv.protocol import messages as m
from cpkv.protocol.receiver import MAX_INSTANCES, TransferReceiver, store_key
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")

TARGET = m.TransferTarget("decode-1", (m.MemoryRegion(0, 64),))
SENDERS = (0, 1, 0)


class World:
    """A receiver over ten pages of two tokens, and a scheduler with two ranks; each request takes four pages."""

    def __init__(self, held_position: int | None = None) -> None:
        self.store = PageAllocator(11, PagePlacement(2, 1))
        self.now = 100.0
        held = {} if held_position is None else {held_position: self.store.allocate("prefix", 1)[0]}
        self.receiver = TransferReceiver(
            self.store,
            page_size=2,
            targets=lambda: (TARGET,),
            vocab_size=10,
            lease_s=5.0,
            progress_s=3.0,
            held=lambda opened: held,
        )

    def who(self, rank: int = -1, instance: str = "one") -> m.SenderDescription:
        return m.SenderDescription(rank=rank, cp_size=2, strategy="zigzag", instance=instance)

    def open(self, name: str, attempt: int, instance: str = "one") -> m.TransferOpened:
        return self.receiver.open(announcement(name, attempt), self.who(instance=instance), self.now)

    def sent(self, name: str, attempt: int, rank: int, positions: tuple[int, ...], report: int = 0) -> m.PagesTaken:
        message = m.PagesSent(name, attempt, rank, report, positions)
        return self.receiver.pages_sent(message, self.who(rank), (), self.now)

    def finish(self, name: str, attempt: int, token: int = 3) -> m.TransferComplete:
        return self.receiver.finish(m.FinishTransfer(name, attempt, token), self.who(), self.now)

    def abort(self, name: str, attempt: int, *, may_land: bool, instance: str = "one") -> None:
        message = m.AbortTransfer(name, attempt, "the client has gone", may_land)
        assert self.receiver.abort(message, self.who(instance=instance), self.now) == m.Done()

    def drained(self, name: str, attempt: int) -> None:
        assert self.receiver.drained(m.WritesDrained(name, attempt), self.who(), self.now) == m.Done()

    def complete(self, name: str, attempt: int) -> None:
        self.open(name, attempt)
        self.sent(name, attempt, 0, (0, 2))
        self.sent(name, attempt, 1, (1,))
        self.finish(name, attempt)

    def places(self) -> tuple[int, int, int]:
        """Pages free, held, in quarantine."""
        self.store.check()
        free, quarantined = self.store.free_pages, self.store.quarantined_pages
        return free, self.store.capacity_pages - free - quarantined, quarantined


def announcement(name: str, attempt: int, **changed: object) -> m.OpenTransfer:
    fields = {"prompt_tokens": 5, "max_new_tokens": 2, "senders": SENDERS, "sampling": m.Sampling()} | changed
    return m.OpenTransfer(name, attempt, **fields)  # type: ignore[arg-type]


def test_a_request_comes_in_is_decoded_and_released() -> None:
    world = World()
    opened = world.open("a", 1)
    assert opened == m.TransferOpened("a", 1, (0, 1, 2), (1, 2, 3), (TARGET,))
    assert world.places() == (6, 4, 0)
    assert world.sent("a", 1, 1, (1,)) == m.PagesTaken("a", 1, 0)
    with pytest.raises(ProtocolError, match="request a: 2 of 3 pages never arrived, the first is position 0 of rank 0"):
        world.finish("a", 1)
    with pytest.raises(ProtocolError, match="request a is not complete"):
        world.receiver.complete("a")
    world.sent("a", 1, 0, (0, 2))
    assert world.receiver.arriving == 1
    assert world.finish("a", 1) == world.finish("a", 1) == m.TransferComplete("a", 1)
    assert world.receiver.complete("a").first_token == 3 and world.receiver.arriving == 0
    assert world.receiver.complete("a").pages == (1, 2, 3, 4)
    world.receiver.release(m.ReleaseRequest("a"), world.who(), world.now)
    assert world.places() == (10, 0, 0)


def test_positions_that_are_here_already_are_left_out_by_name() -> None:
    """Kind 17: by explicit position and not by counting."""
    world = World(held_position=1)
    opened = world.open("a", 1)
    assert opened.positions == (0, 2) and opened.pages == (2, 3)
    world.sent("a", 1, 0, (0, 2))
    with pytest.raises(ProtocolError, match="page position 1 was there before it was sent"):
        world.sent("a", 1, 1, (1,))
    world.finish("a", 1)
    assert world.receiver.complete("a").pages == (2, 1, 3, 4)
    world.abort("a", 1, may_land=False)
    assert world.store.pages_of("prefix") == (1,) and world.places() == (9, 1, 0)


def test_an_aborted_transfer_gives_its_pages_back_only_once_no_write_can_land() -> None:
    """Kind 28."""
    world = World()
    world.open("a", 1)
    world.abort("a", 1, may_land=True)
    assert world.places() == (6, 0, 4)
    world.abort("a", 1, may_land=True)
    assert world.places() == (6, 0, 4), "said again it changes nothing"
    world.drained("a", 1)
    world.drained("a", 1)
    assert world.places() == (10, 0, 0)


def test_an_aborted_transfer_of_which_nothing_was_sent_is_free_at_once() -> None:
    world = World()
    world.open("a", 1)
    world.abort("a", 1, may_land=False)
    assert world.places() == (10, 0, 0)


def test_a_complete_request_is_free_at_once_when_it_is_aborted() -> None:
    """All its writes were reported, so none is under way."""
    world = World()
    world.complete("a", 1)
    world.abort("a", 1, may_land=True)
    assert world.places() == (10, 0, 0)


def test_an_abort_that_comes_before_its_announcement_wins() -> None:
    """Kind 35: the announcement was on its way on a connection that broke."""
    world = World()
    world.abort("a", 1, may_land=False)
    with pytest.raises(ProtocolError, match="attempt 1 is over: the client has gone"):
        world.open("a", 1)
    assert world.places() == (10, 0, 0)
    world.open("a", 2)


def test_an_announcement_that_is_late_is_dropped_even_if_nothing_is_known_of_its_attempt() -> None:
    """Kind 35: attempts count up."""
    world = World()
    world.open("b", 7)
    with pytest.raises(ProtocolError, match="request a: attempt 6 was announced after attempt 7; it is late"):
        world.open("a", 6)
    with pytest.raises(ProtocolError, match="attempt 7 was announced after attempt 7"):
        world.open("a", 7)
    assert world.places() == (6, 4, 0)


def test_the_same_announcement_again_is_answered_again() -> None:
    world = World()
    opened = world.open("a", 1)
    world.open("b", 2)
    assert world.open("a", 1) == opened
    assert world.places() == (2, 8, 0)


def test_a_later_attempt_takes_the_place_of_an_earlier_one_whose_writes_may_still_land() -> None:
    """Kinds 28 and 35."""
    world = World()
    first = world.open("a", 1)
    second = world.open("a", 2)
    assert not set(first.pages) & set(second.pages)
    assert world.places() == (2, 4, 4)
    with pytest.raises(ProtocolError, match="attempt 1 is over: attempt 2 took its place"):
        world.sent("a", 1, 1, (1,))
    with pytest.raises(ProtocolError, match="attempt 1 is over"):
        world.finish("a", 1)
    world.abort("a", 1, may_land=True)
    assert world.places() == (2, 4, 4), "an abort of the earlier attempt does not end the later one"
    world.drained("a", 1)
    assert world.places() == (6, 4, 0)


@pytest.mark.parametrize("attempt", [1, 3])
def test_messages_of_another_attempt_change_nothing(attempt: int) -> None:
    """Kind 35."""
    world = World()
    world.open("a", 2)
    with pytest.raises(ProtocolError, match=f"a message of attempt {attempt} came during attempt 2; dropped"):
        world.sent("a", attempt, 1, (1,))
    with pytest.raises(ProtocolError, match=f"a message of attempt {attempt} came during attempt 2; dropped"):
        world.finish("a", attempt)
    assert world.receiver.requests["a"].arrivals.missing == (0, 1, 2)


def test_a_current_attempt_is_not_taken_for_one_that_ended_long_ago() -> None:
    """A long transfer during which thousands of others end."""
    world = World()
    world.open("a", 1)
    for attempt in range(2, 3000):
        world.abort("b", attempt, may_land=False)
    world.sent("a", 1, 0, (0, 2))
    world.sent("a", 1, 1, (1,))
    world.finish("a", 1)
    world.abort("a", 1, may_land=True)
    assert world.places() == (10, 0, 0)


def test_a_later_attempt_does_not_take_the_place_of_a_complete_one() -> None:
    world = World()
    world.complete("a", 1)
    with pytest.raises(ProtocolError, match="request a is open already, for this scheduler; use an id once"):
        world.open("a", 2)


def test_two_schedulers_do_not_touch_each_other() -> None:
    """Kind 33: one id, two instances, and the same attempt number."""
    world = World()
    world.open("a", 1)
    with pytest.raises(ProtocolError, match="request a is open already, for another scheduler"):
        world.open("a", 1, instance="two")
    world.abort("a", 1, may_land=False, instance="two")
    with pytest.raises(ProtocolError, match="request a is not open here"):
        world.receiver.pages_sent(m.PagesSent("a", 1, 1, 0, (1,)), world.who(1, "three"), (), world.now)
    assert world.places() == (6, 4, 0) and world.receiver.requests["a"].arrivals.missing == (0, 1, 2)
    world.sent("a", 1, 0, (0, 2))
    world.sent("a", 1, 1, (1,))
    world.finish("a", 1)
    with pytest.raises(ProtocolError, match="request a belongs to another scheduler"):
        world.receiver.release(m.ReleaseRequest("a"), world.who(instance="two"), world.now)


def test_names_under_which_pages_are_held_do_not_meet() -> None:
    assert store_key("a (attempt 1 of 'b')", "c", 2) != store_key("a", "b') (attempt 2 of 'c", 1)


def test_without_pages_a_request_may_come_again_and_one_that_never_fits_may_not() -> None:
    world = World()
    world.open("a", 1)
    world.open("b", 2)
    with pytest.raises(BusyError, match="needs 4 pages, 2 are free"):
        world.open("c", 3)
    with pytest.raises(ProtocolError, match="attempt 3 is over"):
        world.open("c", 3)
    world.abort("a", 1, may_land=False)
    world.open("c", 4)
    with pytest.raises(CapacityError) as caught:
        world.receiver.open(announcement("d", 5, max_new_tokens=60), world.who(), world.now)
    assert not isinstance(caught.value, BusyError)
    assert world.places() == (2, 8, 0)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"prompt_tokens": 0}, PromptError, "has 0 prompt tokens and 2 to decode; both must be 1 or more"),
        ({"max_new_tokens": 0}, PromptError, "has 5 prompt tokens and 0 to decode"),
        ({"senders": (0, 1)}, ProtocolError, "5 tokens are 3 pages, and 2 senders are named"),
        ({"senders": (0, 2, 1)}, ProtocolError, r"its senders are \(0, 2, 1\), of 2 ranks"),
        ({"senders": (0, -1, 1)}, ProtocolError, "its senders are"),
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused(
    changed: dict[str, object], error: type[Exception], says: str
) -> None:
    """Kind 13, and what a peer may get wrong; an attempt of that id that is under way goes on."""
    world = World()
    world.open("a", 1)
    with pytest.raises(error, match=says):
        world.receiver.open(announcement("a", 2, **changed), world.who(), world.now)
    assert world.places() == (6, 4, 0) and world.receiver.requests["a"].opened.attempt == 1
    with pytest.raises(ProtocolError, match="a request id of 129 characters; 128 at most"):
        world.open("x" * 129, 3)


def test_pages_are_not_lost_when_the_engine_cannot_be_named() -> None:
    world = World()

    def nobody() -> tuple[m.TransferTarget, ...]:
        raise TransferError("the engine is being rebuilt")

    world.receiver._targets = nobody
    with pytest.raises(TransferError, match="being rebuilt"):
        world.open("a", 1)
    assert world.places() == (10, 0, 0)


def test_a_rank_reports_for_itself_and_a_token_must_exist() -> None:
    world = World()
    world.open("a", 1)
    with pytest.raises(ProtocolError, match="rank 0 reports pages as rank 1"):
        world.receiver.pages_sent(m.PagesSent("a", 1, 1, 0, (1,)), world.who(0), (), world.now)
    world.sent("a", 1, 0, (0, 2))
    world.sent("a", 1, 1, (1,))
    with pytest.raises(ProtocolError, match="starts from token 10, and the model knows 0 to 9"):
        world.finish("a", 1, 10)
    world.finish("a", 1, 9)
    with pytest.raises(ProtocolError, match="was finished before, with another first token"):
        world.finish("a", 1, 8)


def test_a_page_that_is_damaged_twice_ends_the_attempt_and_not_its_pages() -> None:
    """Kind 28: other writes of the attempt may be under way."""
    world = World()
    world.open("a", 1)
    for report, damaged in ((0, (1,)), (1, ())):
        message = m.PagesSent("a", 1, 1, report, (1,), ("aa",))
        if damaged:
            assert world.receiver.pages_sent(message, world.who(1), ("xx",), world.now).damaged == damaged
        else:
            with pytest.raises(TransferError, match="twice"):
                world.receiver.pages_sent(message, world.who(1), ("xx",), world.now)
    assert world.places() == (6, 0, 4)
    world.abort("a", 1, may_land=True)
    world.drained("a", 1)
    assert world.places() == (10, 0, 0)


def test_what_stalls_is_given_up_and_kept_in_quarantine() -> None:
    """Kinds 28 and 40."""
    world = World()
    world.open("a", 1)
    world.now += 2.0
    world.sent("a", 1, 1, (1,))
    world.now += 2.9
    assert world.receiver.tick(world.now) == ()
    world.now += 0.2
    (ended,) = world.receiver.tick(world.now)
    assert ended == ("a", 1, "no page arrived for 3 s, and 2 are missing")
    assert world.places() == (6, 0, 4)
    with pytest.raises(ProtocolError, match="attempt 1 is over: no page arrived for 3 s"):
        world.sent("a", 1, 0, (0, 2))


def test_a_silent_scheduler_loses_everything_and_any_message_keeps_it() -> None:
    """Kind 28: of a request that was complete no write is under way; of another one may be."""
    world = World()
    world.complete("a", 1)
    world.open("b", 2)
    for _ in range(3):
        world.now += 2.0
        world.receiver.heard(world.who(1), world.now)
        world.receiver.requests["b"].progress_at = world.now
        assert world.receiver.tick(world.now) == ()
    world.now += 5.1
    causes = {ended.request_id: ended.cause for ended in world.receiver.tick(world.now)}
    assert causes == dict.fromkeys("ab", "prefill instance one has said nothing for 5 s")
    assert world.places() == (6, 0, 4)


def test_a_closed_engine_ends_every_quarantine_but_no_transfer() -> None:
    world = World()
    world.open("a", 1)
    world.abort("a", 1, may_land=True)
    world.complete("b", 2)
    world.abort("b", 2, may_land=True)
    world.open("c", 3)
    with pytest.raises(ProtocolError, match="1 transfers are under way; end them before the engine is closed"):
        world.receiver.engine_closed()
    assert world.places() == (2, 4, 4)
    world.receiver.end_arriving("the engine is rebuilt")
    assert world.receiver.quarantined == 2
    assert world.receiver.engine_closed() == 2
    assert world.places() == (10, 0, 0)
    world.drained("a", 1)
    with pytest.raises(ProtocolError, match="attempt 3 is over: the engine is rebuilt"):
        world.sent("c", 3, 1, (1,))


def test_what_is_under_way_cannot_be_drained() -> None:
    world = World()
    world.open("a", 1)
    with pytest.raises(ProtocolError, match="request a is under way; abort it before its writes are drained"):
        world.drained("a", 1)


def test_schedulers_that_are_gone_are_forgotten_unless_they_left_something() -> None:
    """Kind 15: no memory that grows with every restart of a prefill."""
    world = World()
    world.open("a", 1, instance="left a quarantine")
    world.abort("a", 1, may_land=True, instance="left a quarantine")
    for number in range(2 * MAX_INSTANCES):
        world.receiver.heard(world.who(instance=str(number)), world.now)
    world.now += 6.0
    world.receiver.tick(world.now)
    assert len(world.receiver._instances) == MAX_INSTANCES
    assert world.receiver.quarantined == 1
