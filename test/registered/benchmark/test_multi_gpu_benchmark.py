"""`benchmarks/multi_gpu.py --quick`: that it runs to its end on the CPU, what it refuses, and what it expects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpkv.config.settings import EngineSettings
from cpkv.engine.rank_group import join_ranks
from cpkv.errors import NumericsError
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="benchmark")

ROOT = Path(__file__).resolve().parents[3]
VIEWS = {"unified", "mixed", "mixed, no prefetch", "full", "blocked"}


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of the benchmark; without a name, the command's."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name="": import_module(f"multi_gpu_{name}".rstrip("_"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a quick run, whose times mean nothing."""
    out = tmp_path_factory.mktemp("quick") / "out.json"
    sizes = ["--cp-size", "2", "--rounds", "2", "--other-rounds", "2", "--latent-dtype", "fp8"]
    command = [sys.executable, "benchmarks/multi_gpu.py", "--quick", *sizes, "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "forecast" in run.stdout
    return dict(json.loads(out.read_text()))


def test_quick_run_compares_and_times_every_view(quick: dict[str, Any], part: Any, tmp_path: Path) -> None:
    assert part("report").missed_limits(quick) == []
    assert quick["missed"] == []
    # Without history nothing is fetched ahead of time or in rounds; `current` serves nothing else.
    without = {f"{view}, history 0" for view in ("current", "unified", "mixed", "full")}
    assert quick["equal"].keys() == without | {f"{view}, history 500" for view in VIEWS}
    # `current` makes the first chunk of each, and without prefetch `mixed` is the same view.
    assert quick["recall"] == dict.fromkeys(["replicated", *sorted(VIEWS - {"mixed, no prefetch"})], [64, 64])
    assert quick["views"]["0"].keys() == {"current"}
    assert quick["views"]["1024"].keys() == VIEWS
    mixed = quick["views"]["1024"]["mixed"]
    # 16 pages of history: 4 layers of 64 packed rows of 164 bytes, and 2 slots of 64 keys of 36.
    assert mixed["moved_bytes"] == 16 * 64 * (4 * (128 + 4 + 2 * 16) + 2 * 36)
    assert quick["gathers"]["1024"]["bytes"] == mixed["moved_bytes"] // 2
    assert part("plot").plot(quick, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


WRONG = {
    "bits": (("equal", "mixed, history 500"), False, "mixed, history 500: not the bits of replicated"),
    "answers": (("recall", "full"), [63, 64], "full: the recall model gave 63 of 64 answers"),
    "pool": (("pools", "shared", "allocated"), 1, "the shared pool holds 1 bytes"),
    "logits": (("views", "1024", "unified", "equal"), False, "unified, history 1024: not the logits of replicated"),
    "moved": (("views", "1024", "full", "moved_bytes"), 1, "full, history 1024: moved 1 bytes"),
    "scratch": (("views", "1024", "blocked", "scratch_bytes"), 1, "blocked, history 1024: scratch 1 bytes"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_missed(what: str, quick: dict[str, Any], part: Any) -> None:
    """Each by itself, and in words."""
    path, value, words = WRONG[what]
    results = deepcopy(quick)
    place = results
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (missed,) = part("report").missed_limits(results)
    assert missed.startswith(words)


@pytest.mark.parametrize("cards", [1, 4, 8])
def test_history_that_does_not_fit_is_missed(cards: int, quick: dict[str, Any], part: Any) -> None:
    """Else all limits would be kept where nothing is looked at."""
    nothing = {
        "cards": cards,
        "skipped": {"1048576": "a rank takes 90 GiB and can have 70"},
        "views": {},
        "gathers": {},
    }
    words = ["history 1M is left out: a rank takes 90 GiB and can have 70"]
    assert part().judge(quick | nothing) == (([], words) if cards == 1 else (words, []))


UNTIMED = {
    "wrong": ({"recall": {"full": [63, 64]}}, ["views", "gathers", "links"], "missed: full: the recall model gave 63"),
    "skipped": ({"cards": 4, "views": {}, "gathers": {}, "skipped": {"1024": "why"}}, [], "missed: history 1K is left"),
}


@pytest.mark.parametrize("what", UNTIMED)
def test_what_is_missed_is_told_without_curves(
    what: str, quick: dict[str, Any], part: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    changed, gone, words = UNTIMED[what]
    results = {name: value for name, value in (quick | changed).items() if name not in gone}
    given, out, png = (tmp_path / name for name in ("given.json", "out.json", "curves.png"))
    given.write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["", "--read", str(given), "--json", str(out), "--plot", str(png)])
    with pytest.raises(SystemExit) as ended:
        part().main()
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert words in said.err
    assert "there are no curves" in said.out
    assert not png.exists()
    assert words.removeprefix("missed: ") in json.loads(out.read_text())["missed"][0]


REFUSED = {
    "rounds": ("--read out.json --rounds 20 --quick", "--rounds, --quick would change nothing"),
    "history": ("--read out.json --history 1K --chunk 512", "--history, --chunk would change nothing"),
    "ranks": ("--quick --cp-size 1", "there must be at least 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what: str, part: Any, monkeypatch: Any, capsys: Any) -> None:
    command, words = REFUSED[what]
    monkeypatch.setattr(sys, "argv", ["", *command.split()])
    with pytest.raises(SystemExit) as ended:
        part().main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_forecast_off_by_a_fifth_of_what_is_added_is_told(quick: dict[str, Any], part: Any) -> None:
    """A chunk of 1 s and 0.5 s more by the forecast: 0.1 s off at most, however little that is of the whole."""
    results, report = deepcopy(quick), part("report")
    results["links"] = {"read": 1.0, "own": 1.0, "gather": 1.0, "meeting": 0.0}
    for row in (row for views in results["views"].values() for row in views.values()):
        row |= {"replicated_seconds": 1.0, "seconds": 1.0}
        row["moves"] |= {"own_bytes": 0.0, "link_bytes": 0.0}
    mixed, unified = (results["views"]["1024"][view] for view in ("mixed, no prefetch", "unified"))
    mixed["moves"]["link_bytes"] = 0.5
    mixed["seconds"], unified["seconds"] = 1.59, 1.009
    assert report.off_forecast(results) == []
    mixed["seconds"], unified["seconds"] = 1.39, 0.989
    assert report.off_forecast(results) == [
        "unified, history 1K: -11.00 ms more than replicated, by the forecast 0.00, 10.00 off at most",
        "mixed, no prefetch, history 1K: 390.00 ms more than replicated, by the forecast 500.00, 100.00 off at most",
    ]


def test_gather_is_probed_again_where_noise_hides_its_bytes(part: Any, monkeypatch: Any) -> None:
    link = part("link")
    ours = SimpleNamespace(job=SimpleNamespace(least_bytes=1 << 20), comm=SimpleNamespace(size=3))
    seconds = [3.0, 2.0, 1.0, 1.0, 1.0, 3.0]
    monkeypatch.setattr(link, "_gather_seconds", lambda ours, size: seconds.pop(0))
    assert link.probe_gather(ours) == (1.0, 2 * ((1 << 20) - 4096) / 2.0)
    seconds += [2.0, 1.0] * 4
    with pytest.raises(SystemExit, match="took 1000000 us and one of 4096 took 2000000, the last of 4 tries"):
        link.probe_gather(ours)


def make_job(part: Any, folder: Path, chunk: int, **changes: Any) -> Any:
    """One rank on the CPU with a recall prompt of two chunks and a half."""
    prompt = part("recall").write_recall(folder, 5 * chunk // 2)
    ids = prompt.token_ids + prompt.answers[:-1]
    sizes = {"cp_size": 1, "cards": 1, "device": "cpu", "histories": (), "check_history": 500, "chunk": chunk}
    rest = {"latent_dtype": "fp8", "rounds": 2, "other_rounds": 2, "least_bytes": 1 << 20, "started": 0.0}
    job = part("group").Job(folder=folder, recall=ids, answers=prompt.answers, **sizes, **rest)
    return job._replace(**changes)


def mapped_segments() -> int:
    """Shared segments that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_part_of_a_chunk_through_blocked_with_mailboxes_alone(part: Any, tmp_path: Path) -> None:
    job, compared = make_job(part, tmp_path, 256), part("rank").compared
    assert compared(job)[-1] == (500, 256, ("blocked",))
    nccl = job._replace(device="cuda", cp_size=2, cards=2)
    assert compared(nccl)[-1] == (500, 256, ("blocked",))
    assert compared(nccl._replace(cards=1))[-1] == (500, 32, ("blocked",))


@pytest.mark.parametrize("chunk", [256, 4096, 8192, 32768])
def test_answers_follow_every_link_of_the_prompt(chunk: int, part: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """A link's value lies in every page from 2 delta on, the cut one included."""
    for name in ("write_recall_checkpoint", "prepare_weights"):
        monkeypatch.setattr(part("recall"), name, lambda *args, **options: None)
    prompt = part("recall").write_recall(tmp_path, 5 * chunk // 2)
    pages = {place // 64 for place, token in enumerate(prompt.token_ids) if token >= prompt.vocab_size // 2}
    assert pages >= set(range(-(-2 * prompt.delta // 64), (5 * chunk // 2 - 1) // 64))
    assert 3 * len(prompt.answers) >= len(pages)


def check_recall(part: Any, folder: Path, monkeypatch: Any, *views: str) -> dict[str, list[int]]:
    """Of one rank on the CPU."""
    monkeypatch.setattr(part("recall"), "VIEWS", views)
    settings = EngineSettings(num_pages=1, dtype="bfloat16", index_dtype="fp8", device="cpu", kernels="auto")
    device = torch.device("cpu")
    comm = join_ranks(0, 1, device, folder / "rendezvous", "benchmark")
    return dict(part("recall").check_recall(comm, device, settings, make_job(part, folder, 256)))


def test_pools_of_the_recall_model_are_gone_before_times_are_taken(part: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Whoever still holds the rank."""
    open_pools, before, opened = part("group").open_pools, mapped_segments(), []

    def kept(*args: Any) -> Any:
        opened.append(open_pools(*args))
        assert mapped_segments() > before
        return opened[-1]

    monkeypatch.setattr(part("recall"), "open_pools", kept)
    assert check_recall(part, tmp_path, monkeypatch, "full", "mixed") == {"full": [64, 64], "mixed": [64, 64]}
    assert len(opened) == 1
    assert mapped_segments() == before


def test_view_that_writes_no_row_is_found(part: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Though the view before it left the right rows in the same pages."""
    run, done = part("group").Rank.run, []

    def forgetful(ours: Any, view: str, history: int, *rest: Any) -> Any:
        with monkeypatch.context() as patch:
            if view == "unified":
                patch.setattr(UnifiedPool, "write", lambda *args: None)
            result = run(ours, view, history, *rest)
        done.append((view, history))
        return result

    monkeypatch.setattr(part("group").Rank, "run", forgetful)
    with pytest.raises(NumericsError, match="a stored key is NaN"):
        check_recall(part, tmp_path, monkeypatch, "full", "unified")
    # The second chunk is not written, the third reads it.
    assert done == [("current", 0), ("full", 256), ("full", 512), ("current", 0), ("unified", 256)]


def test_forecast_of_each_view(part: Any) -> None:
    """6 meetings of 1 s, 8 bytes of its own at 4 a second, 30 of others at 10 in a gather and at 5 when read."""
    forecast = part("forecast")
    links = forecast.Links(read=5.0, own=4.0, gather=10.0, meeting=1.0)
    moves = forecast.Moves(link_bytes=30.0, own_bytes=8.0, meetings=6, first_layer=0.2, first_meetings=2)

    def seconds(view: str, replicated: float, *, shared_card: bool = False) -> float:
        return float(forecast.forecast(view, replicated, moves, links, shared_card=shared_card))

    assert seconds("unified", 100.0) == 100 + 30 / 5
    assert seconds("mixed, no prefetch", 100.0) == 100 + 6 + 2 + 3
    # The first layer's gather takes 2 + 0.2 * 5 = 3, the others' 8: all hidden by 100, and not by 5.
    assert seconds("mixed", 100.0) == pytest.approx(3 + 100)
    assert seconds("full", 5.0) == pytest.approx(3 + 8)
    # On one card the copies of the other layers are not hidden.
    assert seconds("mixed", 100.0, shared_card=True) == pytest.approx(100 + 3 + 0.8 * 5)


def test_pieces_of_mailboxes_are_counted_as_meetings(quick: dict[str, Any], part: Any) -> None:
    """8 pages of a rank: 83,968 bytes of latent rows a layer and 18,432 of keys, in pieces of 32 KiB or whole."""
    shape, view_costs = import_module("cpkv.layout.row_format"), import_module("cpkv.layout.view_costs")
    geometry = import_module("cpkv.layout.pool_geometry").PoolGeometry(
        shape.RowFormat("fp8", kv_lora_rank=128, rope_dim=16, index_dtype="fp8", index_dim=32), 64, (0, 1, -1, -1)
    )
    blocks = import_module("cpkv.layout.query_blocks").QueryBlocks(64, 144, 16, 4)
    costs = view_costs.ViewCosts(geometry, blocks, view_costs.ViewOptions())
    sizes = view_costs.BatchSizes.even(1024 + 256, 256, 2, 64, costs.options)
    moved = costs.cost("mixed", sizes).moved_bytes
    assert moved == quick["views"]["1024"]["mixed"]["moved_bytes"]
    of = part("forecast").Moves.of
    whole = of("mixed", costs, sizes, moved, foreign=0.0, piece=None)
    assert whole._asdict() == quick["views"]["1024"]["mixed"]["moves"]
    assert (whole.meetings, whole.first_meetings) == (4 + 2, 2)
    assert (whole.own_bytes, whole.link_bytes) == (moved / 2, moved / 2)
    pieces = of("mixed", costs, sizes, moved, foreign=0.0, piece=32 << 10)
    assert (pieces.meetings, pieces.first_meetings) == (4 * 3 + 2 * 1, 3 + 1)
    assert of("unified", costs, sizes, 0, foreign=0.0, piece=None).link_bytes == 0
    # A rank's 128 queries choose 64 rows each in 4 layers, four in five of them of the history; the keys once a slot.
    read = of("unified", costs, sizes, 0, foreign=0.5, piece=None).link_bytes
    assert read == pytest.approx(0.5 * (128 * 64 * 0.8 * 164 * 4 + 1024 * 36 * 2))
