"""What a test file needs and costs, stated at its top by one call with literal arguments.

The calls do nothing when the file runs: the runner reads them from the syntax tree without importing the file.
"""

from __future__ import annotations


def register_cpu_ci(
    *, est_time: float, suite: str, alone: bool = False, nightly: bool = False, disabled: str | None = None
) -> None:
    """State that this file runs on the CPU, takes about `est_time` seconds and belongs to `suite`.

    `alone`: it watches the time of processes of its own, so no other file may run beside it.
    """


def register_cuda_ci(
    *, est_time: float, suite: str, num_gpus: int = 1, nightly: bool = False, disabled: str | None = None
) -> None:
    """State that this file needs `num_gpus` NVIDIA GPUs."""


def register_amd_ci(
    *, est_time: float, suite: str, num_gpus: int = 1, nightly: bool = False, disabled: str | None = None
) -> None:
    """State that this file needs `num_gpus` AMD GPUs."""


def register_npu_ci(
    *, est_time: float, suite: str, num_gpus: int = 1, nightly: bool = False, disabled: str | None = None
) -> None:
    """State that this file needs `num_gpus` Ascend devices."""
