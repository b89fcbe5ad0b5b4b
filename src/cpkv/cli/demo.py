"""`cpkv demo`: the main job on real processes, checked against the replicated cache and against transformers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import typer

from cpkv.cli import demo_flags as flags
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
    page_size: flags.PageSize = 64,
    chunk_size: flags.ChunkSize = 2048,
    num_pages: flags.NumPages = None,
    transfer: flags.Transfer = "mooncake",
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
    options = DemoOptions(
        model_family=model_family,
        model=str(model) if model is not None else None,
        dtype=dtype,
        index_dtype=index_dtype or dtype,
        latent_dtype=latent_dtype,
        cp_size=cp_size,
        cp_strategy=cp_strategy,
        enable_cp_shared_kv=cp_size > 1 if enable_cp_shared_kv is None else enable_cp_shared_kv,
        kv_view=kv_view,
        no_current_reuse=no_current_reuse,
        no_prefetch=no_prefetch,
        scratch_bytes=scratch_bytes,
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
        debug=debug_requested(os.environ),
    )
    run_and_print(options)


def run_and_print(options: DemoOptions) -> None:
    """Run, print the table or the JSON, and end with status 1 when something differs."""
    from cpkv.cli.demo_report import print_report
    from cpkv.cli.demo_run import run_demo

    if options.debug:
        print(f"warning: {DEBUG_VARIABLE} is set: synchronising diagnostics are on, this run is slow", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="cpkv-demo-") as workspace:
        report = run_demo(options, Path(workspace), progress=lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        print_report(report)
    for difference in report.differences:
        print(f"difference: {difference}", file=sys.stderr)
    if report.differences:
        raise typer.Exit(1)
