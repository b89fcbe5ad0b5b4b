"""Prefill, decode worker, registry, network and clock in one thread, with all that can go wrong, from one seed.

event -> both ends move -> every invariant is checked ...  -> calm: all ends well, every page is free on both sides

    transfer_schedule.run_schedule(seed)    one random schedule
    TransferWorld.do(event)                 one event, for a state machine
"""

from __future__ import annotations

from cpkv.errors import AllocatorError, TransferError
from cpkv.protocol import messages as m
from cpkv.testing.hostile_fabric import Fault
from cpkv.testing.simulated_decode import LEASE_S
from cpkv.testing.simulated_world import WorkingWorld

_CALM_ROUNDS = 200


class TransferWorld(WorkingWorld):
    """A world in which everything can go wrong, and after which all must be well."""

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
        self.do("calm_end")
        self.do("final_check")

    def _calm_end(self) -> None:
        """The last late messages have come, and whoever is dead has been silent for long."""
        self._take_questions(late_share=1.0)
        self.now += 2 * LEASE_S
        self._decode_tick()

    def _take_questions(self, late_share: float) -> None:
        assert self._decode is not None
        for wire in list(self._wires):
            while wire.questions and (not wire.broken or self.rng.random() < late_share):
                self._take_question(self._decode, wire)

    def _restless(self) -> bool:
        prefill = self._prefill
        busy = prefill.sender.open_requests or prefill.sender.closing_requests or prefill.decoding
        return bool(busy or any(rank.sender.busy for rank in prefill.ranks))

    def _calm_round(self) -> None:
        self._fabric.settle(late=False)
        self._take_questions(late_share=0.1)
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
