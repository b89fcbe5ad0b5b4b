"""`cpkv check`: whether this machine can run prefill ranks and decode workers, and what to do where it cannot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cpkv.checks.result import CheckResult

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def check(
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where peers reach this machine (default: loopback alone).")
    ] = None,
    transfer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this back end, which must run: mooncake, tcp, shm, nixl; may be given several times "
            "(default: all, and those that are not installed are a warning).",
        ),
    ] = None,
    port: Annotated[list[int] | None, typer.Option(help="Must be free at --host; may be given several times.")] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
    ] = False,
) -> None:
    """Look at limits, memory, sockets and ports, and move 1 MiB with each back end.

    Exit status: 1 when a check failed.

    Examples:  cpkv check  |  cpkv check --host 10.0.0.5 --transfer tcp --port 7400
    """
    from cpkv.checks.engines import back_ends
    from cpkv.checks.machine import machine_checks
    from cpkv.checks.result import run_checks

    results = run_checks(machine_checks(host, back_ends(transfer or []), port or []))
    failed = sum(result.state == "failed" for result in results)
    if json_output:
        print(json.dumps({"failed": failed, "checks": [asdict(result) for result in results]}))
    else:
        print_results(results)
    if failed:
        raise typer.Exit(1)


def print_results(results: Sequence[CheckResult]) -> None:
    """The table that people read."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("check", "state", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for result in results:
        # Text takes paths and causes as they are; in a plain string brackets would be markup.
        state = Text(result.state, style=_COLOURS[result.state])
        table.add_row(Text(result.name), state, Text(result.figure), Text(result.remedy))
    Console(highlight=False).print(table)
