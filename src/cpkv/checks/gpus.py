"""GPUs: which are there, whether ranks can share their memory, and whose kernels can run."""

from __future__ import annotations

from typing import NamedTuple

from cpkv.checks.result import CheckResult

GPUS = "GPUs"


class GpuFacts(NamedTuple):
    """What a machine says of its GPUs.

    Attributes:
        torch: its version.
        names: of the GPUs that it finds.
        unshared: why memory of the first one cannot be shared between processes; None when it can.
        triton: why Triton cannot be imported; None when it can.
        vendors: package -> why its kernels cannot run; None when they can.
    """

    torch: str
    names: tuple[str, ...]
    unshared: str | None = None
    triton: str | None = None
    vendors: dict[str, str | None] | None = None


def check_gpus(facts: GpuFacts | None = None) -> CheckResult:
    """What `--device cuda` would find."""
    found = facts or _look()
    if not found.names:
        return CheckResult(GPUS, "ok", f"none that PyTorch {found.torch} can use: --device cpu alone")
    shown = f"{len(found.names)} x {found.names[0]}" if len(set(found.names)) == 1 else ", ".join(found.names)
    vendors = [name for name, reason in (found.vendors or {}).items() if reason is None]
    figure = f"{shown}; kernels: {', '.join(['ours', *vendors])}"
    if found.triton is not None:
        return CheckResult(
            GPUS, "warning", f"{shown}; no Triton: {found.triton}", "install a PyTorch for CUDA, which brings Triton"
        )
    if found.unshared is not None:
        remedy = "give each rank a GPU of its own, and another view than unified"
        return CheckResult(GPUS, "warning", f"{figure}; memory is not shared: {found.unshared}", remedy)
    return CheckResult(GPUS, "ok", f"{figure}; memory can be shared between ranks")


def _look() -> GpuFacts:
    # Here and not at the top: all of it is heavy.
    import torch

    if not torch.cuda.is_available():
        return GpuFacts(str(torch.__version__), ())
    from cpkv.ops.kernels import KernelNeeds, triton_kernels, vendor_reasons
    from cpkv.pool.vmm_memory import why_not_vmm

    device = torch.device("cuda", 0)
    # What DeepSeek-V3.2 and GLM-5 need.
    needs = KernelNeeds("bfloat16", heads=64, latent_width=576, kv_lora_rank=512, index_heads=32, index_dim=128)
    try:
        triton_kernels()
        reason = None
    except Exception as error:  # whatever keeps it from running
        reason = str(error)
    return GpuFacts(
        str(torch.__version__),
        tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
        why_not_vmm(device),
        reason,
        vendor_reasons(device, needs),
    )
