"""The diagnostics of a rank: silent on a sound run, and exact about the rank, page and row that broke."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from cpkv.comm.threads import ThreadGroup
from cpkv.config.names import ViewName
from cpkv.engine.diagnostics import Diagnostics
from cpkv.engine.forward import ForwardPass
from cpkv.errors import PlanError, WorkerDiedError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.pool.page_pool import PagePool
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.checkpoints import TinyShape, write_hot_checkpoint
from cpkv.testing.ranks import run_on_ranks
from cpkv.testing.registration import register_cpu_ci
from cpkv.views.blocked import BlockedLayerRows, BlockedView
from cpkv.views.counters import ViewCounters
from cpkv.views.current import CurrentLayerRows, CurrentView
from cpkv.views.gathered import FullView, MixedView
from cpkv.views.index_blocks import PagedLayerRows
from cpkv.views.scratch import Scratch

register_cpu_ci(est_time=8, suite="unit")

RANKS = 3
PAGE = 4
# By logical page position, over all owners and out of order: owners 2, 0, 1, 2, 0, 1, 2 of three.
PAGES = (11, 6, 7, 5, 9, 4, 8)
IDS = tuple((11 * i + 3) % 60 for i in range(26))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DsaModel:
    folder = tmp_path_factory.mktemp("diagnostics")
    shape = TinyShape(vocab_size=64, num_hidden_layers=3, index_topk=8)
    checkpoint = write_hot_checkpoint(folder / "model", "glm52", shape=shape, indexer_types=["full", "shared", "full"])
    prepare_weights(checkpoint, folder / "weights.safetensors", torch.float32)
    return DsaModel.load(read_config(checkpoint), folder / "weights.safetensors", 1e-6)


class Ranks:
    """Ranks as threads, each with diagnostics of its own."""

    def __init__(self, model: DsaModel, *, shared: bool = True, diagnose: bool = True) -> None:
        geometry = model.shape.geometry(PAGE, "float32", "float32")
        self.placement = PagePlacement(PAGE, RANKS if shared else 1)
        self.group = ThreadGroup(RANKS)
        self.comms = [self.group.communicator(rank, record=True) for rank in range(RANKS)]
        self.pools = [PagePool(geometry, 5 if shared else 13, poison=True) for _ in range(RANKS)]
        self.diagnostics = [Diagnostics(self.pools[rank], self.comms[rank], model.shape.topk) for rank in range(RANKS)]
        self._passes = [
            ForwardPass(
                model,
                self.pools[rank],
                self.comms[rank],
                ViewCounters(),
                Scratch(poison=True),
                diagnostics=self.diagnostics[rank] if diagnose else None,
            )
            for rank in range(RANKS)
        ]

    def run(self, spec: BatchSpec, changed: dict[int, BatchSpec] | None = None) -> list[Any]:
        """Run a batch; the logits by rank, or what each rank raised. `changed` gives some ranks another one."""

        def run(rank: int) -> Any:
            plan = BatchPlan.build((changed or {}).get(rank, spec), self.placement, RANKS)
            try:
                return self._passes[rank].run(plan).last_logits
            except Exception as error:
                self.group.abort(rank, str(error))
                return error

        outcomes = run_on_ranks(self.group, run)
        # What was gathered ahead of a batch that failed ends by itself, now that the group has.
        for thread in threading.enumerate():
            if thread.name.startswith("prefill rank"):
                thread.join(15)
        return outcomes


def batch(number: int, start: int, end: int, view: ViewName) -> BatchSpec:
    segment = Segment("a", start, IDS[start:end], PAGES, end == len(IDS))
    return BatchSpec(number, (segment,), "zigzag", view)


def first_plan_error(outcomes: list[Any]) -> str:
    errors = [outcome for outcome in outcomes if isinstance(outcome, PlanError)]
    assert errors, f"nothing was noticed: {outcomes}"
    return str(errors[0])


@pytest.mark.parametrize("view", ["full", "mixed", "blocked", "replicated"])
def test_a_sound_run_is_not_disturbed(model: DsaModel, view: ViewName) -> None:
    shared = view != "replicated"
    views: tuple[ViewName, ViewName] = ("current" if shared else view, view)
    results = []
    for diagnose in (True, False):
        ranks = Ranks(model, shared=shared, diagnose=diagnose)
        for spec in (batch(0, 0, 10, views[0]), batch(1, 10, 26, views[1])):
            outcomes = ranks.run(spec)
            assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
        results.append(next(outcome["a"] for outcome in outcomes if outcome))
        sequences = [comm.sequence for comm in ranks.comms]
        assert sequences == [sequences[0]] * RANKS
        labels = {collective.label for collective in sequences[0] or []}
        extra = {label for label in labels if label == "plan digest" or label.startswith("shadow")}
        assert bool(extra) is diagnose, "switched off, diagnostics must cost no collective"
    assert_same_bits(*results, "logits with and without diagnostics")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_plan_that_differs_on_one_rank(model: DsaModel, rank: int) -> None:
    spec = batch(4, 0, 10, "current")
    other = msgspec.structs.replace(spec, view="full")
    outcomes = Ranks(model).run(spec, {rank: other})
    different = [1, 2] if rank == 0 else [rank]
    words = f"batch 4: ranks {different} hold another plan than rank 0"
    assert first_plan_error(outcomes) == words
    # Whoever is first lets the others go, who then report its cause.
    for outcome in outcomes:
        assert isinstance(outcome, PlanError | WorkerDiedError)
        assert str(outcome).endswith(words)


@pytest.mark.parametrize("part", ["latent", "index"])
def test_a_page_that_changed_between_write_and_read(model: DsaModel, part: str) -> None:
    ranks = Ranks(model)
    ranks.run(batch(0, 0, 10, "current"))
    # Page 7 is local page 2 of rank 1.
    getattr(ranks.pools[1], part)[2].view(-1)[5] ^= 1
    message = first_plan_error(ranks.run(batch(1, 10, 26, "full")))
    assert message == ("local page 2 of rank 1 changed between the batch that wrote it and batch 1, which reads it")


def test_a_page_that_was_freed_may_change(model: DsaModel) -> None:
    ranks = Ranks(model)
    ranks.run(batch(0, 0, 10, "current"))
    for rank, pool in enumerate(ranks.pools):
        own = [page // RANKS for page in PAGES if page % RANKS == rank]
        pool.poison(own)
        ranks.diagnostics[rank].forget(own)
    outcomes = ranks.run(batch(1, 0, 26, "current"))
    assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("name", "view", "method"),
    [
        ("full", FullView, "rows_of"),
        ("mixed", MixedView, "rows_of"),
        ("current", CurrentView, "rows_of"),
        ("blocked", BlockedView, "places"),
    ],
)
def test_a_view_that_shows_a_wrong_row(
    model: DsaModel, monkeypatch: pytest.MonkeyPatch, name: ViewName, view: type, method: str
) -> None:
    honest: Callable[..., Any] = getattr(view, method)

    def wrong(self: Any, segment: int, positions: torch.Tensor) -> Any:
        return honest(self, segment, torch.where(positions == 6, 5, positions))

    ranks = Ranks(model)
    if name != "current":
        ranks.run(batch(0, 0, 10, "current"))
    monkeypatch.setattr(view, method, wrong)
    message = first_plan_error(ranks.run(batch(1, 0 if name == "current" else 10, 26, name)))
    words = f"view {name}, layer 0, request a: latent rows of position 6 differ from page 6 of owner 0"
    assert message == words


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("full", PagedLayerRows),
        ("mixed", PagedLayerRows),
        ("current", CurrentLayerRows),
        ("blocked", BlockedLayerRows),
    ],
)
def test_a_view_that_shows_a_wrong_index_key(
    model: DsaModel, monkeypatch: pytest.MonkeyPatch, name: ViewName, rows: type
) -> None:
    honest: Callable[..., Iterator[tuple[int, torch.Tensor]]] = rows.key_blocks

    def key_blocks(self: Any, segment: int) -> Iterator[tuple[int, torch.Tensor]]:
        for start, block in honest(self, segment):
            keys = block.clone()
            keys[6] = keys[5]
            yield start, keys

    ranks = Ranks(model)
    if name != "current":
        ranks.run(batch(0, 0, 10, "current"))
    monkeypatch.setattr(rows, "key_blocks", key_blocks)
    message = first_plan_error(ranks.run(batch(1, 0 if name == "current" else 10, 26, name)))
    assert message == (f"view {name}, layer 0, request a: index keys of position 6 differ from page 6 of owner 0")


def test_a_request_whose_keys_nobody_scores_is_compared_by_its_rows_alone(
    model: DsaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys are not gathered, so a look at them would be a collective too many, or poison."""

    def key_blocks(self: Any, segment: int) -> Iterator[tuple[int, torch.Tensor]]:
        raise AssertionError("keys were asked for")

    ranks = Ranks(model)
    ranks.run(batch(0, 0, 5, "current"))
    monkeypatch.setattr(PagedLayerRows, "key_blocks", key_blocks)
    outcomes = ranks.run(batch(1, 5, 8, "mixed"))
    assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes


def test_an_owner_that_wrote_another_row(model: DsaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `current` view shows what was gathered, so a fault of the write path shows as a difference from the page."""
    honest = PagePool.write

    def write(pool: PagePool, layer: int, writes: Any, latent: torch.Tensor, index: torch.Tensor | None) -> None:
        honest(pool, layer, writes, latent.roll(1, 0), index)

    monkeypatch.setattr(PagePool, "write", write)
    message = first_plan_error(Ranks(model).run(batch(0, 0, 10, "current")))
    assert message == "view current, layer 0, request a: latent rows of position 0 differ from page 11 of owner 2"
