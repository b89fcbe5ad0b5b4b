"""Checkpoints with block-wise fp8 weights, as DeepSeek-V3.2 and GLM-5 publish them: dequantised, or refused by name.

weight  e4m3 [out, in]      <name>_scale_inv  fp32 [ceil(out / 128), ceil(in / 128)]      value = weight * scale
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cpkv.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"


def dequantise_blocks(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Values [out, in] in `dtype` of e4m3 weights [out, in], one scale per block; rounded once, to `dtype`."""
    rows = scale.to(dtype).repeat_interleave(block[0], dim=0)[: weight.shape[0]]
    return weight.to(dtype) * rows.repeat_interleave(block[1], dim=1)[:, : weight.shape[1]]


@contextlib.contextmanager
def dequantised_folder(folder: Path, config: Any, workspace: Path, dtype: torch.dtype) -> Iterator[Path]:
    """The folder itself, or, where its weights are block fp8, a dequantised copy that lives as long as the context.

    Raises:
        CheckpointError: another quantisation, by its name.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        yield folder
        return
    block = quantisation.get("weight_block_size")
    if quantisation.get("quant_method") != "fp8" or not block:
        raise CheckpointError(
            f"{folder} is quantised by {quantisation.get('quant_method')!r} (weight_block_size {block}); "
            "cpkv reads plain weights and block-wise fp8"
        )
    with tempfile.TemporaryDirectory(dir=workspace, prefix="dequantised-") as name:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        _dequantise(folder, Path(name), (block[0], block[1]), wide)
        yield Path(name)


def _dequantise(folder: Path, target: Path, block: tuple[int, int], dtype: torch.dtype) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del raw["quantization_config"]
    (target / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shutil.copy(index, target)
    files = sorted(folder.glob("*.safetensors"))
    scales = _scales(files)
    for file in files:
        tensors = load_file(file)
        plain = {}
        for name, tensor in tensors.items():
            if name.endswith(SCALE_SUFFIX):
                continue
            if tensor.dtype == torch.float8_e4m3fn:
                scale = scales.get(name + SCALE_SUFFIX)
                if scale is None:
                    raise CheckpointError(
                        f"{file} holds {name} in fp8, and no file of the folder {name + SCALE_SUFFIX}"
                    )
                tensor = dequantise_blocks(tensor, scale, block, dtype)
            plain[name] = tensor
        save_file(plain, target / file.name, metadata={"format": "pt"})


def _scales(files: list[Path]) -> dict[str, torch.Tensor]:
    """Every scale of a folder: a weight and its scale may lie in different files."""
    scales: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            scales |= {name: file.get_tensor(name) for name in file.keys() if name.endswith(SCALE_SUFFIX)}
    return scales
