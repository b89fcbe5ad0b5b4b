"""Both ends, registry, network and clock of simulated transfers, and what happens there while all goes well.

event -> both ends move -> every invariant is checked, or the last events are told
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random

from cpkv.errors import CapacityError, CpkvError, TransferError
from cpkv.protocol import messages as m
from cpkv.testing.hostile_fabric import Fault, HostileFabric, Wire
from cpkv.testing.simulated_decode import Decode
from cpkv.testing.simulated_prefill import PAGE_SIZE, Prefill, Prompt, WorldConfig
from cpkv.testing.simulated_registry import SimulatedRegistry

EVENTS_TOLD = 30
_NAMES = ("a", "b", "c")


class WorkingWorld:
    """One world in which nothing goes wrong yet. `do` lets an event happen and checks every invariant.

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

    def _beat(self) -> bool:
        decode = self._decode
        return decode is not None and not decode.stopped and self._registry.beat(f"decode-{decode.life}", self.now)

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
