"""`benchmarks/multi_gpu.py --quick`: that it runs to its end on the CPU, what it refuses, and what it expects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=25, suite="benchmark")

ROOT = Path(__file__).resolve().parents[3]
VIEWS = {"unified", "mixed", "mixed, no prefetch", "full", "blocked"}


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of the benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: import_module(f"multi_gpu_{name}")


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
    assert {name.rsplit(", ", 1)[0] for name in quick["equal"]} == {"current", *VIEWS}
    assert all(right == asked == 64 for right, asked in quick["recall"].values())
    assert quick["views"]["0"].keys() == {"current"}
    assert quick["views"]["1024"].keys() == VIEWS
    mixed = quick["views"]["1024"]["mixed"]
    # 16 pages of history: 4 layers of 64 packed rows of 164 bytes, and 2 slots of 64 keys of 36.
    assert mixed["moved_bytes"] == 16 * 64 * (4 * (128 + 4 + 2 * 16) + 2 * 36)
    assert quick["gathers"]["1024"]["bytes"] == mixed["moved_bytes"] // 2
    part("plot").plot(quick, tmp_path / "curves.png")
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


def test_forecast_off_by_a_fifth_is_told(quick: dict[str, Any], part: Any) -> None:
    results, report = deepcopy(quick), part("report")
    for views in results["views"].values():
        for view, row in views.items():
            row["seconds"] = 1.19 * report.expected_seconds(results, view, row)
    assert report.off_forecast(results) == []
    unified = results["views"]["1024"]["unified"]
    unified["seconds"] *= 1.02
    assert report.off_forecast(results) == ["unified, history 1K: 1.21 of the forecast"]


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
