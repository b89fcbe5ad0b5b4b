"""What `cpkv plan` found, as tables for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from cpkv.cache.capacity_plan import Capacity, CapacityPlan, ContextNumbers, EngineChoice, ViewNumbers
from cpkv.cli.sizes import show_bytes, show_tokens


def as_json(plan: CapacityPlan, model: str) -> dict[str, Any]:
    """One JSON object: the fields of CapacityPlan, and the model as it was named."""
    return {"model_name": model, **msgspec.to_builtins(plan)}


def print_plan(plan: CapacityPlan, model: str) -> None:
    """The tables that people read."""
    console = Console(highlight=False)
    console.print(_title(plan, model))
    console.print(_pool_table(plan))
    console.print(_views_table(plan))
    for line in _notes(plan):
        console.print(Padding(line, (0, 0, 0, 1)))


def _title(plan: CapacityPlan, model: str) -> str:
    ranks = "1 rank" if plan.cp_size == 1 else f"{plan.cp_size} ranks"
    return (
        f"{model}: {plan.model.layers} layers, {sum(plan.model.has_indexer)} of them with an indexer, "
        f"top-k {plan.model.topk}\n"
        f"{ranks}, pages of {plan.page_size} tokens, chunks of {plan.chunk_size} tokens; "
        f"latent rows {plan.latent_dtype} ({plan.latent_row_bytes} B), "
        f"index keys {plan.index_dtype} ({plan.index_row_bytes} B)"
    )


def _pool_table(plan: CapacityPlan) -> Table:
    table = Table(show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value")
    table.add_row("a token, on the rank that holds it", f"{plan.token_bytes:,.10g} B, all layers")
    table.add_row("a page", f"{plan.page_bytes:,} B ({show_bytes(plan.page_bytes)})")
    memory = f"{show_bytes(plan.kv_memory_bytes)} a rank hold"
    table.add_row(f"{memory}, replicated", _capacity(plan.replicated))
    if plan.cp_size > 1:
        shared = f"{_capacity(plan.shared)}, {plan.capacity_ratio:.3f} x"
        table.add_row(f"{memory}, shared over {plan.cp_size}", shared)
    million = plan.million
    table.add_row("1M tokens take, replicated", f"{show_bytes(million.replicated_bytes)} of each rank")
    if plan.cp_size > 1:
        table.add_row("1M tokens take, shared", f"{show_bytes(million.shared_bytes)} of each rank, and scratch:")
        for choice in million.choices:
            table.add_row(f"  ranks on {_hosts(choice)}", _scratch(choice))
    return table


def _views_table(plan: CapacityPlan) -> Table:
    title = "One request, per rank: scratch set aside, history moved by its last chunk"
    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("context")
    table.add_column("view")
    for name in ("scratch", "moved\nper chunk", "tokens\nbeside it", "ratio"):
        table.add_column(name, justify="right")
    for numbers in plan.contexts:
        for row, view in enumerate(numbers.views):
            context = show_tokens(numbers.context) if row == 0 else ""
            table.add_row(context, " ".join([view.view, *_marks(view, numbers)]), *_view_cells(view, numbers))
        table.add_section()
    return table


def _marks(view: ViewNumbers, numbers: ContextNumbers) -> list[str]:
    """Keys of the notes below the table that a row has."""
    if view.view == "current" and numbers.context > numbers.chunk:
        return ["(1)"]
    marks = {"(2)": view.capacity.tokens < numbers.context, "(3)": not view.serves_context}
    return [mark for mark, holds in marks.items() if holds]


def _view_cells(view: ViewNumbers, numbers: ContextNumbers) -> tuple[str, ...]:
    scratch, moved = show_bytes(view.scratch_bytes), show_bytes(view.moved_bytes) if view.moved_bytes else "0"
    if view.view == "current" and numbers.context > numbers.chunk:
        return scratch, moved, "-", "-"
    at_most = "<= " if view.view == "blocked" and view.moved_bytes else ""
    return scratch, at_most + moved, f"{view.capacity.tokens:,}", f"{view.capacity_ratio:.3f}"


def _notes(plan: CapacityPlan) -> list[str]:
    taken: dict[str, list[str]] = {}
    for numbers in plan.contexts:
        for choice in numbers.choices:
            what = f"{choice.view}: {choice.reason}" if choice.view else f"refused: {choice.reason}"
            taken.setdefault(f"ranks on {_hosts(choice)}: {what}", []).append(show_tokens(numbers.context))
    notes = [f"{', '.join(contexts)}, {what}" for what, contexts in taken.items()]
    marks = {mark for numbers in plan.contexts for view in numbers.views for mark in _marks(view, numbers)}
    for mark, meaning in (
        ("(1)", "serves only a request's first chunk, whose scratch this is"),
        ("(2)", "fewer tokens than the request has: it would be refused"),
        ("(3)", "more than --scratch-bytes: this view would not serve"),
    ):
        if mark in marks:
            notes.append(f"{mark} {meaning}")
    beyond = [show_tokens(numbers.context) for numbers in plan.contexts if numbers.beyond_model]
    if beyond:
        notes.append(f"{', '.join(beyond)}: longer than the model's {plan.model.max_positions:,} positions")
    if plan.cp_size > 1:
        notes.append("moved: pages of the history that reach a rank, its own included; the chunk's rows come on top")
        notes.append("ratio: tokens over those of a replicated pool beside its own scratch")
    return notes


def _capacity(capacity: Capacity) -> str:
    return f"{capacity.tokens:,} tokens in {capacity.pages:,} pages"


def _scratch(choice: EngineChoice) -> str:
    if choice.view is None:
        return f"refused: {choice.reason}"
    return f"{show_bytes(choice.scratch_bytes)} with {choice.view}; {_capacity(choice.capacity)} beside it"


def _hosts(choice: EngineChoice) -> str:
    return "one host" if choice.hosts == "one" else "several hosts"
