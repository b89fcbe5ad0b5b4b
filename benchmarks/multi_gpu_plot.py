"""The curves of the benchmark on several cards: a chunk by view and history, and at what rates pages come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multi_gpu_report import expected_seconds

from cpkv.cli.sizes import show_tokens

# Views lie beside each other at a history, so that their bounds can be told apart.
SHIFT = 1.06
RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def plot(results: dict[str, Any], path: Path) -> bool:
    """Write a PNG with a panel for times and one for rates; False and no file where no history was timed."""
    # Wrong bits leave no times at all, histories that do not fit those of history 0 alone.
    if not results.get("gathers"):
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, rates) = pyplot.subplots(1, 2, figsize=(11, 4.4), width_ratios=(3, 2))
    _draw_times(times, results)
    _draw_rates(rates, results)
    cards, ranks = results["cards"], results["cp_size"]
    where = "with a card each" if cards == ranks else "of one card" if cards == 1 else f"of {cards} cards"
    where = "on the CPU" if results["device"] == "CPU" else f"{where} ({results['device']}, {results['link']})"
    figure.suptitle(f"{ranks} rank processes {where}", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _draw_times(panel: Any, results: dict[str, Any]) -> None:
    """Measured with bounds, and the forecast as a cross of the same colour."""
    by_history = {int(history): views for history, views in results["views"].items() if int(history)}
    names = list(dict.fromkeys(view for views in by_history.values() for view in views))
    for number, view in enumerate(names):
        rows = {history: views[view] for history, views in by_history.items() if view in views}
        places = [history * SHIFT ** (number - (len(names) - 1) / 2) for history in rows]
        ratios = [row["ratio"] for row in rows.values()]
        bounds = [
            [ratio["middle"] - ratio["low"] for ratio in ratios],
            [ratio["high"] - ratio["middle"] for ratio in ratios],
        ]
        middle = [ratio["middle"] for ratio in ratios]
        drawn = panel.errorbar(places, middle, yerr=bounds, marker="o", markersize=4, capsize=3, label=view)
        expected = [expected_seconds(results, view, row) / row["replicated_seconds"] for row in rows.values()]
        panel.plot(places, expected, linestyle="", marker="x", markersize=6, color=drawn[0].get_color())
    panel.plot([], [], linestyle="", marker="x", color="grey", label="forecast")
    panel.axhline(1, color="grey", linewidth=0.8, zorder=0)
    panel.set_title("a chunk relative to replicated, slowest rank", fontsize=10)
    panel.set_ylabel("seconds / replicated")
    _finish(panel, list(by_history))


def _draw_rates(panel: Any, results: dict[str, Any]) -> None:
    gathers = {int(history): row for history, row in results["gathers"].items()}
    series = {
        "plain copies": [row["peer copy"]["bytes_per_second"] / 1e9 for row in gathers.values()],
        "bare all-gather": [row["all-gather"]["bytes_per_second"] / 1e9 for row in gathers.values()],
        "page gather": [row["bytes_per_second"] / 1e9 for row in gathers.values()],
    }
    for name, values in series.items():
        panel.plot(list(gathers), values, marker="o", markersize=4, label=name)
    shown = [value for values in series.values() for value in values]
    panel.set_yscale("log")
    panel.set_ylim(min(shown) / 1.5, max(shown) * 1.5)
    panel.set_yticks([rate for rate in RATES if min(shown) / 1.5 <= rate <= max(shown) * 1.5])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_title("bytes from other ranks, all ranks at once", fontsize=10)
    panel.set_ylabel("GB/s of a rank")
    _finish(panel, list(gathers))


def _finish(panel: Any, histories: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(histories, [show_tokens(history) for history in histories])
    panel.minorticks_off()
    panel.set_xlabel("history, tokens")
    panel.grid(axis="y", linewidth=0.4)
    panel.legend(fontsize=8)
