"""The flags of `cpkv plan`: name, help text and panel of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

GROUP, VIEWS, OUTPUT = "Ranks and pool", "Views", "Output"

Model = Annotated[
    str,
    typer.Argument(
        help="Folder with a config.json, a config.json, or a preset: deepseek-v3.2, glm-5, glm-5.2.",
        metavar="MODEL",
    ),
]
CpSize = Annotated[int, typer.Option(help="Prefill ranks, 1 to 8; 1 means no sharing.", rich_help_panel=GROUP)]
Context = Annotated[
    list[str] | None,
    typer.Option(
        help="Tokens of a request, like 128K; may be given several times (default: 32K, 128K, 1M).",
        metavar="TOKENS",
        rich_help_panel=GROUP,
    ),
]
ChunkSize = Annotated[int, typer.Option(help="Tokens of a prefill batch at most.", rich_help_panel=GROUP)]
PageSize = Annotated[int, typer.Option(help="Tokens of a page.", rich_help_panel=GROUP)]
KvMemory = Annotated[
    str,
    typer.Option(help="Of each rank, for pages and scratch, like 60GiB.", metavar="SIZE", rich_help_panel=GROUP),
]
StoredLatentDtype = Annotated[
    Literal["fp8", "bfloat16", "float32", "float64"],
    typer.Option(
        "--latent-dtype",
        "--dtype",
        help="Of stored latent rows: fp8 (packed), bfloat16, float32, float64.",
        metavar="NAME",
        rich_help_panel=GROUP,
    ),
]
StoredIndexDtype = Annotated[
    Literal["fp8", "bfloat16", "float32", "float64"],
    typer.Option(
        "--index-dtype",
        help="Of stored index keys: fp8, bfloat16, float32, float64.",
        metavar="NAME",
        rich_help_panel=GROUP,
    ),
]
KvViewName = Annotated[
    Literal["auto", "current", "full", "mixed", "unified", "blocked"],
    typer.Option(
        help="Only this view: auto (all of them), current, full, mixed, unified, blocked.",
        metavar="NAME",
        rich_help_panel=VIEWS,
    ),
]
ScratchBytes = Annotated[
    str | None,
    typer.Option(
        help="What a rank may hold beside its pool, like 256MiB (default: what the context takes).",
        metavar="SIZE",
        rich_help_panel=VIEWS,
    ),
]
NoPrefetch = Annotated[
    bool,
    typer.Option("--no-prefetch", help="Gather a layer only when it is computed.", rich_help_panel=VIEWS),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Draw capacity, scratch and bytes moved against the context.", metavar="FILE.png", rich_help_panel=OUTPUT
    ),
]
JsonOutput = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.", rich_help_panel=OUTPUT)
]
