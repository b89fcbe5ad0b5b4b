"""`cpkv registry`: a registry in a process of its own, and what a running one knows."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpkv.cli.addresses import SECRET_VARIABLE, check_port, parse_address, read_secret
from cpkv.cli.end_signals import end_signals
from cpkv.errors import ConfigError

if TYPE_CHECKING:
    from cpkv.protocol.directory import WorkerRecord

_RUN = "A registry of this process"
_ASK = "A running one"


def registry(
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback a secret is needed.", rich_help_panel=_RUN)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", rich_help_panel=_RUN)] = 0,
    lease: Annotated[
        float, typer.Option(help="Seconds for which a silent worker stays listed.", rich_help_panel=_RUN)
    ] = 15.0,
    secret_file: Annotated[
        Path | None, typer.Option(help=f"File with the shared secret; without it, {SECRET_VARIABLE} is taken.")
    ] = None,
    at: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where it listens.", rich_help_panel=_ASK)] = None,
    list_workers: Annotated[bool, typer.Option("--list", help="Print who is there.", rich_help_panel=_ASK)] = False,
    json_output: Annotated[bool, typer.Option("--json", help="As one JSON object.", rich_help_panel=_ASK)] = False,
) -> None:
    """Where prefill groups and decode workers register and find each other, until SIGTERM or Ctrl-C.

    It prints where it listens and logs who joins, leaves, drains or is not heard of. Everything is in memory: after a
    restart at the same port workers come back by themselves.

    Examples:  cpkv registry --port 7400  |  cpkv registry --at 127.0.0.1:7400 --list
    """
    secret = read_secret(secret_file, os.environ)
    if at is None:
        if list_workers or json_output:
            raise ConfigError("--list and --json are about a running registry; give --at HOST:PORT too")
        serve(host, port, secret, lease)
    elif not list_workers:
        raise ConfigError("--at names a running registry and nothing was asked of it; give --list too")
    else:
        print_workers(*parse_address(at, "--at"), secret, json_output)


def serve(host: str, port: int, secret: str, lease_s: float) -> None:
    """Be a registry until SIGTERM or SIGINT.

    Raises:
        ConfigError: no secret beyond loopback, or a number is out of range.
        TransferError: the port is taken or the address is not ours.
    """
    from cpkv.transfer.registry import RegistryServer

    check_port(port, "--port")
    # Who joins and leaves is what this command is run for, not only with --verbose.
    logging.getLogger("cpkv").setLevel(logging.INFO)
    with (
        end_signals() as ends,
        contextlib.closing(RegistryServer(host, port, secret=secret, lease_s=lease_s)) as server,
    ):
        server.start()
        print(f"registry listens on {server.host}:{server.port}", flush=True)
        signal.sigwait(ends)


def print_workers(host: str, port: int, secret: str, as_json: bool) -> None:
    """Print who is registered, as a table or as JSON.

    Raises:
        TransferError: the registry does not answer.
    """
    import msgspec

    from cpkv.transfer.registry_client import list_workers

    workers = list_workers(host, port, secret=secret)
    if as_json:
        print(json.dumps({"registry": f"{host}:{port}", "workers": msgspec.to_builtins(workers)}))
    else:
        print_table(f"{host}:{port}", workers)


def print_table(address: str, workers: Sequence[WorkerRecord]) -> None:
    """The table that people read."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    count = f"{len(workers)} worker{'s'[: len(workers) != 1]}"
    table = Table(title=f"{count} at the registry {address}", title_justify="left", title_style="")
    for column in ("name", "role", "address", "state", "instance", "model"):
        table.add_column(column, overflow="fold")
    for worker in workers:
        cells: tuple[Any, ...] = (
            worker.name,
            worker.role,
            f"{worker.host}:{worker.port}",
            "draining" if worker.draining else "takes requests",
            worker.instance,
            "-" if worker.pool is None else worker.pool.model,
        )
        # What a worker tells of itself is no markup.
        table.add_row(*map(Text, cells))
    Console(highlight=False).print(table)
