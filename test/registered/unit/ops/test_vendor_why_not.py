"""What vendors' modules say where they cannot run, with packages made for the test and a GPU that is not there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cpkv.ops.vendor import deep_gemm, flash_mla
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

GPU = torch.device("cuda")
PACKAGES = ("deep_gemm", "flash_mla")
WHOLE = {
    "deep_gemm": """
__version__ = "0.1.2"
def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0): ...
def get_num_sms(): ...
def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None): ...
def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, indices=None
): ...
""",
    "flash_mla": """
__version__ = "1.0.0"
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False): ...
def get_mla_metadata(*args, **kwargs): ...
def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, use_legacy=False,
): ...
""",
}


def why_nots(package: str) -> tuple[str | None, str | None]:
    """Of the prefill form and of the decode form, for shapes that both take."""
    if package == "deep_gemm":
        return deep_gemm.why_not(GPU, 64, 128), deep_gemm.why_not_paged(GPU, 64, 128, 64)
    return flash_mla.why_not(GPU, 64, 576, 512), flash_mla.why_not_pages(GPU, 64, 576, 512)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Makes a package of some source, in front of all others; a Hopper GPU seems to be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: sys.modules.pop(name, None) for name in PACKAGES}

    def make(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()

    yield make
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_with_all_that_is_called_can_run(install: Callable[[str, str], None], package: str) -> None:
    install(package, WHOLE[package])
    assert why_nots(package) == (None, None)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_not_installed(
    install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_nots(package) == (f"the package {package} is not installed",) * 2


@pytest.mark.parametrize("package", PACKAGES)
def test_where_there_is_no_hopper_gpu_the_package_is_not_imported(
    install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    install(package, "raise SystemExit('imported')")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert why_nots(package) == ("it is called for Hopper GPUs here, and the memory lies on cuda",) * 2
    assert package not in sys.modules


def test_memory_of_the_cpu(install: Callable[[str, str], None]) -> None:
    for package in PACKAGES:
        install(package, WHOLE[package])
    cpu = torch.device("cpu")
    reasons = deep_gemm.why_not_paged(cpu, 64, 128, 64), flash_mla.why_not_pages(cpu, 64, 576, 512)
    assert reasons == ("it is called for Hopper GPUs here, and the memory lies on cpu",) * 2


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_library_that_is_missing", "ModuleNotFoundError: No module named 'a_library_that_is_missing'"),
        ("raise ImportError('libcuda.so.1: cannot open')", "ImportError: libcuda.so.1: cannot open"),
        ("raise OSError('undefined symbol: _ZN3c10')", "OSError: undefined symbol: _ZN3c10"),
        ("assert False, 'no compiler'", "AssertionError: no compiler"),
    ],
)
def test_a_package_that_cannot_be_imported(
    install: Callable[[str, str], None], package: str, source: str, reason: str
) -> None:
    install(package, source)
    assert why_nots(package) == (f"the package {package} cannot be imported: {reason}",) * 2


@pytest.mark.parametrize(
    ("package", "function", "form"),
    [
        ("deep_gemm", "fp8_mqa_logits", 0),
        ("deep_gemm", "get_num_sms", 1),
        ("deep_gemm", "get_paged_mqa_logits_metadata", 1),
        ("deep_gemm", "fp8_paged_mqa_logits", 1),
        ("flash_mla", "flash_mla_sparse_fwd", 0),
        ("flash_mla", "get_mla_metadata", 1),
        ("flash_mla", "flash_mla_with_kvcache", 1),
    ],
)
def test_a_function_that_is_missing_or_takes_something_else(
    install: Callable[[str, str], None], package: str, function: str, form: int
) -> None:
    """The other form still runs. A compiled function that does not say what it takes is believed."""
    version = "0.1.2" if package == "deep_gemm" else "1.0.0"
    changes = {
        f"del {function}": f"{package} {version} has no function {function}",
        f"{function} = None": f"{package} {version} has no function {function}",
        f"def {function}(*, one): ...": f"{function} of {package} {version} takes other arguments than ours: ",
        f"{function} = min": None,
    }
    for change, reason in changes.items():
        sys.modules.pop(package, None)
        install(package, f"{WHOLE[package]}\n{change}\n# {len(change)}\n")
        found = why_nots(package)
        assert found[1 - form] is None
        assert (found[form] is None) if reason is None else found[form].startswith(reason), f"{change}: {found}"


@pytest.mark.parametrize(
    ("package", "old", "new", "reason"),
    [
        ("flash_mla", "topk_length=None, use_legacy=False", "topk_length=None", "unexpected keyword .*'use_legacy'"),
        ("flash_mla", "is_fp8_kvcache=None, ", "", "unexpected keyword .*'is_fp8_kvcache'"),
        ("deep_gemm", "num_sms, indices=None", "num_sms, indices", "missing a required .*'indices'"),
        ("deep_gemm", "schedule_meta, max_context_len", "max_context_len", "too many positional|multiple values"),
    ],
)
def test_a_parameter_that_is_missing_or_new_is_named(
    install: Callable[[str, str], None], package: str, old: str, new: str, reason: str
) -> None:
    assert WHOLE[package].count(old) == 1
    install(package, WHOLE[package].replace(old, new))
    found = [text for text in why_nots(package) if text is not None]
    assert len(found) == 1
    with pytest.raises(AssertionError, match=f"takes other arguments than ours: .*({reason})"):
        raise AssertionError(found[0])


def test_shapes_that_no_kernel_takes(install: Callable[[str, str], None]) -> None:
    for package in PACKAGES:
        install(package, WHOLE[package])
    assert deep_gemm.why_not(GPU, 16, 128) == "it takes 32 or 64 heads of 128 values, not 16 of 128"
    assert deep_gemm.why_not_paged(GPU, 64, 64, 64) == "it takes 32 or 64 heads of 128 values, not 64 of 64"
    assert deep_gemm.why_not_paged(GPU, 64, 128, 16) == "it takes pages of 64 tokens, not 16"
    assert flash_mla.why_not(GPU, 48, 576, 512) == "it takes a multiple of 64 heads, not 48"
    assert flash_mla.why_not(GPU, 256, 576, 512) is None
    assert flash_mla.why_not_pages(GPU, 256, 576, 512) == "it takes 64 or 128 heads, not 256"
    wrong = "it takes rows of 576 values, 512 latent, not 128 and 64"
    assert flash_mla.why_not(GPU, 64, 128, 64) == flash_mla.why_not_pages(GPU, 64, 128, 64) == wrong
