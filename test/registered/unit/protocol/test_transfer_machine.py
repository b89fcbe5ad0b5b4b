"""Any sequence of events in a simulated world of transfers: no page is lost, freed twice, or written after free.

After every event all invariants of `cpkv.testing.transfer_world` hold, and once all is calm every request has ended and
every page is free. `make sim` runs many more schedules, longer ones, without shrinking them.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from cpkv.testing.registration import register_cpu_ci
from cpkv.testing.simulated_prefill import WorldConfig
from cpkv.testing.transfer_schedule import EVENTS, run_schedule
from cpkv.testing.transfer_world import TransferWorld

register_cpu_ci(est_time=29, suite="unit")

MACHINES = {
    "one rank": WorldConfig(ranks=1, kills=False),
    "four ranks, three owners, verified": WorldConfig(ranks=4, owners=3, verify=True, kills=False, part_pages=1),
    "held pages, replicated, killed": WorldConfig(ranks=3, replicated=True, held=True, decode_pages=10),
    "killed, blocking": WorldConfig(ranks=2, owners=2, blocking=True, part_pages=3, max_outstanding=1),
    "all of it": WorldConfig(ranks=3, owners=2, verify=True, held=True, part_pages=1, decode_pages=18),
}

HOSTILE = (
    "handed over",
    "failed by TransferError",
    "failed by ProtocolError",
    "failed by BusyError",
    "given up by decode",
    "late messages",
    "late writes landed (failed)",
    "late writes landed (dead)",
    "writes landed in parts",
    "writes to a session that is gone",
    "pages damaged",
    "kill_prefill",
    "lose_ranks",
    "kill_decode",
    "rebuilds under transfers",
    "quarantines ended by a rebuild",
    "cancel",
    "stop",
    "jump",
    "restart_registry",
)


class Events(RuleBasedStateMachine):
    """One rule for each event; what an event chooses is drawn from its own seed, so that any rule can be dropped."""

    config: WorldConfig

    def __init__(self) -> None:
        super().__init__()
        self.world = TransferWorld(self.config, Random(0))
        self.sound = True

    def happen(self, event: str, seed: int) -> None:
        self.sound = False
        self.world.rng.seed(seed)
        self.world.do(event)
        # Without some moments in which things work, few requests would come far enough for the rest to matter.
        for _ in range(seed % 4):
            self.world.do("flow")
        self.sound = True

    def teardown(self) -> None:
        if self.sound:
            self.world.rng.seed(0)
            self.world.calm()


def rule_of(event: str) -> Any:
    def happen(self: Events, seed: int) -> None:
        self.happen(event, seed)

    happen.__name__ = event
    return rule(seed=st.integers(0, 2**12 - 1))(happen)


@pytest.mark.parametrize("name", MACHINES)
def test_no_sequence_of_events_breaks_an_invariant(name: str) -> None:
    """Kinds 28, 29, 30, 31, 33 and 35: late writes, aborts, deaths and late messages at any point."""
    machine = type(name, (Events,), {"config": MACHINES[name], **{event: rule_of(event) for event in EVENTS}})
    run_state_machine_as_test(machine, settings=settings(max_examples=400, stateful_step_count=40))


def test_the_hostile_things_really_happen() -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    counts = run_schedule(0)
    for seed in range(1, 120):
        counts.update(run_schedule(seed))
    rare = {what: counts[what] for what in HOSTILE if counts[what] < 3}
    assert not rare, f"too rare in 120 schedules: {rare}"
