"""The same faults against the real engine: rounds of requests through a cluster, compared with an undisturbed run.

round     a few requests, prefilled, handed over and decoded       fault of the round
  right   tokens and logits as in the undisturbed run              none, or a stop that nobody need miss
  aborted by its client; the others of the round are right         clients that go
  failed  with the worker that was killed, and how                 a kill; the next round has another cluster

Floats are 64 bits wide, so that rounds of other requests than in the undisturbed run change no token.
"""

from __future__ import annotations

import logging
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cpkv.config.settings import EngineSettings
from cpkv.engine.cluster import Cluster
from cpkv.engine.generation import GenerationResult, generate
from cpkv.engine.prefill import PrefillScheduler
from cpkv.engine.request import Request
from cpkv.engine.worker import ProcessWorker
from cpkv.errors import CpkvError, TransferError, WorkerDiedError
from cpkv.protocol.messages import DecodedTokens, DecodeStep, Done, ReleaseRequest
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.faults.clock import FaultClock
from cpkv.testing.faults.options import PAGE_SIZE, FaultOptions
from cpkv.testing.faults.report import FaultReport, kind_of

LOG = logging.getLogger(__name__)
ROUND = 4
PROMPTS = 12
MAX_PROMPT_TOKENS = 220
NEW_TOKENS = 4
RESTART_S = 60.0
TOLERANCE = 1e-9
# What one round holds at most, and little more: pages that do not come back are missed in the next rounds.
DECODE_PAGES = 2 + ROUND * -(-(MAX_PROMPT_TOKENS + NEW_TOKENS) // PAGE_SIZE)


@dataclass
class Round:
    """Requests, by their prompts, and what goes wrong.

    Attributes:
        prompts: of each request.
        aborts: request -> the turn of the scheduler at which its client goes.
        signals: what is sent to whom: worker number, the decode worker last; 0 seconds for a kill; share of the round.
    """

    prompts: list[int]
    aborts: dict[int, int] = field(default_factory=dict)
    signals: list[tuple[int, float, float]] = field(default_factory=list)


class AbortingScheduler(PrefillScheduler):
    """A scheduler some of whose clients go while it runs."""

    def __init__(self, cluster: Cluster, aborts: Mapping[str, int]) -> None:
        super().__init__(cluster, shared=True)
        self._aborts = dict(aborts)
        self._turns = 0

    def _admit(self) -> None:
        super()._admit()
        self._turns += 1
        for name, turn in list(self._aborts.items()):
            if self._turns > turn and name in self._handover.open_requests:
                del self._aborts[name]
                self.cancel(name, TransferError(f"request {name}: its client went away"))


def draw_rounds(options: FaultOptions) -> list[Round]:
    """Draw the requests, and give every fault a round; kills have theirs alone."""
    draws = random.Random(options.seed)
    rounds = [Round([draws.randrange(PROMPTS) for _ in range(ROUND)]) for _ in range(-(-options.requests // ROUND))]
    ranks = list(range(options.ranks))
    signals = [(draws.choice(ranks), 0.0) for _ in range(options.kills_prefill)]
    signals += [(options.ranks, 0.0)] * options.kills_decode
    signals += [(draws.randint(0, options.ranks), options.stop_s) for _ in range(options.stops)]
    signals += [(draws.randint(0, options.ranks), draws.uniform(0.02, 0.4)) for _ in range(options.hiccups)]
    draws.shuffle(signals)
    for number, (worker, stop_s) in enumerate(signals):
        place = number * len(rounds) // max(1, len(signals))
        rounds[place].signals.append((worker, stop_s, draws.uniform(0, 0.9)))
    calm = [entry for entry in rounds if not any(stop_s == 0 for _, stop_s, _ in entry.signals)] or rounds
    for _ in range(options.aborts):
        entry = draws.choice([entry for entry in calm if len(entry.aborts) < ROUND] or calm)
        entry.aborts[draws.choice([at for at in range(ROUND) if at not in entry.aborts] or [0])] = draws.randint(0, 6)
    return rounds


class EngineFaultRun:
    """A run.

    Args:
        options: what to do; the pools and bounds of the harness without a model do not count here.
        workspace: an empty folder.
        replay: the command that runs it again.
    """

    def __init__(self, options: FaultOptions, workspace: Path, replay: str = "") -> None:
        self._options = options
        self._settings = EngineSettings(
            num_pages=options.ranks * 40,
            enable_cp_shared_kv=options.ranks > 1,
            cp_size=options.ranks,
            page_size=PAGE_SIZE,
            chunk_size=48,
            dtype="float64",
            index_dtype="float64",
            transfer=options.transfer,
            # Nobody need miss a worker that is stopped for a while.
            transfer_timeout_s=max(10.0, 4 * options.stop_s),
            verify_transfer=options.verify,
        )
        self._checkpoint = write_hot_checkpoint(workspace / "model", "glm52")
        draws = random.Random(options.seed + 1)
        lengths = [draws.randint(1, MAX_PROMPT_TOKENS) for _ in range(PROMPTS)]
        self._prompts = [tuple(draws.randrange(500) for _ in range(length)) for length in lengths]
        longest = options.stop_s if options.stops else 0.0
        name = f"engine, {options.transfer}, {options.ranks} ranks, {options.requests} requests, seed {options.seed}"
        bound_s = 2 * self._settings.transfer_timeout_s + longest + RESTART_S
        self.report = FaultReport(name, replay or repr(options), bound_s=bound_s)
        self._clock = FaultClock(bound_s, self._stalled)
        self._cluster: Cluster | None = None
        self._served = 0
        self._usual_s = 1.0

    def run(self) -> FaultReport:
        """Run it to its end; nothing is left running."""
        began = time.monotonic()
        try:
            self._expected = self._undisturbed()
            for entry in draw_rounds(self._options):
                self._clock.keep_going()
                self._serve(entry)
        except CpkvError as error:
            self.report.violations.append(f"the run ended early: {type(error).__name__}: {error}")
        finally:
            self._clock.close()
            if self._cluster is not None:
                self._cluster.close()
        self.report.seconds = time.monotonic() - began
        return self.report

    def _live(self) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(
                self._settings, self._checkpoint, decode_pages=DECODE_PAGES, shuffle_seed=self._options.seed
            )
        return self._cluster

    def _requests(self, prompts: Sequence[int]) -> list[Request]:
        self._served += len(prompts)
        first = self._served - len(prompts)
        return [
            Request(f"r{first + number:04}", self._prompts[prompt], NEW_TOKENS) for number, prompt in enumerate(prompts)
        ]

    def _undisturbed(self) -> list[tuple[list[int], torch.Tensor]]:
        """Tokens and logits by prompt."""
        expected = []
        for start in range(0, PROMPTS, ROUND):
            requests = self._requests(range(start, start + ROUND))
            began = time.monotonic()
            result = generate(self._live(), requests)
            self._usual_s = time.monotonic() - began
            expected += [(result.tokens[request.request_id], result.logits[request.request_id]) for request in requests]
        return expected

    def _workers(self) -> list[ProcessWorker]:
        cluster = self._live()
        decode = cluster._decode
        return [worker for worker in (*cluster.ranks, decode) if isinstance(worker, ProcessWorker)]

    def _serve(self, entry: Round) -> None:
        workers = self._workers()
        killed = [workers[number].name for number, stop_s, _ in entry.signals if stop_s == 0]
        for number, stop_s, share in entry.signals:
            self._send(workers[number], stop_s, share * self._usual_s)
        requests = self._requests(entry.prompts)
        began = time.monotonic()
        try:
            self._serve_round(entry, requests)
        except CpkvError as error:
            self.report.failed += len(requests)
            self.report.causes[kind_of(error)] += 1
            named = any(f"{name} was killed by signal 9 (SIGKILL)" in str(error) for name in killed)
            if not (isinstance(error, WorkerDiedError) and named):
                self.report.violations.append(f"a round with kills of {killed} failed: {type(error).__name__}: {error}")
        self._note_end(began)
        if killed:
            # It may also have been killed after its last answer.
            self._live().close()
            self._cluster = None

    def _note_end(self, began: float) -> None:
        seconds = time.monotonic() - began
        self.report.slowest_s = max(self.report.slowest_s, seconds)
        if seconds > self.report.bound_s:
            self.report.violations.append(f"a round took {seconds:.1f} s, over {self.report.bound_s:.0f} s")

    def _send(self, worker: ProcessWorker, stop_s: float, delay_s: float) -> None:
        self.report.signals["stop" if stop_s else "kill"] += 1

        def hit() -> None:
            worker.send_signal(signal.SIGSTOP if stop_s else signal.SIGKILL)
            if stop_s:
                self._clock.after(stop_s, lambda: worker.send_signal(signal.SIGCONT))

        self._clock.after(delay_s, hit)

    def _serve_round(self, entry: Round, requests: Sequence[Request]) -> None:
        if entry.aborts:
            self._serve_aborted(entry, requests)
            return
        result: GenerationResult = generate(self._live(), requests)
        for request, prompt in zip(requests, entry.prompts, strict=True):
            self._compare(request, prompt, result.tokens[request.request_id], result.logits[request.request_id])

    def _serve_aborted(self, entry: Round, requests: Sequence[Request]) -> None:
        """What `generate` does, but for clients that go."""
        cluster = self._live()
        aborts = {requests[number].request_id: turn for number, turn in entry.aborts.items()}
        cluster.open_pool(shared=True)
        report = AbortingScheduler(cluster, aborts).run(requests)
        for name, error in report.failures.items():
            if name not in aborts:
                raise error
        for request, prompt in zip(requests, entry.prompts, strict=True):
            name = request.request_id
            if name in report.failures:
                self.report.aborted += 1
                continue
            tokens = [report.first_tokens[name]]
            if name not in aborts:
                while len(tokens) < NEW_TOKENS:
                    tokens += cluster.ask_decode(DecodeStep((name,)), DecodedTokens).tokens
                self._compare(request, prompt, tokens, None)
            else:
                self.report.aborted += 1
            cluster.ask_decode(ReleaseRequest(name), Done)
        cluster.close_pool()

    def _compare(self, request: Request, prompt: int, tokens: list[int], logits: torch.Tensor | None) -> None:
        expected_tokens, expected_logits = self._expected[prompt]
        if tokens != expected_tokens:
            self.report.violations.append(f"request {request.request_id}: tokens {tokens}, not {expected_tokens}")
        elif logits is not None and not torch.allclose(logits, expected_logits, rtol=TOLERANCE, atol=TOLERANCE):
            worst = float((logits - expected_logits).abs().max())
            self.report.violations.append(f"request {request.request_id}: logits are off by up to {worst}")
        else:
            self.report.right += 1

    def _stalled(self) -> None:
        self.report.violations.append(f"a round did not end within {self.report.bound_s:.0f} s")
        for worker in self._workers():
            worker.send_signal(signal.SIGKILL)
