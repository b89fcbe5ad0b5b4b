"""Random schedules of a simulated world: any config, any events, then calm.

A schedule is one seed. `run_schedule` says how often what happened, so that one sees whether the hostile things did.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from random import Random

from cpkv.testing.simulated_prefill import WorldConfig
from cpkv.testing.transfer_world import TransferWorld

_WEIGHTS = {
    "begin": 6,
    "compute": 12,
    "flow": 16,
    "pump": 6,
    "deliver": 10,
    "step": 7,
    "network": 16,
    "finish_use": 4,
    "cancel": 1,
    "cut": 1,
    "wait": 4,
    "jump": 0.4,
    "stop": 1,
    "go_on": 3,
    "heartbeat": 1,
    "decode_tick": 1.5,
    "kill_prefill": 0.3,
    "lose_ranks": 0.3,
    "kill_decode": 0.3,
    "start_decode": 2,
    "rebuild_engine": 0.6,
    "stop_registry": 0.4,
    "restart_registry": 0.8,
}
EVENTS = tuple(_WEIGHTS)
_CUMULATIVE = tuple(accumulate(_WEIGHTS.values()))


def random_config(rng: Random) -> WorldConfig:
    """Any world."""
    ranks = rng.randint(1, 4)
    return WorldConfig(
        ranks=ranks,
        replicated=rng.random() < 0.2,
        owners=rng.randint(1, 3),
        verify=rng.random() < 0.4,
        held=rng.random() < 0.3,
        decode_pages=rng.randint(10, 18),
        kills=rng.random() < 0.7,
        blocking=rng.random() < 0.5,
        part_pages=rng.randint(1, 3),
        max_outstanding=rng.randint(1, 4),
    )


def run_schedule(seed: int, events: int = 240) -> Counter[str]:
    """One random schedule in one random world; how often what happened.

    Raises:
        Fault: an invariant was broken.
    """
    rng = Random(seed)
    world = TransferWorld(random_config(rng), rng, f"seed {seed}")
    for _ in range(rng.randint(events // 3, events)):
        world.do(rng.choices(EVENTS, cum_weights=_CUMULATIVE)[0])
    world.calm()
    return world.counts
