"""The demo's steps: inputs, workers, the shared run, the replicated run, dumps, the reference."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from cpkv.cli.addresses import parse_address
from cpkv.cli.demo_inputs import DemoInputs, demo_inputs
from cpkv.cli.demo_options import DemoOptions
from cpkv.cli.demo_reference import Reference, compare_with_reference
from cpkv.cli.demo_report import DemoReport
from cpkv.config.settings import EngineSettings
from cpkv.engine.cluster import Cluster, RemoteDecode
from cpkv.engine.commands import Trace
from cpkv.engine.generation import GenerationResult, generate
from cpkv.engine.request import check_request
from cpkv.engine.trace_files import read_trace
from cpkv.errors import ConfigError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.pool_geometry import local_pages
from cpkv.model.checkpoint import read_config
from cpkv.model.shape import ModelShape
from cpkv.transfer.registry_client import RegistryClient

Progress = Callable[[str], None]
FIND_TIMEOUT_S = 10.0


def enough_pages(options: DemoOptions, inputs: DemoInputs) -> int:
    """Logical pages that hold all prompts at once, reserved ones included, a multiple of cp_size."""
    placement = PagePlacement(options.page_size, options.cp_size)
    pages = sum(placement.pages_for(len(request.token_ids)) for request in inputs.requests)
    return (-(-pages // options.cp_size) + 1) * options.cp_size


def enough_decode_pages(options: DemoOptions, inputs: DemoInputs) -> int:
    """Pages of a decode worker that holds all requests at once, its trash page included."""
    placement = PagePlacement(options.page_size, 1)
    return 1 + sum(placement.pages_for(len(request.token_ids) + request.max_new_tokens) for request in inputs.requests)


def run_demo(options: DemoOptions, secret: str, workspace: Path, progress: Progress) -> DemoReport:
    """Run everything; workers have ended when this returns or raises.

    Args:
        options: of the run.
        secret: shared with a decode worker elsewhere; empty where there is none.
        workspace: folder for what is made.
        progress: told the name of each phase as it begins.

    Raises:
        CpkvError: it could not run.
    """
    started = time.perf_counter()
    options.check()
    dump = _dump_folder(options)
    inputs = demo_inputs(options, workspace)
    num_pages = enough_pages(options, inputs) if options.num_pages is None else options.num_pages
    settings = options.settings(num_pages)
    _check_inputs(settings, inputs)
    remote = find_decode_worker(options, secret)
    traced = Trace(
        folder=str(_new_folder(workspace / "trace")),
        want_logits=dump is not None,
        want_choices=options.dtype == "float32" and inputs.model != "recall" and remote is None,
    )
    trace = traced if traced.want_logits or traced.want_choices else None
    progress(f"starting {options.cp_size} prefill ranks{'' if remote else ' and a decode worker'} ({options.transfer})")
    with Cluster(
        settings,
        inputs.checkpoint,
        decode_pages=enough_decode_pages(options, inputs),
        shuffle_seed=options.seed,
        remote_decode=remote,
    ) as cluster:
        start_seconds = time.perf_counter() - started

        def run(shared: bool, name: str) -> GenerationResult:
            return generate(
                cluster,
                inputs.requests,
                shared=shared,
                trace=trace if name == "shared" else None,
                dump_pool=dump / "decode_pool.safetensors" if dump is not None and name == "shared" else None,
                progress=lambda phase: progress(f"{name}: {phase}"),
            )

        shared = run(settings.enable_cp_shared_kv, "shared")
        replicated = run(False, "replicated")
    if dump is not None:
        _write_dump(dump, inputs, shared, Path(traced.folder))
    reference = _reference(options, inputs, shared, Path(traced.folder) if traced.want_choices else None, progress)
    return DemoReport(
        options=msgspec.structs.replace(options, num_pages=num_pages),
        inputs=inputs,
        shared=shared,
        replicated=replicated,
        reference=reference,
        start_seconds=start_seconds,
        total_seconds=time.perf_counter() - started,
    )


def find_decode_worker(options: DemoOptions, secret: str) -> RemoteDecode | None:
    """The decode worker elsewhere that options name; None where this run starts its own.

    Raises:
        TransferError: the registry cannot be reached, or no decode worker there takes requests.
    """
    if options.decode_at is not None:
        return RemoteDecode(*parse_address(options.decode_at, "--decode-at"), secret)
    if options.registry is None:
        return None
    with closing(RegistryClient(*parse_address(options.registry, "--registry"), secret=secret)) as client:
        worker = client.wait_for("decode", 1, FIND_TIMEOUT_S)[0]
    return RemoteDecode(worker.host, worker.port, secret)


def _check_inputs(settings: EngineSettings, inputs: DemoInputs) -> None:
    """Refuse what cannot be served before any worker is started."""
    local_pages(settings.num_pages, PagePlacement(settings.page_size, settings.cp_size))
    shape = ModelShape.from_config(read_config(inputs.checkpoint), settings.latent_norm_eps)
    for request in inputs.requests:
        check_request(request, shape, settings)


def _reference(
    options: DemoOptions, inputs: DemoInputs, result: GenerationResult, trace_folder: Path | None, progress: Progress
) -> Reference | None:
    """None in bfloat16 and with fp8 rows or keys, where no other implementation rounds alike."""
    stored = (options.latent_dtype or options.dtype, options.index_dtype)
    if options.dtype == "bfloat16" or stored != (options.dtype, options.dtype):
        return None
    progress("reference: " + ("float64" if options.dtype == "float64" else "transformers"))
    return compare_with_reference(inputs.checkpoint, options.dtype, inputs.requests, result, trace_folder)


def _new_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _dump_folder(options: DemoOptions) -> Path | None:
    if options.dump is None:
        return None
    try:
        return _new_folder(Path(options.dump))
    except OSError as error:
        raise ConfigError(
            f"--dump {options.dump} cannot be made: {error}; give a folder that can be written"
        ) from error


def _write_dump(dump: Path, inputs: DemoInputs, result: GenerationResult, trace_folder: Path) -> None:
    """Prompts, checkpoint, and logits of every prompt position and decoded token; the pool is there already."""
    tensors: dict[str, torch.Tensor] = {}
    for request in inputs.requests:
        name = request.request_id
        trace = read_trace(trace_folder, name, len(request.token_ids))
        tensors[f"prompt_ids.{name}"] = torch.tensor(request.token_ids)
        tensors[f"new_tokens.{name}"] = torch.tensor(result.tokens[name])
        if trace.logits is not None:
            tensors[f"prompt_logits.{name}"] = trace.logits
        tensors[f"decoded_logits.{name}"] = result.logits[name]
    save_file(tensors, dump / "logits.safetensors")
    target = dump / "checkpoint"
    if target.resolve() != inputs.checkpoint.resolve():
        shutil.copytree(inputs.checkpoint, target, dirs_exist_ok=True)
