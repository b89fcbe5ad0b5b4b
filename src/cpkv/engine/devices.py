"""Where a worker's model and pages are, and the kernels that it uses there.

ranks 0 1 2 3 on 2 GPUs      cuda:0  cuda:1  cuda:0  cuda:1
"""

from __future__ import annotations

import torch

from cpkv.config.names import DeviceName
from cpkv.config.settings import EngineSettings
from cpkv.errors import ConfigError
from cpkv.model.shape import ModelShape
from cpkv.ops.kernels import KernelNeeds, Kernels, open_kernels


def take_device(name: DeviceName, number: int) -> torch.device:
    """The device of a worker, made this thread's own: the GPUs of the host in turn.

    Raises:
        ConfigError: there is no GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda was given and PyTorch {torch.__version__} finds no GPU that it can use; give --device cpu, "
            "or install a PyTorch for CUDA and look at nvidia-smi"
        )
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def own_devices(device: torch.device, workers: int) -> bool:
    """Whether every worker of a group on such devices has a GPU of its own on this host."""
    return device.type == "cuda" and workers <= torch.cuda.device_count()


def model_kernels(shape: ModelShape, settings: EngineSettings, device: torch.device) -> Kernels:
    """The kernels that settings ask for and a model can use. Raises ConfigError when there are none."""
    needs = KernelNeeds(
        dtype=settings.dtype,
        heads=shape.num_heads,
        latent_width=shape.kv_lora_rank + shape.rope_dim,
        kv_lora_rank=shape.kv_lora_rank,
        index_heads=shape.index_heads,
        index_dim=shape.index_dim,
    )
    return open_kernels(device, settings.kernels, needs)
