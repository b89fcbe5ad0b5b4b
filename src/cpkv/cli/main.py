"""The `cpkv` command: its subcommands, and how errors become exit statuses.

0 done    1 the demo found a difference, or a check failed    2 a typed error, told in one line    3 an unexpected error
130 interrupted
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

import typer

from cpkv import __version__
from cpkv.cli.check import check
from cpkv.cli.decode import decode
from cpkv.cli.demo import demo
from cpkv.cli.plan import plan
from cpkv.cli.registry import registry
from cpkv.errors import CpkvError


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cpkv {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log to stderr what the scheduler decides."),
) -> None:
    """One copy of the KV cache across the ranks of a context-parallel group."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def make_app() -> typer.Typer:
    """The command tree."""
    app = typer.Typer(name="cpkv", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    app.command()(demo)
    app.command()(plan)
    app.command()(decode)
    app.command()(check)
    app.command()(registry)
    return app


def _end(signal_number: int, _frame: FrameType | None) -> None:
    """SIGTERM unwinds the stack, so that workers end and folders are removed."""
    raise SystemExit(128 + signal_number)


def run() -> None:
    """Entry point of the `cpkv` command."""
    signal.signal(signal.SIGTERM, _end)
    try:
        make_app()(standalone_mode=True)
    except CpkvError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        logging.getLogger("cpkv").info("unexpected error", exc_info=error)
        print(f"error: unexpected {type(error).__name__}: {error}; `cpkv --verbose` shows where", file=sys.stderr)
        sys.exit(3)
