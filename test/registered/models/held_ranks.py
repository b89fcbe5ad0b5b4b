"""Ranks of a unified pool that a test holds at chosen moments while the others run as far ahead as they can."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cpkv.cache.allocator import PageAllocator
from cpkv.comm.threads import ThreadCommunicator
from cpkv.engine.forward import BatchTrace
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.layout.schedule import next_batch
from cpkv.model.dsa_model import DsaModel
from cpkv.pool.page_pool import PagePool
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.ranks import ThreadedRanks, run_on_ranks
from cpkv.views.index_blocks import PagedLayerRows
from cpkv.views.view import LayerRows

PAGE, CHUNK = 4, 24
LAYERS, TOPK = 2, 16
PATIENCE_S = 20.0
POINTS = ("before a write", "within a write", "behind a write", "before the keys are read", "before rows are read")

Outputs = list[list[BatchTrace]]
HoldAt = Callable[[int, int, str], bool]


class Stage:
    """Knows how far each rank is, and holds a rank until no other can go on.

    Args:
        ranks: whose threads say their number with `thread_of`.
        hold_at: (rank, how many points it has passed, point) -> whether it is held there.
    """

    def __init__(self, ranks: int, hold_at: HoldAt) -> None:
        self.holds = 0
        self._hold_at = hold_at
        self._changed = threading.Condition()
        self._entered = [0] * ranks
        self._passed = [0] * ranks
        self._held: set[int] = set()
        self._ended: set[int] = set()
        self._local = threading.local()

    @contextmanager
    def thread_of(self, rank: int) -> Iterator[None]:
        """Within it the calling thread is that rank; behind it nobody waits for the rank."""
        self._local.rank = rank
        try:
            yield
        finally:
            with self._changed:
                self._ended.add(rank)
                self._changed.notify_all()

    def collective(self) -> None:
        """The calling rank is about to wait for the others."""
        with self._changed:
            self._entered[self._local.rank] += 1
            self._changed.notify_all()

    def point(self, point: str) -> None:
        """The calling rank is held here when it was said so."""
        rank = self._local.rank
        self._passed[rank] += 1
        if not self._hold_at(rank, self._passed[rank] - 1, point):
            return
        with self._changed:
            self.holds += 1
            self._held.add(rank)
            self._changed.notify_all()
            nobody_moves = self._changed.wait_for(lambda: self._all_wait_for(rank), PATIENCE_S)
            self._held.discard(rank)
            self._changed.notify_all()
        assert nobody_moves, f"rank {rank} was held {point}, and another rank neither ended nor came to wait for it"

    def _all_wait_for(self, rank: int) -> bool:
        """Every other rank is held, has ended, or is in a collective that this rank has not entered.

        One that was released a moment ago is no longer held and so on its way: nobody else is let go by it.
        """
        return all(
            other in self._held or other in self._ended or self._entered[other] > self._entered[rank]
            for other in range(len(self._entered))
            if other != rank
        )


def staged(monkeypatch: pytest.MonkeyPatch, stage: Stage, pools: Sequence[PagePool]) -> None:
    """Let ranks pass the stage at every collective, write and read."""
    meet, write, kernels = ThreadCommunicator._meet, PagePool.write, pools[0].kernels
    key_blocks, chosen_rows = PagedLayerRows.key_blocks, LayerRows.chosen_rows

    def staged_meet(comm: ThreadCommunicator, *arguments: Any) -> None:
        stage.collective()
        meet(comm, *arguments)

    def staged_write(pool: PagePool, *arguments: Any) -> None:
        stage.point("before a write")
        write(pool, *arguments)
        stage.point("behind a write")

    def staged_store_keys(*arguments: Any, **options: Any) -> None:
        stage.point("within a write")
        kernels.store_index_keys(*arguments, **options)

    def staged_key_blocks(rows: PagedLayerRows, segment: int) -> Iterator[tuple[int, torch.Tensor]]:
        stage.point("before the keys are read")
        return key_blocks(rows, segment)

    def staged_chosen_rows(rows: LayerRows, *arguments: Any) -> torch.Tensor:
        stage.point("before rows are read")
        return chosen_rows(rows, *arguments)

    monkeypatch.setattr(ThreadCommunicator, "_meet", staged_meet)
    monkeypatch.setattr(PagePool, "write", staged_write)
    for pool in pools:
        monkeypatch.setattr(pool, "kernels", replace(kernels, store_index_keys=staged_store_keys))
    monkeypatch.setattr(PagedLayerRows, "key_blocks", staged_key_blocks)
    monkeypatch.setattr(LayerRows, "chosen_rows", staged_chosen_rows)


class Ranks:
    """Ranks whose pool holds one wave of requests, so that the next wave gets the pages of the one before.

    Args:
        model: of all of them.
        cp_size: how many.
        waves: prompts by wave.
        folder: where they share memory; None for a replicated pool.
    """

    def __init__(self, model: DsaModel, cp_size: int, waves: list[list[list[int]]], folder: Path | None) -> None:
        shared = folder is not None
        most = max(sum(-(-len(prompt) // PAGE) for prompt in wave) for wave in waves)
        self.ranks = ThreadedRanks(
            model,
            model.shape.geometry(PAGE, "float32", "float32"),
            cp_size=cp_size,
            shared=shared,
            num_pages=(-(-most // cp_size) + 1) * cp_size,
            unified=folder,
        )
        self.specs = list(batches(self.ranks.allocator, waves, shared))
        self.plans = [BatchPlan.build(spec, self.ranks.placement, cp_size) for spec in self.specs]

    def run(self, stage: Stage | None = None, *, meet: bool = False) -> Outputs:
        """All batches, by rank; the ranks meet nowhere but in the collectives, or with `meet` before every batch."""
        alone = stage or Stage(self.ranks.cp_size, lambda *_: False)

        def run_rank(rank: int) -> list[BatchTrace]:
            traces = []
            with alone.thread_of(rank):
                for plan in self.plans:
                    if meet:
                        self.ranks.comms[rank].barrier("between batches")
                    traces.append(BatchTrace(want_logits=True, want_choices=True))
                    self.ranks._passes[rank].run(plan, traces[-1])
            return traces

        return run_on_ranks(self.ranks.group, run_rank)


def batches(allocator: PageAllocator, waves: list[list[list[int]]], shared: bool) -> Iterator[BatchSpec]:
    """Each wave in chunks; then its pages are given back."""
    number = 0
    for wave in waves:
        names = [f"r{number}.{place}" for place in range(len(wave))]
        pages = [allocator.allocate(name, -(-len(prompt) // PAGE)) for name, prompt in zip(names, wave, strict=True)]
        done = [0] * len(wave)
        while pieces := next_batch([(done[place], len(wave[place])) for place in range(len(wave))], CHUNK):
            segments = []
            for place, start, end in pieces:
                last = end == len(wave[place])
                segments.append(Segment(names[place], start, tuple(wave[place][start:end]), pages[place], last))
                done[place] = end
            yield BatchSpec(number, tuple(segments), "zigzag", "unified" if shared else "replicated")
            number += 1
        for name in names:
            allocator.free(name)


def assert_same_outputs(ours: Outputs, theirs: Outputs) -> None:
    """Choices and logits of every token, rank by rank and batch by batch."""
    for rank, (our_traces, their_traces) in enumerate(zip(ours, theirs, strict=True)):
        for number, (our, their) in enumerate(zip(our_traces, their_traces, strict=True)):
            what = f"rank {rank}, batch {number}"
            for layer, chosen in their.choices.items():
                assert_same_bits(our.choices[layer], chosen, f"{what}: choice of layer {layer}")
            assert our.logits is not None
            assert their.logits is not None
            assert_same_bits(our.logits, their.logits, f"{what}: logits")


class Group:
    """One replicated run, and as many unified ones as a test wants."""

    def __init__(self, hot_model: Callable, cp_size: int, prompt: Callable, folder: Path) -> None:
        _, model = hot_model("glm5", torch.float32, 4, TinyShape(num_hidden_layers=LAYERS, index_topk=TOPK))
        self.cp_size = cp_size
        self._model, self._folder = model, folder
        # The pages of each wave are those of the one before, in whole or in part.
        lengths = ((61, 10), (70,), (33, 2, 30))
        self._waves = [[prompt(length, length) for length in wave] for wave in lengths]
        self.expected = Ranks(model, cp_size, self._waves, None).run()

    def ranks(self) -> Ranks:
        """Fresh ranks that share memory."""
        return Ranks(self._model, self.cp_size, self._waves, self._folder)

    def run_held(self, monkeypatch: pytest.MonkeyPatch, hold_at: HoldAt) -> tuple[Outputs, int]:
        """Run with holds; what came out, and how many holds there were."""
        ranks, stage = self.ranks(), Stage(self.cp_size, hold_at)
        with monkeypatch.context() as patch:
            staged(patch, stage, ranks.ranks.pools)
            return ranks.run(stage), stage.holds

    def check_random_holds(self, monkeypatch: pytest.MonkeyPatch, seed: int, chance: float) -> None:
        """Every rank is held at a share of the points; no bit changes."""

        def hold_at(rank: int, passed: int, point: str) -> bool:
            # By place and not by time, so that a seed that fails fails again.
            return random.Random(f"{seed} {rank} {passed}").random() < chance

        self._check(monkeypatch, hold_at)

    def check_slow_rank(self, monkeypatch: pytest.MonkeyPatch, slow: int, point: str) -> None:
        """One rank is the last at every such point; no bit changes."""
        self._check(monkeypatch, lambda rank, _, at: rank == slow and at == point)

    def _check(self, monkeypatch: pytest.MonkeyPatch, hold_at: HoldAt) -> None:
        outputs, holds = self.run_held(monkeypatch, hold_at)
        assert holds > 0
        assert_same_outputs(outputs, self.expected)
