"""Capacity, scratch and bytes moved against the context, as one PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cpkv.cache.capacity_plan import ViewNumbers
from cpkv.cache.capacity_planner import MILLION, REPLICATED, CapacityPlanner
from cpkv.cli.sizes import show_bytes, show_tokens
from cpkv.config.names import ViewName
from cpkv.config.settings import EngineSettings
from cpkv.errors import ConfigError

SHORTEST = 1 << 12


class Style(NamedTuple):
    """How the curve of a view looks."""

    color: str
    dashes: str
    marker: str
    width: float = 1.6


def view_style(view: str) -> Style:
    """Told apart without colour too; the palette is the one of Okabe and Ito."""
    styles = {
        "replicated": Style("#000000", "--", "s"),
        # Wide, since `mixed` often lies on it.
        "full": Style("#E69F00", "-", "", 5.0),
        "mixed": Style("#0072B2", "-", "o"),
        "unified": Style("#009E73", "-.", "D"),
        "blocked": Style("#CC79A7", "-", "^"),
        "current": Style("#56B4E9", ":", "x"),
    }
    return styles[view]


def plotted_contexts(contexts: tuple[int, ...]) -> tuple[int, ...]:
    """Powers of two up to a million tokens or the longest context that was asked for."""
    longest = max(MILLION, *contexts)
    return tuple(SHORTEST << power for power in range(longest.bit_length()) if SHORTEST << power <= longest)


def draw_plan(planner: CapacityPlanner, model: str, contexts: tuple[int, ...], path: Path) -> None:
    """Write the plot.

    Raises:
        ConfigError: matplotlib is missing, the name does not end in .png, or the file cannot be written.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot is {path}, and only PNG is drawn; give a name that ends in .png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: {error}; run `pip install cpkv[plot]`, or leave it out") from error
    shown = plotted_contexts(contexts)
    curves = _curves(planner, shown)
    figure = Figure(figsize=(14.5, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(planner, model), fontsize=12)
    capacity, scratch, moved = figure.subplots(1, 3)
    _draw_capacity(capacity, planner, shown)
    _draw_scratch(scratch, curves)
    _draw_moved(moved, curves)
    for axes in (capacity, scratch, moved):
        _label_contexts(axes, shown)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}; give another path") from error


class Curve(NamedTuple):
    """A view's numbers by context, in tokens."""

    view: str
    contexts: list[int]
    numbers: list[ViewNumbers]


def _curves(planner: CapacityPlanner, contexts: tuple[int, ...]) -> list[Curve]:
    curves: dict[str, Curve] = {}
    for context in contexts:
        for numbers in planner.views(context):
            curve = curves.setdefault(numbers.view, Curve(numbers.view, [], []))
            # `current` ends where requests get a history.
            if numbers.view != "current" or context <= planner.settings.chunk_size:
                curve.contexts.append(context)
                curve.numbers.append(numbers)
    return [curve for curve in curves.values() if curve.contexts]


def _title(planner: CapacityPlanner, model: str) -> str:
    settings = planner.settings
    return (
        f"{model}: {settings.cp_size} rank{'s'[: settings.cp_size - 1]} with {show_bytes(planner.kv_memory)} of KV "
        f"memory each, chunks of {settings.chunk_size} tokens, pages of {settings.page_size} tokens, "
        f"latent rows {settings.stored_latent_dtype}, index keys {settings.index_dtype}"
    )


def _draw(axes: Any, view: str, contexts: Sequence[int], values: Sequence[float], label: str) -> None:
    style = view_style(view)
    axes.plot(
        contexts,
        values,
        color=style.color,
        linestyle=style.dashes,
        linewidth=style.width,
        marker=style.marker,
        markersize=4.5,
        alpha=0.6 if style.width > 2 else 1.0,
        label=label,
    )


