"""Devices and kernels of a worker on a machine without a GPU, and with one that only says it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cpkv.engine.devices import own_devices, take_device
from cpkv.errors import ConfigError
from cpkv.ops import kernels
from cpkv.ops.kernels import KernelNeeds, open_kernels
from cpkv.ops.vendor import deep_gemm, flash_mla
from cpkv.testing.registration import register_cpu_ci
from cpkv.views.side_stream import SideStream

register_cpu_ci(est_time=4, suite="unit")

NEEDS = KernelNeeds("bfloat16", heads=64, latent_width=576, kv_lora_rank=512, index_heads=32, index_dim=128)
GPU = torch.device("cuda", 0)


def test_the_cpu_is_there_and_a_gpu_that_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal says what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert take_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device cuda was given and PyTorch .* finds no GPU .* give --device cpu"):
        take_device("cuda", 0)


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
def test_ranks_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """And each has one of its own only where there are as many."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [take_device("cuda", rank).index for rank in range(6)] == [rank % gpus for rank in range(6)]
    assert [device.index for device in taken] == [rank % gpus for rank in range(6)]
    assert [own_devices(torch.device("cuda"), workers) for workers in range(1, 6)] == [
        workers <= gpus for workers in range(1, 6)
    ]
    assert not own_devices(torch.device("cpu"), 1)


def test_the_cpu_has_plain_torch_alone() -> None:
    """No vendor's kernel runs there."""
    assert open_kernels(torch.device("cpu"), "auto", NEEDS).name == "reference"
    with pytest.raises(ConfigError, match="--kernels vendor was given with --device cpu"):
        open_kernels(torch.device("cpu"), "vendor", NEEDS)


def vendors_say(monkeypatch: pytest.MonkeyPatch, **reasons: str | None) -> None:
    """Let each `why_not` answer so, by module and name; None where nothing is given."""
    for module in (deep_gemm, flash_mla):
        for name in [name for name in vars(module) if name.startswith("why_not") and name != "why_not_hopper"]:
            answer = reasons.get(f"{module.__name__.rpartition('.')[2]}_{name}")
            monkeypatch.setattr(module, name, lambda *_, answer=answer: answer)


def test_vendors_kernels_stand_in_where_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone, both with their forms for decoding, or none."""
    vendors_say(monkeypatch)
    both = open_kernels(GPU, "vendor", NEEDS)
    assert (both.name, both.paged_page_size) == ("vendor", 64)
    assert both.fp8_indexer_scores is deep_gemm.fp8_indexer_scores
    assert both.sparse_mla_rows is flash_mla.sparse_mla_rows
    assert both.sparse_mla_pages is flash_mla.sparse_mla_pages
    ours = open_kernels(GPU, "ours", NEEDS)
    assert (ours.name, ours.paged_page_size) == ("ours", None)
    assert both.fp8_indexer_topk is None and ours.fp8_indexer_topk is not None
    assert both.topk_rows is ours.topk_rows
    vendors_say(monkeypatch, flash_mla_why_not="no heads", flash_mla_why_not_pages="no heads")
    scores_only = open_kernels(GPU, "auto", NEEDS)
    assert scores_only.fp8_indexer_scores is deep_gemm.fp8_indexer_scores
    assert scores_only.sparse_mla_rows is ours.sparse_mla_rows
    assert scores_only.paged_page_size is None
    with pytest.raises(ConfigError, match="not all can run: FlashMLA: no heads; give --kernels auto or ours"):
        open_kernels(GPU, "vendor", NEEDS)


def test_a_model_of_float32_is_not_given_to_a_kernel_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores are fp8 all the same."""
    vendors_say(monkeypatch)
    needs = KernelNeeds("float32", heads=64, latent_width=576, kv_lora_rank=512, index_heads=32, index_dim=128)
    found = open_kernels(GPU, "auto", needs)
    assert found.fp8_indexer_scores is deep_gemm.fp8_indexer_scores
    assert found.sparse_mla_rows is not flash_mla.sparse_mla_rows
    assert found.paged_page_size is None
    with pytest.raises(ConfigError, match="FlashMLA: it takes values of bfloat16, not of float32"):
        open_kernels(GPU, "vendor", needs)


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started on the GPU."""

    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(kernels.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="need Triton, which cannot be imported .* or give --device cpu"):
        open_kernels(GPU, "ours", NEEDS)


def test_without_a_gpu_there_is_no_second_stream() -> None:
    """Work is done at once."""
    done: list[int] = []
    stream = SideStream(torch.device("cpu"))
    stream.run(stream.fork(), lambda: done.append(1))
    stream.join()
    assert done == [1]
