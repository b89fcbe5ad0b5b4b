"""`cpkv demo`: the main job on real processes, checked against the replicated cache and against transformers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

from cpkv.cli import demo_flags as flags
from cpkv.cli.addresses import read_secret
from cpkv.cli.demo_options import DemoOptions
from cpkv.config.debug import DEBUG_VARIABLE, debug_requested


def demo(
    model_family: flags.ModelFamily = "glm5",
    model: flags.Model = None,
    dtype: flags.Dtype = "float32",
    index_dtype: flags.StoredIndexDtype = None,
    latent_dtype: flags.StoredLatentDtype = None,
    cp_size: flags.CpSize = 4,
    cp_strategy: flags.CpStrategy = "zigzag",
    enable_cp_shared_kv: flags.EnableCpSharedKv = None,
    kv_view: flags.KvViewName = "auto",
    no_current_reuse: flags.NoCurrentReuse = False,
    no_prefetch: flags.NoPrefetch = False,
    scratch_bytes: flags.ScratchBytes = None,
    device: flags.Device = "cpu",
    kernels: flags.KernelsName = "auto",
    page_size: flags.PageSize = 64,
    chunk_size: flags.ChunkSize = 2048,
    num_pages: flags.NumPages = None,
    transfer: flags.Transfer = "mooncake",
    no_overlap: flags.NoOverlap = False,
    verify_transfer: flags.VerifyTransfer = False,
    host: flags.Host = "127.0.0.1",
    decode_at: flags.DecodeAt = None,
    registry: flags.Registry = None,
    secret_file: flags.SecretFile = None,
    prompt_tokens: flags.PromptTokens = 4000,
    prompt_file: flags.PromptFile = None,
    requests: flags.Requests = 1,
    max_new_tokens: flags.MaxNewTokens = 16,
    seed: flags.Seed = 0,
    dump: flags.Dump = None,
    json_output: flags.JsonOutput = False,
) -> None:
    """Prefill over ranks that share one KV cache, hand over to a decode worker, compare with the replicated cache.

    In float32 and float64 an independent implementation is asked too. Exit status: 1 when anything differs, 2 when it
    could not run.

    Examples:  cpkv demo  |  cpkv demo --model-family deepseek-v32 --cp-size 8 --requests 3 --index-dtype fp8
    """
    # Before anything else is local: flags and options have the same names.
    arguments = dict(locals())
    given: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()
    }
    options = DemoOptions(
        **{name: value for name, value in given.items() if name in DemoOptions.__struct_fields__}
        | {
            "index_dtype": index_dtype or dtype,
            "enable_cp_shared_kv": cp_size > 1 if enable_cp_shared_kv is None else enable_cp_shared_kv,
            "json": json_output,
            "debug": debug_requested(os.environ),
        }
    )
    run_and_print(options, read_secret(secret_file, os.environ))


def run_and_print(options: DemoOptions, secret: str) -> None:
    """Run, print the table or the JSON, and end with status 1 when something differs."""
    from cpkv.cli.demo_report import print_report
    from cpkv.cli.demo_run import run_demo

    if options.debug:
        print(f"warning: {DEBUG_VARIABLE} is set: synchronising diagnostics are on, this run is slow", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="cpkv-demo-") as workspace:
        report = run_demo(options, secret, Path(workspace), lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        print_report(report)
    for difference in report.differences:
        print(f"difference: {difference}", file=sys.stderr)
    if report.differences:
        raise typer.Exit(1)
