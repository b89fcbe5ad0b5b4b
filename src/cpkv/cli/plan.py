"""`cpkv plan`: capacity, scratch and bytes moved, from a config.json alone, on a machine without torch."""

from __future__ import annotations

import json
import sys

from cpkv.cli import plan_flags as flags
from cpkv.cli.sizes import parse_bytes, parse_tokens
from cpkv.config.names import IndexDtype, LatentDtype, WeightDtype

DEFAULT_CONTEXTS = ("32K", "128K", "1M")


def plan(
    model: flags.Model,
    cp_size: flags.CpSize = 8,
    context: flags.Context = None,
    chunk_size: flags.ChunkSize = 8192,
    page_size: flags.PageSize = 64,
    kv_memory: flags.KvMemory = "60GiB",
    latent_dtype: flags.StoredLatentDtype = "fp8",
    index_dtype: flags.StoredIndexDtype = "fp8",
    kv_view: flags.KvViewName = "auto",
    scratch_bytes: flags.ScratchBytes = None,
    no_prefetch: flags.NoPrefetch = False,
    plot: flags.Plot = None,
    json_output: flags.JsonOutput = False,
) -> None:
    """Tell how many tokens a KV memory holds, and what each view of a shared cache holds and moves.

    The numbers are those of the engine's allocator and planner; nothing is started, and torch is not needed.

    Examples:  cpkv plan glm-5.2  |  cpkv plan ./checkpoint --cp-size 4 --context 256K --kv-memory 40GiB --plot plan.png
    """
    from cpkv.cache.capacity_planner import CapacityPlanner
    from cpkv.cli.plan_report import as_json, print_plan
    from cpkv.config.settings import EngineSettings
    from cpkv.layout.model_numbers import model_numbers

    shared = cp_size > 1
    settings = EngineSettings(
        num_pages=1,
        enable_cp_shared_kv=shared,
        cp_size=cp_size,
        page_size=page_size,
        chunk_size=chunk_size,
        dtype=model_dtype(latent_dtype, index_dtype),
        latent_dtype=latent_dtype,
        index_dtype=index_dtype,
        kv_view=kv_view,
        prefetch=not no_prefetch,
        scratch_bytes=None if scratch_bytes is None else parse_bytes(scratch_bytes, "--scratch-bytes"),
    )
    contexts = tuple(parse_tokens(text, "--context") for text in context or DEFAULT_CONTEXTS)
    planner = CapacityPlanner(model_numbers(model), settings, parse_bytes(kv_memory, "--kv-memory"))
    report = planner.report(contexts)
    if plot is not None:
        from cpkv.cli.plan_plot import draw_plan

        draw_plan(planner, model, contexts, plot)
        print(f"plot written to {plot}", file=sys.stderr)
    if json_output:
        print(json.dumps(as_json(report, model)))
    else:
        print_plan(report, model)


def model_dtype(latent_dtype: LatentDtype, index_dtype: IndexDtype) -> WeightDtype:
    """The dtype of a model that stores such rows; where both are fp8 it makes no difference."""
    if latent_dtype != "fp8":
        return latent_dtype
    return index_dtype if index_dtype != "fp8" else "bfloat16"
