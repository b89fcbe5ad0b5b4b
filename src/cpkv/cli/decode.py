"""`cpkv decode`: a decode worker in a process of its own, for prefill groups on this host or others."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cpkv.cli import demo_flags as flags
from cpkv.cli.addresses import check_port, parse_address, read_secret
from cpkv.cli.end_signals import end_signals
from cpkv.config.debug import debug_requested
from cpkv.config.settings import EngineSettings, check_settings
from cpkv.errors import ConfigError

if TYPE_CHECKING:
    from cpkv.engine.decode_worker import DecodeWorker
    from cpkv.transfer.registry_client import RegistryClient

LOG = logging.getLogger(__name__)
DRAIN_POLL_S = 0.2

RemoteTransfer = Annotated[
    Literal["mooncake", "tcp", "nixl", "shm"],
    typer.Option(help="mooncake, tcp, nixl, or shm (one host).", metavar="NAME", rich_help_panel=flags.GROUP),
]


def decode(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.", metavar="FOLDER", rich_help_panel=flags.MODEL)],
    dtype: flags.Dtype = "float32",
    index_dtype: flags.StoredIndexDtype = None,
    latent_dtype: flags.StoredLatentDtype = None,
    page_size: flags.PageSize = 64,
    num_pages: Annotated[int, typer.Option(help="Pages of its pool.", rich_help_panel=flags.GROUP)] = 1024,
    device: flags.Device = "cpu",
    kernels: flags.KernelsName = "auto",
    transfer: RemoteTransfer = "mooncake",
    host: Annotated[
        str, typer.Option(help="Address to listen on and to be reached at; beyond loopback a secret is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    name: Annotated[str, typer.Option(help="Its name at the registry.")] = "decode",
    registry: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to register.")] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the secret that prefill groups share; else CPKV_SECRET.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port for Prometheus, on --host and unauthenticated; 0 takes a free one.")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(help="How long open requests may go on after SIGTERM.")] = 30.0,
) -> None:
    """Decode for prefill groups that are started with --decode-at or --registry, until SIGTERM or Ctrl-C.

    Then no request is taken any more, and those that are open may end within --drain-seconds.

    Examples:  cpkv decode --model FOLDER --port 7500  |  cpkv demo --model FOLDER --decode-at 127.0.0.1:7500
    """
    settings = EngineSettings(
        num_pages=2,  # of a prefill pool, which there is not
        dtype=dtype,
        index_dtype=index_dtype or dtype,
        latent_dtype=latent_dtype,
        page_size=page_size,
        device=device,
        kernels=kernels,
        transfer=transfer,
        host=host,
        debug=debug_requested(os.environ),
    )
    secret = read_secret(secret_file, os.environ)
    _check(settings, secret, num_pages, drain_seconds)
    check_port(port, "--port")
    check_port(metrics_port or 0, "--metrics-port")
    at = None if registry is None else parse_address(registry, "--registry")
    serve(model, settings, secret, num_pages, port, name, at, metrics_port, drain_seconds)


def _check(settings: EngineSettings, secret: str, num_pages: int, drain_seconds: float) -> None:
    from cpkv.protocol.sealing import check_secret

    check_settings(settings)
    check_secret(settings.host, secret)
    if num_pages < 2:
        raise ConfigError(f"--num-pages is {num_pages}; give 2 or more, of which one is the trash page")
    if not 0 <= drain_seconds <= 3600:
        raise ConfigError(f"--drain-seconds is {drain_seconds}; give 0 to 3600")


def serve(
    model: Path,
    settings: EngineSettings,
    secret: str,
    num_pages: int,
    port: int,
    name: str,
    registry: tuple[str, int] | None,
    metrics_port: int | None,
    drain_seconds: float,
) -> None:
    """Be a decode worker until SIGTERM or SIGINT.

    Raises:
        CpkvError: it cannot start; nothing is left running.
    """
    from cpkv.engine.decode_service import start_decode_worker
    from cpkv.engine.metrics_server import MetricsServer

    logging.getLogger("cpkv").setLevel(logging.INFO)
    with end_signals() as ends, contextlib.ExitStack() as stack:
        workspace = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cpkv-decode-")))
        worker = start_decode_worker(model, workspace, settings, secret, num_pages=num_pages, port=port)
        stack.callback(worker.close)
        bound = worker.ready().port
        if metrics_port is not None:
            metrics = stack.enter_context(
                contextlib.closing(MetricsServer(settings.host, metrics_port, worker.metrics))
            )
            print(f"metrics at http://{settings.host}:{metrics.port}/metrics", flush=True)
        client: RegistryClient | None = None
        if registry is not None:
            client = _register(registry, name, worker, settings.host, bound, secret)
            stack.callback(client.close)
        print(f"decode worker listens on {settings.host}:{bound}", flush=True)
        number = signal.sigwait(ends)
        LOG.info("%s: no request is taken any more, %d are open", signal.Signals(number).name, worker.open_requests)
        worker.stop_admitting("the decode worker is about to end; send it to another one")
        if client is not None:
            client.drain()
        _drain(worker, drain_seconds, ends)


def _register(
    registry: tuple[str, int], name: str, worker: DecodeWorker, host: str, port: int, secret: str
) -> RegistryClient:
    from cpkv.protocol.directory import WorkerRecord
    from cpkv.transfer.registry import draw_instance
    from cpkv.transfer.registry_client import RegistryClient

    record = WorkerRecord(
        name=name, role="decode", instance=draw_instance(), host=host, port=port, pool=worker.pool_description
    )
    return RegistryClient(*registry, record, secret=secret)


def _drain(worker: DecodeWorker, drain_seconds: float, ends: set[signal.Signals]) -> None:
    """Wait until no request is open, the time is over, or a second signal comes."""
    deadline = time.monotonic() + drain_seconds
    while worker.open_requests and time.monotonic() < deadline:
        if signal.sigtimedwait(ends, DRAIN_POLL_S) is not None:
            LOG.warning("a second signal: %d requests are cut off", worker.open_requests)
            return
    if worker.open_requests:
        LOG.warning("%d requests did not end within %.0f s and are cut off", worker.open_requests, drain_seconds)
