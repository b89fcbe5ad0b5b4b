"""A checkpoint folder: what it holds, whether it is sound, and its weights prepared for the ranks of a host.

folder (safetensors, split experts) --load once--> prepared file (one safetensors, names as in memory)
                                                      |  mmap, private, never written
                                 rank 0  rank 1  rank 2  rank 3      share its pages
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from cpkv.errors import CheckpointError
from cpkv.layout.model_numbers import DSA_MODEL_TYPES
from cpkv.model.block_fp8 import dequantised_folder
from cpkv.model.config_checks import check_config

# How and by what a checkpoint was made says nothing about what it computes.
UNRELATED_SETTINGS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "quantization_config")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars for a while, and put back what was set."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def read_config(folder: Path) -> Any:
    """The transformers configuration of a checkpoint folder.

    Raises:
        CheckpointError: no such folder, no config.json, damaged JSON, or an architecture without DSA.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no config.json; give a folder in Hugging Face's layout"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; fetch the file again") from error
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if model_type not in DSA_MODEL_TYPES:
        raise CheckpointError(
            f"{path} says model_type {model_type!r}, which is not supported; cpkv serves models with DeepSeek Sparse "
            f"Attention of type {' or '.join(DSA_MODEL_TYPES)}"
        )
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many types for a bad value
        raise CheckpointError(f"{path} does not describe a {model_type} model: {error}") from error
    check_config(config, str(path))
    return config


def check_weights(folder: Path) -> None:
    """Open every weight file's header.

    Raises:
        CheckpointError: no safetensors file, one that the index names is missing, or one that is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(
                {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged: {error}; fetch the file again") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; give a folder with weights")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing although {index.name} names it; fetch it again")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged: {error}; fetch the file again") from error


def prepare_weights(folder: Path, target: Path, dtype: torch.dtype) -> str:
    """Load a checkpoint once and write it in the form in which every rank maps it.

    Args:
        folder: the checkpoint.
        target: the file to write, safetensors.
        dtype: of the weights; those that the model keeps in float32 stay so.

    Returns:
        A fingerprint of configuration and weights: two workers that serve one model have the same.

    Raises:
        CheckpointError: the folder cannot be served; the message names the file or the tensor.
    """
    config = read_config(folder)
    check_weights(folder)
    from transformers import AutoModelForCausalLM

    with dequantised_folder(folder, config, target.parent, dtype) as plain, quiet_transformers():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                plain,
                dtype=dtype,
                experts_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
        except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"the weights in {folder} could not be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of a {config.model_type} model, the first is {missing[0]}; "
            "the checkpoint is incomplete"
        )
    if report["mismatched_keys"]:
        name, theirs, ours = sorted(report["mismatched_keys"])[0]
        raise CheckpointError(
            f"{folder} holds {name} of shape {list(theirs)}, and config.json asks for {list(ours)}; "
            "config and weights are of different models"
        )
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    try:
        save_file(state, target, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        needed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        raise CheckpointError(
            f"the {needed} bytes of prepared weights could not be written to {target}: {error}; "
            "make room there, or set TMPDIR to a larger disk"
        ) from error
    return _fingerprint(config, state)


def _fingerprint(config: Any, state: dict[str, torch.Tensor]) -> str:
    """SHA-256 over what the model computes: every setting, and every weight by its name, dtype and bytes."""
    settings = {name: value for name, value in config.to_dict().items() if name not in UNRELATED_SETTINGS}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name in sorted(state):
        digest.update(f"{name} {state[name].dtype} {tuple(state[name].shape)}".encode())
        digest.update(state[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def map_weights(prepared: Path) -> dict[str, torch.Tensor]:
    """The prepared tensors, mapped from the file: ranks of one host share the pages."""
    return load_file(prepared)
