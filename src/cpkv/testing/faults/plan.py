"""What will be asked and what will go wrong, drawn from one seed.

requests    arrive in bursts; each with its prompt, its decode steps, and perhaps the moment at which its client goes
faults      each due once so many requests have ended, then at the next moment of its kind, then after a short delay

kill        SIGKILL
stop        SIGSTOP, then SIGCONT after a time for which nothing need fail, or for which it may
hiccup      the same for a fraction of a second; nothing may fail
cut off     SIGSTOP of a rank that is taken for dead: another group takes its place, and later the rank goes on
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from cpkv.errors import ConfigError
from cpkv.testing.faults.options import PAGE_SIZE, FaultOptions

FaultKind = Literal["kill", "stop", "hiccup", "cut off"]
Side = Literal["prefill", "decode"]
Moment = Literal["any", "announce", "compute", "send", "finish", "decode"]
SIDES: tuple[Side, Side] = ("prefill", "decode")
MOMENTS: tuple[Moment, ...] = ("any", "announce", "compute", "send", "finish", "decode")
AbortPhase = Literal["queued", "announced", "computing", "sending", "decoding"]
ABORT_PHASES: tuple[AbortPhase, ...] = ("queued", "announced", "computing", "sending", "decoding")
MAX_PROMPT_PAGES = 40
MAX_STEPS = 5
MAX_BURST = 5
MAX_DELAY_S = 0.02
HICCUP_S = (0.02, 0.4)
FAULTY_PART = 0.9
ABORTED_RETRIES = 10


@dataclass(frozen=True)
class Abort:
    """When a client goes: in a phase, after so many turns of the scheduler in it."""

    phase: AbortPhase
    turns: int


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a client.

    Attributes:
        request_id: its name, in all logs.
        prompt_tokens: of its prompt.
        steps: decode steps.
        abort: when its client goes, if it does.
        retries: how often it is sent again, under the same id, after a failure.
    """

    request_id: str
    prompt_tokens: int
    steps: int
    abort: Abort | None
    retries: int


@dataclass(frozen=True)
class PlannedFault:
    """One fault.

    Attributes:
        kind: see above.
        after_ended: requests that have ended before.
        side: whose worker.
        rank: which rank, if it is a rank.
        moment: of the scheduler's work, at which the delay begins.
        delay_s: until the signal.
        stop_s: until SIGCONT.
    """

    kind: FaultKind
    after_ended: int
    side: Side
    rank: int
    moment: Moment
    delay_s: float
    stop_s: float = 0.0


@dataclass(frozen=True)
class FaultPlan:
    """Everything of a run that is drawn."""

    seed: int
    requests: tuple[PlannedRequest, ...]
    bursts: tuple[int, ...]
    faults: tuple[PlannedFault, ...] = field(default=())


def draw_plan(options: FaultOptions) -> FaultPlan:
    """Draw a plan: the same for the same options.

    Raises:
        ConfigError: more aborts than requests.
    """
    if options.aborts > options.requests:
        raise ConfigError(
            f"{options.aborts} aborts were asked for, and there are {options.requests} requests; ask for fewer"
        )
    draws = random.Random(options.seed)
    requests = tuple(_draw_requests(options, draws))
    faults = tuple(_draw_faults(options, draws))
    bursts: list[int] = []
    while sum(bursts) < options.requests:
        bursts.append(draws.randint(1, MAX_BURST))
    return FaultPlan(options.seed, requests, tuple(bursts), faults)


def _draw_requests(options: FaultOptions, draws: random.Random) -> Iterator[PlannedRequest]:
    aborted = set(draws.sample(range(options.requests), options.aborts))
    for number in range(options.requests):
        is_retried = draws.random() < options.retried_share
        yield PlannedRequest(
            request_id=f"r{number:04}",
            prompt_tokens=draws.randint(1, MAX_PROMPT_PAGES * PAGE_SIZE),
            steps=draws.randint(1, MAX_STEPS),
            abort=Abort(draws.choice(ABORT_PHASES), draws.randint(0, 3)) if number in aborted else None,
            # A client that goes must be there until then.
            retries=ABORTED_RETRIES if number in aborted else int(is_retried),
        )


def _draw_faults(options: FaultOptions, draws: random.Random) -> Iterator[PlannedFault]:
    """Each in a part of the run of its own, so that there are always requests left for the last ones."""
    kinds: list[tuple[FaultKind, Side, float]] = []
    kinds += [("kill", "prefill", 0.0)] * options.kills_prefill
    kinds += [("kill", "decode", 0.0)] * options.kills_decode
    kinds += [("stop", draws.choice(SIDES), options.stop_s) for _ in range(options.stops)]
    kinds += [("hiccup", draws.choice(SIDES), draws.uniform(*HICCUP_S)) for _ in range(options.hiccups)]
    kinds += [("cut off", "prefill", options.cut_off_s)] * options.cut_offs
    draws.shuffle(kinds)
    for number, (kind, side, stop_s) in enumerate(kinds):
        yield PlannedFault(
            kind=kind,
            after_ended=int((number + draws.random()) * FAULTY_PART * options.requests / len(kinds)),
            side=side,
            rank=draws.randrange(options.ranks),
            # A rank that comes back is of interest if it has something left to send.
            moment="send" if kind == "cut off" else draws.choice(MOMENTS),
            delay_s=0.0 if kind == "cut off" else draws.uniform(0, MAX_DELAY_S) * draws.randint(0, 1),
            stop_s=stop_s,
        )
