"""`cpkv demo`: the main job on real processes, checked against the replicated cache and against transformers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from cpkv.cli.demo_options import DemoOptions
from cpkv.config.debug import DEBUG_VARIABLE, debug_requested

MODEL, GROUP, REQUESTS, OUTPUT = "Model", "Prefill group and pools", "Requests", "Output"


def demo(
    model_family: Annotated[
        Literal["glm5", "glm52", "deepseek-v32"],
        typer.Option(help="Family of the constructed model that serves without --model.", rich_help_panel=MODEL),
    ] = "glm5",
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of a DSA model to serve.", rich_help_panel=MODEL)
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16"],
        typer.Option(help="Of weights and latent rows.", rich_help_panel=MODEL),
    ] = "float32",
    index_dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "fp8"] | None,
        typer.Option(help="Of stored index keys: fp8, or the same as --dtype (default).", rich_help_panel=MODEL),
    ] = None,
    cp_size: Annotated[
        int, typer.Option(help="Prefill ranks, 1 to 8; 1 means no sharing.", rich_help_panel=GROUP)
    ] = 4,
    cp_strategy: Annotated[
        Literal["zigzag", "interleave"], typer.Option(help="How tokens are split.", rich_help_panel=GROUP)
    ] = "zigzag",
    enable_cp_shared_kv: Annotated[
        bool | None,
        typer.Option(
            "--enable-cp-shared-kv/--no-enable-cp-shared-kv",
            help="Keep one copy over the ranks (default: on, off at --cp-size 1).",
            rich_help_panel=GROUP,
        ),
    ] = None,
    no_current_reuse: Annotated[
        bool, typer.Option("--no-current-reuse", help="Gather pages also for chunks without history.", rich_help_panel=GROUP)
    ] = False,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.", rich_help_panel=GROUP)] = 64,
    chunk_size: Annotated[int, typer.Option(help="Tokens of a prefill batch.", rich_help_panel=GROUP)] = 2048,
    num_pages: Annotated[
        int | None,
        typer.Option(
            help="Logical pages, reserved ones included, a multiple of --cp-size (default: enough).",
            rich_help_panel=GROUP,
        ),
    ] = None,
    transfer: Annotated[
        Literal["mooncake", "inprocess"],
        typer.Option(help="mooncake: processes and TCP; inprocess: threads.", rich_help_panel=GROUP),
    ] = "mooncake",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt.", rich_help_panel=REQUESTS)] = 4000,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Text to prefill instead.", rich_help_panel=REQUESTS)
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests, of different lengths.", rich_help_panel=REQUESTS)] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to decode.", rich_help_panel=REQUESTS)] = 16,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and page order.", rich_help_panel=REQUESTS)] = 0,
    dump: Annotated[
        Path | None,
        typer.Option(help="Folder for prompts, checkpoint, logits and decode pool.", rich_help_panel=OUTPUT),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Prefill over CP ranks that share one KV cache, hand over to a decode worker, compare with everything known.

    Runs the same requests through the shared and the replicated cache and, in float32 and float64, through an
    independent implementation. Exit status 1 when anything differs, 2 when it could not run.

    Examples:

      cpkv demo

      cpkv demo --model-family deepseek-v32 --cp-size 8 --requests 3 --index-dtype fp8

      cpkv demo --dtype float64 --prompt-tokens 600 --chunk-size 100 --json
    """
    from cpkv.cli.demo_report import print_report
    from cpkv.cli.demo_run import run_demo

    debug = debug_requested(os.environ)
    if debug:
        print(f"warning: {DEBUG_VARIABLE} is set: synchronising diagnostics are on, this run is slow", file=sys.stderr)
    options = DemoOptions(
        model_family=model_family,
        model=str(model) if model is not None else None,
        dtype=dtype,
        index_dtype=index_dtype or dtype,
        cp_size=cp_size,
        cp_strategy=cp_strategy,
        enable_cp_shared_kv=cp_size > 1 if enable_cp_shared_kv is None else enable_cp_shared_kv,
        no_current_reuse=no_current_reuse,
        page_size=page_size,
        chunk_size=chunk_size,
        num_pages=num_pages,
        transfer=transfer,
        prompt_tokens=prompt_tokens,
        prompt_file=str(prompt_file) if prompt_file is not None else None,
        requests=requests,
        max_new_tokens=max_new_tokens,
        seed=seed,
        dump=str(dump) if dump is not None else None,
        json=json_output,
        debug=debug,
    )
    with tempfile.TemporaryDirectory(prefix="cpkv-demo-") as workspace:
        report = run_demo(options, Path(workspace), progress=lambda text: print(text, file=sys.stderr, flush=True))
    if json_output:
        print(json.dumps(report.as_json()))
    else:
        print_report(report)
    if report.differences:
        for difference in report.differences:
            print(f"difference: {difference}", file=sys.stderr)
        raise typer.Exit(1)
