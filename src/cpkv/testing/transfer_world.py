"""Prefill, decode worker, registry, network and clock in one thread, with all that can go wrong, from one seed.

event -> both ends move -> every invariant is checked ...  -> calm: all ends well, every page is free on both sides

    transfer_schedule.run_schedule(seed)    one random schedule
    TransferWorld.do(event)                 one event, for a state machine
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random

from cpkv.errors import AllocatorError, CapacityError, CpkvError, TransferError
from cpkv.protocol import messages as m
from cpkv.testing.hostile_fabric import Fault, HostileFabric, Wire
from cpkv.testing.simulated_decode import LEASE_S, Decode
from cpkv.testing.simulated_prefill import PAGE_SIZE, Prefill, Prompt, WorldConfig
from cpkv.testing.simulated_registry import SimulatedRegistry

EVENTS_TOLD = 30
_NAMES = ("a", "b", "c")
_CALM_ROUNDS = 200


class TransferWorld:
    """One world. `do` lets an event happen and checks every invariant.

    Args:
        config: how it is built.
        rng: every choice is drawn from it.
        name: for the message of a fault.
    """

    def __init__(self, config: WorldConfig, rng: Random, name: str = "") -> None:
        self.config = config
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.now = 1000.0
        self._name = name
        self._is_calm = False
        self._told: deque[tuple[float, str]] = deque(maxlen=EVENTS_TOLD)
        self._serial = 0
        self._lives = 0
        self._serials: dict[tuple[str, int], int] = {}
        self._dead_serials: set[int] = set()
        self._ended: Counter[int] = Counter()
        self._begun: set[int] = set()
        self._wires: list[Wire] = []
        self._registry = SimulatedRegistry(self.now)
        self._fabric = HostileFabric(rng, self.counts, max_damaged=2 if config.verify else 0)
        self._fabric.on_land = lambda *landing: self._decode.check_landing(*landing) if self._decode else None
        self._decode: Decode | None = None
        self._new_decode()
        self._prefill = self._new_prefill()

    def _new_decode(self) -> None:
        self._lives += 1
        self._decode = Decode(
            self.config, self._lives, self._fabric, lambda *attempt: self._serials[attempt], lambda: self.now
        )
        self._beat()

    def _new_prefill(self) -> Prefill:
        self._lives += 1
        return Prefill(self.config, f"life-{self._lives}", self._fabric, self._connect, self._end)

    def _connect(self, sender: m.SenderDescription) -> Wire:
        is_there = self._decode is not None and self._registry.find(self.now) == f"decode-{self._decode.life}"
        if not is_there or (not self._is_calm and self.rng.random() < 0.02):
            raise TransferError("nobody listens there")
        wire = Wire(sender)
        self._wires.append(wire)
        return wire

    def _end(self, prompt: Prompt, error: CpkvError | None) -> None:
        self._ended[prompt.serial] += 1
        self.counts["handed over" if error is None else f"failed by {type(error).__name__}"] += 1
        self._note(f"request {prompt.name} (serial {prompt.serial}) ended: {error}")

    def _note(self, text: str) -> None:
        self._told.append((self.now, text))

    def do(self, event: str) -> None:
        """Let one thing happen, if it can happen now.

        Raises:
            Fault: an invariant was broken; the message has the last events.
        """
        try:
            self._note(event)
            if getattr(self, f"_{event}")() is not False:
                self.counts[event] += 1
            self._check()
        except Exception as error:
            raise Fault(f"{self._name}: {type(error).__name__}: {error}\n{self._story()}") from error

    def _story(self) -> str:
        return "\n".join(f"  {now:9.3f}  {text}" for now, text in self._told) + f"\n  {self.config}"

    def _check(self) -> None:
        self._prefill.allocator.check()
        if self._decode is not None and self._decode.dirty:
            self._decode.dirty = False
            self._decode.allocator.check()

    # Work.

    def _begin(self) -> bool:
        prefill, rng = self._prefill, self.rng
        taken = {*prefill.sender.open_requests, *prefill.sender.closing_requests, *prefill.used}
        free = [name for name in _NAMES if name not in taken]
        if prefill.dying or not free:
            return False
        try:
            self._announce(rng.choice(free))
        except CapacityError:
            return False
        return True

    def _begin_sound(self) -> None:
        self._beat()
        self._prefill.notice_cuts()
        self._announce("sound")

    def _announce(self, name: str) -> None:
        self._serial += 1
        tokens, new_tokens = self.rng.randint(1, 7 * PAGE_SIZE), self.rng.randint(1, 3)
        self._prefill.begin(name, self._serial, tokens, new_tokens, self.now)
        self._begun.add(self._serial)
        self._learn_attempts()
        self._note(f"  serial {self._serial} begins as {name}")

    def _learn_attempts(self) -> None:
        for attempt, serial in self._prefill.serial_of.items():
            self._serials[self._prefill.instance, attempt] = serial
        self._prefill.serial_of.clear()

    def _compute(self) -> bool:
        running = [prompt for prompt in self._prefill.prompts.values() if not prompt.ended]
        running = [prompt for prompt in running if prompt.done_tokens < prompt.tokens]
        if self._prefill.dying or not running:
            return False
        prompt = self.rng.choice(running)
        self._prefill.compute(prompt, self.rng.randint(1, 4 * PAGE_SIZE), self.now)
        self._note(f"  serial {prompt.serial} is computed to {prompt.done_tokens} of {prompt.tokens} tokens")
        return True

    def _pump(self) -> None:
        self._prefill.pump(self.now)
        self._learn_attempts()

    def _step(self) -> None:
        self.rng.choice(self._prefill.ranks).step()

    def _deliver(self) -> bool:
        decode = self._decode
        # What was sent before a connection broke comes late, and after much of what is sent on the next one.
        late = self.rng.random() < 0.15
        wires = [wire for wire in self._wires if wire.questions and wire.broken == late]
        if decode is None or decode.stopped or not wires:
            return False
        self._take_question(decode, self.rng.choice(wires))
        return True

    def _take_question(self, decode: Decode, wire: Wire) -> None:
        question = decode.answer(wire)
        self._note(f"  decode took a {'late ' * wire.broken}question of rank {wire.sender.rank}: {question}")
        if wire.broken:
            self.counts["late messages"] += 1
            if not wire.questions:
                self._wires.remove(wire)

    def _network(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self._fabric.move(hostile=True)

    def _flow(self) -> None:
        """A moment in which everything works."""
        self._pump()
        for rank in self._prefill.ranks:
            rank.step()
        for _ in range(2):
            self._fabric.move(hostile=self.rng.random() < 0.5)
            self._deliver()
        self._compute()
        self._beat()
        self.now += 0.01

    def _finish_use(self) -> bool:
        """Decode a token of a request that was handed over, or release it."""
        prefill = self._prefill
        waiting = [name for name in prefill.decoding if name not in prefill.releasing]
        if not waiting:
            return False
        name = self.rng.choice(waiting)
        if self.rng.random() < 0.5:
            prefill.ask(m.DecodeStep((name,)))
        else:
            prefill.releasing.add(name)
            prefill.ask(m.ReleaseRequest(name))
        return True

    # What goes wrong.

    def _cancel(self) -> bool:
        if not (names := self._prefill.sender.open_requests):
            return False
        self._prefill.sender.cancel(self.rng.choice(names), TransferError("the client has gone"))
        self._prefill.act()
        return True

    def _cut(self) -> bool:
        wires = [wire for wire in self._wires if not wire.broken]
        if not wires:
            return False
        under_way = [wire for wire in wires if wire.questions]
        self.rng.choice(under_way or wires).cut(self.rng)
        return True

    def _wait(self) -> None:
        self.now += self.rng.random()
        self._beat()

    def _jump(self) -> None:
        self.now += self.rng.choice((2.0, 5.0, 20.0))

    def _stop(self) -> bool:
        if self._decode is not None and self.rng.random() < 0.4:
            self._decode.stopped = True
        else:
            self.rng.choice(self._prefill.ranks).stopped = True
        return True

    def _go_on(self) -> None:
        if self._decode is not None:
            self._decode.stopped = False
        for rank in self._prefill.ranks:
            rank.stopped = self._prefill.dying

    def _heartbeat(self) -> None:
        self._prefill.heartbeat()

    def _decode_tick(self) -> bool:
        if self._decode is None or self._decode.stopped:
            return False
        for _ in self._decode.receiver.tick(self.now):
            self.counts["given up by decode"] += 1
        self._decode.drop_held()
        return True

    def _lose_ranks(self) -> bool:
        if not self.config.kills or self._prefill.dying:
            return False
        self._dead_serials |= self._begun
        self._cut_wires(ranks_only=True)
        self._prefill.lose_ranks()
        return True

    def _kill_prefill(self) -> bool:
        """All of it; the next one has another instance, other pages and the same request ids."""
        if not self.config.kills:
            return False
        prefill = self._prefill
        self._dead_serials |= self._begun
        for name in prefill.sender.open_requests:
            self._ended[prefill.prompts[name].serial] += 1
        self._fabric.kill([rank.memory for rank in prefill.ranks])
        self._cut_wires(ranks_only=False)
        self._prefill = self._new_prefill()
        return True

    def _cut_wires(self, *, ranks_only: bool) -> None:
        for wire in self._wires:
            if not wire.broken and (wire.sender.rank >= 0 or not ranks_only):
                wire.cut(self.rng)

    def _kill_decode(self) -> bool:
        if not self.config.kills or self._decode is None:
            return False
        self._decode.close_engine()
        for wire in self._wires:
            wire.questions.clear()
            wire.cut(self.rng)
        self._wires.clear()
        self._decode = None
        if self.rng.random() < 0.6:
            self._new_decode()
        return True

    def _start_decode(self) -> bool:
        if self._decode is not None:
            return False
        self._new_decode()
        return True

    def _beat(self) -> bool:
        decode = self._decode
        return decode is not None and not decode.stopped and self._registry.beat(f"decode-{decode.life}", self.now)

    def _stop_registry(self) -> None:
        self._registry.is_down = True

    def _restart_registry(self) -> None:
        self._registry.restart(self.now)

    def _rebuild_engine(self) -> bool:
        decode = self._decode
        if decode is None or decode.stopped:
            return False
        if decode.receiver.arriving:
            if self.rng.random() < 0.6:
                return False
            decode.receiver.end_arriving("the engine is rebuilt")
            self.counts["rebuilds under transfers"] += 1
        decode.rebuild_engine()
        decode.drop_held()
        return True

    # The end.

    def calm(self) -> None:
        """Let everything run well until nothing is left to do, and check that nothing is left.

        Raises:
            Fault: a request has not ended, or a page is not free.
        """
        self._note("calm")
        self._is_calm = True
        self._fabric.damage_left = 0
        self.do("start_decode")
        self.do("restart_registry")
        if self._prefill.dying:
            self.do("kill_prefill")
        self.do("go_on")
        self._calm_down()
        # All this has left nothing behind: what comes now succeeds, a page that is damaged once included.
        self._fabric.damage_left = int(self.config.verify)
        before = self.counts["handed over"]
        self.do("begin_sound")
        self._calm_down()
        if self.counts["handed over"] != before + 1:
            raise Fault(f"{self._name}: a request failed although nothing went wrong\n{self._story()}")

    def _calm_down(self) -> None:
        for _ in range(_CALM_ROUNDS):
            self.do("calm_round")
            if not self._restless():
                break
        self.now += 2 * LEASE_S
        self.do("decode_tick")
        self.do("final_check")

    def _restless(self) -> bool:
        prefill = self._prefill
        busy = prefill.sender.open_requests or prefill.sender.closing_requests or prefill.decoding
        return bool(busy or any(rank.sender.busy for rank in prefill.ranks))

    def _calm_round(self) -> None:
        self._fabric.settle(late=False)
        assert self._decode is not None
        for wire in list(self._wires):
            while wire.questions and (not wire.broken or self.rng.random() < 0.1):
                self._take_question(self._decode, wire)
        for rank in self._prefill.ranks:
            rank.step()
            if self.rng.random() < 0.2:
                rank.sender.heartbeat()
        self._pump()
        self._compute()
        for name in list(self._prefill.decoding):
            if name not in self._prefill.releasing:
                self._prefill.releasing.add(name)
                self._prefill.ask(m.DecodeStep((name,)))
                self._prefill.ask(m.ReleaseRequest(name))
        self._decode_tick()
        self._beat()
        self.now += 0.1

    def _final_check(self) -> None:
        prefill, decode = self._prefill, self._decode
        assert decode is not None
        if self._restless():
            names = (prefill.sender.open_requests, prefill.sender.closing_requests, tuple(prefill.decoding))
            raise Fault(f"calm does not end: open, closing, decoding {names}; {prefill.ranks[0].sender.busy}")
        wrong = [serial for serial in self._begun if self._ended[serial] != 1]
        if wrong:
            raise Fault(f"requests ended so many times: { {serial: self._ended[serial] for serial in wrong} }")
        if prefill.allocator.free_pages != prefill.allocator.capacity_pages:
            raise Fault(f"pages are left at the prefill: {prefill.allocator!r}")
        for key, serial in decode.quarantined.items():
            if serial not in self._fabric.unfenced and serial not in self._dead_serials:
                raise Fault(f"nobody ends the quarantine of {key} (serial {serial}), and all its writes have landed")
        if decode.receiver.requests:
            raise Fault(f"the decode worker still has {list(decode.receiver.requests)}")
        self._fabric.settle(late=True)
        self.counts["quarantines ended by a rebuild"] += len(decode.quarantined)
        decode.rebuild_engine()
        if decode.allocator.free_pages != decode.allocator.capacity_pages or decode.quarantined:
            raise AllocatorError(f"pages are left at the decode worker: {decode.allocator!r}")
