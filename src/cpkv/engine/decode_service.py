"""A decode worker in this process, from a checkpoint folder on; a cluster starts one in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

from cpkv.config.settings import EngineSettings
from cpkv.engine.commands import StartDecode
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.errors import TransferError
from cpkv.model.checkpoint import prepare_weights
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.transfer.backends import open_backend_of, why_not


def start_decode_worker(
    checkpoint: Path, workspace: Path, settings: EngineSettings, secret: str, *, num_pages: int, port: int
) -> DecodeWorker:
    """Load the model and make the pool; `DecodeWorker.ready` begins to listen.

    Args:
        checkpoint: the model's folder.
        workspace: folder for prepared weights.
        settings: row formats, page size, back end, address.
        secret: shared with prefill groups.
        num_pages: pages of the pool, its trash page included.
        port: to listen on; 0 takes a free one.

    Raises:
        CheckpointError: the folder is no checkpoint that can be served.
        TransferError: the back end cannot run here, or the port is taken.
    """
    reason = why_not(settings.transfer)
    if reason is not None:
        raise TransferError(reason)
    prepared = workspace / "weights.safetensors"
    model = prepare_weights(checkpoint, prepared, torch_dtype(settings.dtype))
    start = StartDecode(
        settings=settings,
        checkpoint=str(checkpoint),
        prepared=str(prepared),
        model=model,
        secret=secret,
        num_pages=num_pages,
        port=port,
        threads=len(os.sched_getaffinity(0)),
        shuffle_seed=None,
    )
    return DecodeWorker(start, lambda: open_backend_of(settings, secret))