def _draw_capacity(axes: Any, planner: CapacityPlanner, contexts: Sequence[int]) -> None:
    """One curve per number of ranks and view, since views differ little here and ranks much."""
    sizes = [size for size in (2, 4) if size < planner.settings.cp_size] + [planner.settings.cp_size]
    drawn: list[tuple[ViewName, int]] = [(REPLICATED, 1)]
    for view in planner.view_names():
        # The two that the planner takes, with and without shared memory, or the one that was forced.
        if view in ("mixed", "unified") or planner.settings.kv_view == view != "current":
            drawn += [(view, size) for size in sizes]
    for view, size in drawn:
        group = planner if view == REPLICATED else replace(planner, settings=_settings_of(planner, size))
        held = [group.set_aside(view, context).held_bytes for context in contexts]
        # What holds no token has no place on a log axis.
        tokens = [group.capacity(scratch, size > 1).tokens or float("nan") for scratch in held]
        _draw(axes, view, contexts, tokens, view if size in (1, sizes[-1]) else "_")
        if size > 1 or view == REPLICATED:
            axes.annotate(f"{size} x", (contexts[0], tokens[0]), (4, 5), textcoords="offset points", fontsize=9)
    axes.set_title("Capacity beside the scratch, shared over N ranks (N x)")
    axes.set_ylabel("tokens that fit")
    _label_powers(axes, 2, show_tokens)
    axes.legend(loc="lower right", fontsize=9, ncols=3)


def _settings_of(planner: CapacityPlanner, cp_size: int) -> EngineSettings:
    """The planner's settings for another number of ranks."""
    return msgspec.structs.replace(planner.settings, cp_size=cp_size)


def _draw_scratch(axes: Any, curves: list[Curve]) -> None:
    for curve in curves:
        _draw(axes, curve.view, curve.contexts, [numbers.scratch_bytes for numbers in curve.numbers], curve.view)
    axes.set_title("Scratch of a rank")
    axes.set_ylabel("bytes held beside the pool")
    _label_powers(axes, 4, _show_power)
    axes.legend(loc="upper left", fontsize=9)


def _draw_moved(axes: Any, curves: list[Curve]) -> None:
    still = []
    for curve in curves:
        if any(numbers.moved_bytes for numbers in curve.numbers):
            # Zero has no place on a log axis: the curve starts with the first history.
            moved = [numbers.moved_bytes or float("nan") for numbers in curve.numbers]
            _draw(
                axes, curve.view, curve.contexts, moved, curve.view + (", at most" if curve.view == "blocked" else "")
            )
        else:
            still.append(curve.view)
    axes.set_title("History moved to a rank, per chunk")
    axes.set_ylabel("bytes moved, all layers")
    _label_powers(axes, 4, _show_power)
    for view in still:
        _draw(axes, view, [], [], f"{view}: nothing")
    axes.legend(loc="lower right", fontsize=9)


def _label_contexts(axes: Any, contexts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    shown = contexts[::2] if len(contexts) % 2 else contexts[1::2]
    axes.set_xticks(shown, [show_tokens(context) for context in shown])
    axes.set_xlim(contexts[0] / 1.25, contexts[-1] * 1.25)
    axes.set_xlabel("context of one request (tokens)")
    axes.grid(True, which="major", alpha=0.35)
    axes.minorticks_off()


def _label_powers(axes: Any, base: int, show: Callable[[int], str]) -> None:
    """A log axis with ticks at powers of the base, their sizes in words, and room for the legend below."""
    drawn = [value for line in axes.lines for value in line.get_ydata() if not math.isnan(value)]
    if not drawn:
        axes.set_yticks([])
        return
    axes.set_yscale("log", base=2)
    low, high = min(drawn) / 1.6, max(drawn) * 1.3
    ticks = [base**power for power in range(64) if low <= base**power <= high]
    axes.set_yticks(ticks, [show(tick) for tick in ticks])
    axes.set_ylim(low, high)


def _show_power(num_bytes: int) -> str:
    return show_bytes(num_bytes).replace(".00", "")
