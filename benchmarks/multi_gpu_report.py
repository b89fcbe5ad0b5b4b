"""What the benchmark on several cards tells: tables, limits, and the capacity that the planner gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from multi_gpu_forecast import Links, Moves, forecast
from rich.console import Console
from rich.table import Table
from view_group import NO_PREFETCH

from cpkv.cache.capacity_planner import MILLION, CapacityPlanner
from cpkv.cli.sizes import GIB, show_bytes, show_tokens
from cpkv.config.settings import EngineSettings
from cpkv.layout.model_numbers import model_numbers

MODEL = "glm-5.2"
CARD_MEMORY = 60 * GIB
MOST_OVER_REPLICATED = 1.02
# Of what a view adds to replicated by the forecast. Where that is little, it is less than noise: a share of replicated
# itself is always allowed.
MOST_OFF_FORECAST = 0.2
ALWAYS_OFF = 0.01
LIMITED = ("unified", "mixed")


def capacity(cp_size: int, chunk: int) -> dict[str, Any]:
    """What `cpkv plan` says of GLM-5.2 with packed rows and 60 GiB a card, for one request of a million tokens."""
    settings = EngineSettings(
        num_pages=1,
        enable_cp_shared_kv=True,
        cp_size=cp_size,
        page_size=64,
        chunk_size=chunk,
        dtype="bfloat16",
        latent_dtype="fp8",
        index_dtype="fp8",
    )
    report = CapacityPlanner(model_numbers(MODEL), settings, CARD_MEMORY).report((MILLION,))
    return {
        "ratio": report.capacity_ratio,
        "views": {
            view.view: {"tokens": view.capacity.tokens, "scratch": view.scratch_bytes, "ratio": view.capacity_ratio}
            for view in report.million.views
        },
        "engine": {choice.view: choice.capacity_ratio for choice in report.million.choices},
    }


def missed_limits(results: dict[str, Any]) -> list[str]:
    """Bits, answers and bytes that are not what they must be, in words."""
    missed = [f"{what}: not the bits of replicated" for what, equal in results["equal"].items() if not equal]
    for view, (right, asked) in results["recall"].items():
        if right < asked:
            missed.append(f"{view}: the recall model gave {right} of {asked} answers")
    for pool, held in results["pools"].items():
        if held["allocated"] != held["formula"]:
            missed.append(f"the {pool} pool holds {held['allocated']} bytes, by the formula {held['formula']}")
    for history, views in results.get("views", {}).items():
        for view, row in views.items():
            where = f"{view}, history {history}"
            if not row["equal"]:
                missed.append(f"{where}: not the logits of replicated")
            for what in ("moved", "held", "scratch"):
                found, planned = row[f"{what}_bytes"], row[f"planned_{'' if what == 'moved' else what + '_'}bytes"]
                # What `blocked` moves depends on the choices; its plan is the most that it can be.
                if found > planned or (found < planned and not (view == "blocked" and what == "moved")):
                    missed.append(f"{where}: {what} {found} bytes, planned {planned}")
    return missed


def left_out(results: dict[str, Any]) -> list[str]:
    """Histories that were asked for and did not fit, in words."""
    return [f"history {show_tokens(int(history))} is left out: {why}" for history, why in results["skipped"].items()]


def over_replicated(results: dict[str, Any]) -> list[str]:
    """Views with a limit that may take longer than it allows, in words."""
    return [
        f"{view}, history {show_tokens(int(history))}: up to {views[view]['ratio']['high']:.3f} of replicated"
        for history, views in results.get("views", {}).items()
        for view in LIMITED
        if view in views and views[view]["ratio"]["high"] > MOST_OVER_REPLICATED
    ]


def expected_seconds(results: dict[str, Any], view: str, row: dict[str, Any]) -> float:
    """What a chunk should take by the probe of the links."""
    links, moves = Links(**results["links"]), Moves(**row["moves"])
    shared_card = results["cards"] < results["cp_size"]
    return forecast(view, row["replicated_seconds"], moves, links, shared_card=shared_card)


class Added(NamedTuple):
    """Seconds that a view adds to `replicated`, its own pairs' of a chunk.

    Attributes:
        measured: of the slowest rank.
        expected: by the forecast.
        allowed: by how much the two may differ.
    """

    measured: float
    expected: float
    allowed: float

    @classmethod
    def of(cls, results: dict[str, Any], view: str, row: dict[str, Any]) -> Added:
        """Of a view at a history."""
        replicated = row["replicated_seconds"]
        expected = expected_seconds(results, view, row) - replicated
        allowed = max(MOST_OFF_FORECAST * expected, ALWAYS_OFF * replicated)
        return cls(row["seconds"] - replicated, expected, allowed)


def off_forecast(results: dict[str, Any]) -> list[str]:
    """Views that add another time to `replicated` than the forecast does, by more than it may be off, in words.

    Of `blocked` it knows bytes and not rounds, which depend on the choices.
    """
    return [
        f"{view}, history {show_tokens(int(history))}: {added.measured * 1e3:.2f} ms more than replicated, by the "
        f"forecast {added.expected * 1e3:.2f}, {added.allowed * 1e3:.2f} off at most"
        for history, views in results.get("views", {}).items()
        for view, row in views.items()
        for added in [Added.of(results, view, row)]
        if view != "blocked" and abs(added.measured - added.expected) > added.allowed
    ]


def print_tables(results: dict[str, Any]) -> None:
    """What people read."""
    console = Console(width=165)
    console.print(f"{results['machine']}, kernels: {results['kernels']}; {results['seconds']:.0f} s")
    right = sum(results["equal"].values())
    console.print(f"bits: {right} of {len(results['equal'])} views and histories equal replicated")
    answers = ", ".join(f"{view} {right} of {asked}" for view, (right, asked) in results["recall"].items())
    console.print(f"answers of the recall model: {answers}")
    for line in left_out(results):
        console.print(line)
    if "views" in results:
        links = Links(**results["links"])
        console.print(
            f"links, all ranks at once: {links.read / 1e9:.0f} GB/s from the next rank's memory, {links.own / 1e9:.0f} "
            f"from its own, {links.gather / 1e9:.0f} from all others in an all-gather, which takes at least "
            f"{links.meeting * 1e6:.0f} us"
        )
        console.print(_time_table(results))
        console.print(_link_table(results))
    _print_capacity(console, results)


def _time_table(results: dict[str, Any]) -> Table:
    table = Table(title="a chunk, slowest rank, relative to replicated")
    columns = ("history", "view", "ms", "replicated", "ratio", "95% bounds", "moved", "over the link", "scratch")
    # A chunk is mostly what replicated takes too; what a view adds to that shows how good the forecast is.
    for column in (*columns, "forecast, ms", "measured / forecast", "of what it adds"):
        table.add_column(column, justify="right")
    for history, views in results["views"].items():
        for view, row in views.items():
            ratio, expected = row["ratio"], expected_seconds(results, view, row)
            added = Added.of(results, view, row)
            table.add_row(
                show_tokens(int(history)),
                view,
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['replicated_seconds'] * 1e3:.2f}",
                f"{ratio['middle']:.3f}",
                f"{ratio['low']:.3f} to {ratio['high']:.3f}",
                show_bytes(row["moved_bytes"]),
                show_bytes(row["moves"]["link_bytes"]),
                show_bytes(row["scratch_bytes"]),
                f"{expected * 1e3:.2f}",
                f"{row['seconds'] / expected:.2f}",
                f"{added.measured / added.expected:.2f}" if added.expected else "-",
            )
    return table


def _link_table(results: dict[str, Any]) -> Table:
    table = Table(title="page gather with nothing computed; rates of the bytes that come from other ranks")
    columns = ("history", "bytes", "ms", "GB/s", "of the bare all-gather's rate", "of plain copies' rate", "hidden")
    for column in columns:
        table.add_column(column, justify="right")
    for history, row in results["gathers"].items():
        table.add_row(
            show_tokens(int(history)),
            show_bytes(row["bytes"]),
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['bytes_per_second'] / 1e9:.0f}",
            *(_rate(row[name]) for name in ("all-gather", "peer copy")),
            f"{hidden_share(results['views'][history], row['seconds']):.0%}",
        )
    return table


def _rate(row: dict[str, Any]) -> str:
    ratio = row["rate_ratio"]
    rate = row["bytes_per_second"] / 1e9
    return f"{ratio['middle']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) of {rate:.0f} GB/s"


def hidden_share(views: dict[str, Any], gather_seconds: float) -> float:
    """Of the gather's time, what prefetch takes away from a chunk; each view less its own `replicated`."""
    extra = {view: views[view]["seconds"] - views[view]["replicated_seconds"] for view in ("mixed", NO_PREFETCH)}
    return (extra[NO_PREFETCH] - extra["mixed"]) / gather_seconds


def _print_capacity(console: Console, results: dict[str, Any]) -> None:
    for pool, held in results["pools"].items():
        console.print(f"{pool} pool: {held['allocated']} bytes allocated, {held['formula']} by the formula")
    planned = results["capacity"]
    console.print(
        f"{MODEL}, {results['cp_size']} ranks, packed rows, {show_bytes(CARD_MEMORY)} a card: capacity ratio "
        f"{planned['ratio']:.2f} without scratch; with that for 1M tokens: "
        + ", ".join(f"{view} {row['ratio']:.2f}" for view, row in planned["views"].items())
        + "; the engine takes "
        + ", ".join(f"{view} ({ratio:.2f})" for view, ratio in planned["engine"].items())
    )
