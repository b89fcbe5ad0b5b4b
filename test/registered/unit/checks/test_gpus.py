"""What `cpkv check` says of GPUs, from what a machine would say."""

from __future__ import annotations

import pytest
import torch

from cpkv.checks.gpus import GpuFacts, check_gpus
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

H200 = GpuFacts("2.11", ("NVIDIA H200",) * 2, vendors={"DeepGEMM": None, "FlashMLA": "not installed"})


@pytest.mark.parametrize(
    ("facts", "state", "figure"),
    [
        (GpuFacts("2.13+cpu", ()), "ok", "none that PyTorch 2.13+cpu can use: --device cpu alone"),
        (H200, "ok", "2 x NVIDIA H200; kernels: ours, DeepGEMM; memory can be shared between ranks"),
        (H200._replace(names=("A", "B"), vendors={}), "ok", "A, B; kernels: ours; memory can be shared between ranks"),
        (H200._replace(triton="no module"), "warning", "2 x NVIDIA H200; no Triton: no module"),
        (
            H200._replace(unshared="no descriptors"),
            "warning",
            "2 x NVIDIA H200; kernels: ours, DeepGEMM; memory is not shared: no descriptors",
        ),
    ],
)
def test_what_is_there_and_what_to_do(facts: GpuFacts, state: str, figure: str) -> None:
    """A warning comes with a remedy."""
    found = check_gpus(facts)
    assert (found.state, found.figure, bool(found.remedy)) == (state, figure, state == "warning")


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch sees it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpus().figure == f"none that PyTorch {torch.__version__} can use: --device cpu alone"
