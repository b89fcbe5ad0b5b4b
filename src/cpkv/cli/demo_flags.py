"""The flags of `cpkv demo`: name, help text and panel of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from cpkv.config.names import DeviceName, KernelName

MODEL, GROUP, REQUESTS, OUTPUT = "Model", "Prefill group and pools", "Requests", "Output"
ELSEWHERE = "A decode worker elsewhere"

ModelFamily = Annotated[
    Literal["glm5", "glm52", "deepseek-v32"],
    typer.Option(help="Family of the model that is made when no --model is given.", rich_help_panel=MODEL),
]
Model = Annotated[
    Path | None,
    typer.Option(help="Checkpoint folder of a DSA model to serve.", metavar="FOLDER", rich_help_panel=MODEL),
]
Dtype = Annotated[
    Literal["float64", "float32", "bfloat16"],
    typer.Option(help="Of weights and computation.", rich_help_panel=MODEL),
]
StoredIndexDtype = Annotated[
    Literal["float64", "float32", "bfloat16", "fp8"] | None,
    typer.Option(help="Of stored index keys: fp8, or the same as --dtype (default).", rich_help_panel=MODEL),
]
StoredLatentDtype = Annotated[
    Literal["float64", "float32", "bfloat16", "fp8"] | None,
    typer.Option(help="Of stored latent rows: fp8 (packed), or the same as --dtype (default).", rich_help_panel=MODEL),
]
CpSize = Annotated[int, typer.Option(help="Prefill ranks, 1 to 8; 1 means no sharing.", rich_help_panel=GROUP)]
CpStrategy = Annotated[
    Literal["zigzag", "interleave"],
    typer.Option(help="How tokens are split: zigzag or interleave.", metavar="NAME", rich_help_panel=GROUP),
]
EnableCpSharedKv = Annotated[
    bool | None,
    typer.Option(
        "--enable-cp-shared-kv/--replicated",
        help="One KV copy over the ranks, or one on each (default: one, except at --cp-size 1).",
        rich_help_panel=GROUP,
    ),
]
KvViewName = Annotated[
    Literal["auto", "current", "full", "mixed", "unified", "blocked"],
    typer.Option(
        help="What attention reads: auto (the cheapest), current, full, mixed, unified, blocked.",
        metavar="NAME",
        rich_help_panel=GROUP,
    ),
]
NoCurrentReuse = Annotated[
    bool,
    typer.Option("--no-current-reuse", help="Another view also for chunks without history.", rich_help_panel=GROUP),
]
NoPrefetch = Annotated[
    bool,
    typer.Option("--no-prefetch", help="Gather a layer only when it is computed.", rich_help_panel=GROUP),
]
ScratchBytes = Annotated[
    int | None,
    typer.Option(
        help="Bytes that a rank may hold beside its pool (default: enough for the pool's largest context).",
        rich_help_panel=GROUP,
    ),
]
Device = Annotated[
    DeviceName,
    typer.Option(
        help="Of models and pages: cpu, or cuda: ranks take the GPUs of the host in turn.",
        metavar="NAME",
        rich_help_panel=GROUP,
    ),
]
KernelsName = Annotated[
    KernelName,
    typer.Option(
        help="On a GPU: auto (the vendors' where they can run), or ours, or vendor.",
        metavar="NAME",
        rich_help_panel=GROUP,
    ),
]
PageSize = Annotated[int, typer.Option(help="Tokens of a page.", rich_help_panel=GROUP)]
ChunkSize = Annotated[int, typer.Option(help="Tokens of a prefill batch at most.", rich_help_panel=GROUP)]
NumPages = Annotated[
    int | None,
    typer.Option(
        help="Logical pages, the reserved ones included, a multiple of --cp-size (default: enough).",
        rich_help_panel=GROUP,
    ),
]
Transfer = Annotated[
    Literal["mooncake", "tcp", "shm", "nixl", "inprocess"],
    typer.Option(
        help="mooncake or tcp (processes), or shm (those of one host), or nixl, or inprocess (threads).",
        metavar="NAME",
        rich_help_panel=GROUP,
    ),
]
NoOverlap = Annotated[
    bool,
    typer.Option("--no-overlap", help="Send pages only once the whole prompt is computed.", rich_help_panel=GROUP),
]
VerifyTransfer = Annotated[
    bool,
    typer.Option("--verify-transfer", help="Compare a digest of each page after its transfer.", rich_help_panel=GROUP),
]
Host = Annotated[str, typer.Option(help="Address at which workers listen and are reached.", rich_help_panel=ELSEWHERE)]
DecodeAt = Annotated[
    str | None,
    typer.Option(help="Use the `cpkv decode` that listens there.", metavar="HOST:PORT", rich_help_panel=ELSEWHERE),
]
Registry = Annotated[
    str | None,
    typer.Option(help="Use a decode worker that is registered there.", metavar="HOST:PORT", rich_help_panel=ELSEWHERE),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that workers share (default: CPKV_SECRET).",
        metavar="FILE",
        rich_help_panel=ELSEWHERE,
    ),
]
PromptTokens = Annotated[int, typer.Option(help="Tokens of the longest prompt.", rich_help_panel=REQUESTS)]
PromptFile = Annotated[
    Path | None,
    typer.Option(help="Text to prefill instead of a made prompt.", metavar="FILE", rich_help_panel=REQUESTS),
]
Requests = Annotated[int, typer.Option(help="Requests, of different lengths.", rich_help_panel=REQUESTS)]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to decode per request.", rich_help_panel=REQUESTS)]
Seed = Annotated[int, typer.Option(help="Of weights, prompts and page order.", rich_help_panel=REQUESTS)]
Dump = Annotated[
    Path | None,
    typer.Option(
        help="Write prompts, checkpoint, logits and decode pool there.", metavar="FOLDER", rich_help_panel=OUTPUT
    ),
]
JsonOutput = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.", rich_help_panel=OUTPUT)
]
