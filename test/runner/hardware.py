"""What this machine has, found without importing torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_NODES = {"cuda": r"nvidia\d+", "npu": r"davinci\d+"}


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, and the device ids of each kind of accelerator."""

    cores: int
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def hw(self) -> tuple[str, ...]:
        """The kinds of tests that this machine can run; `cpu` is always one."""
        return ("cpu", *(kind for kind, ids in self.devices.items() if ids))


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(len(os.sched_getaffinity(0)), {kind: _devices(kind) for kind in VISIBLE})


def _devices(kind: str) -> tuple[str, ...]:
    visible = os.environ.get(VISIBLE[kind])
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    return tuple(str(number) for number in range(_count(kind)))


def _count(kind: str) -> int:
    if kind == "amd":
        nodes = Path("/sys/class/kfd/kfd/topology/nodes")
        # A node without SIMD units is a CPU.
        texts = [path.read_text() for path in nodes.glob("*/properties")] if nodes.is_dir() else []
        return sum(1 for text in texts if (found := re.search(r"^simd_count (\d+)", text, re.M)) and int(found[1]))
    if kind == "cuda" and (listed := _nvidia_smi()):
        return listed
    return sum(1 for path in Path("/dev").iterdir() if re.fullmatch(_NODES[kind], path.name))


def _nvidia_smi() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(1 for line in answer.stdout.splitlines() if line.startswith("GPU ")) if answer.returncode == 0 else 0
