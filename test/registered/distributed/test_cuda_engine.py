"""`cpkv demo --device cuda` on real processes: several ranks on one GPU, shared against replicated bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpkv.cli.demo_options import DemoOptions
from cpkv.cli.demo_run import run_demo
from cpkv.testing.registration import register_cuda_ci

register_cuda_ci(est_time=200, suite="distributed", num_gpus=1)

CASES: dict[str, dict[str, Any]] = {
    "unified": {"requests": 2},
    "mixed, 8 ranks": {"cp_size": 8, "kv_view": "mixed", "cp_strategy": "interleave", "transfer": "shm"},
    "full": {"cp_size": 2, "kv_view": "full", "no_current_reuse": True, "model_family": "deepseek-v32"},
    "blocked, packed rows": {"cp_size": 2, "kv_view": "blocked", "latent_dtype": "fp8", "index_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16", "index_dtype": "fp8", "model_family": "glm52", "verify_transfer": True},
}


@pytest.mark.parametrize("case", CASES)
def test_one_copy_on_a_gpu_has_the_bits_of_replicated(tmp_path: Path, case: str) -> None:
    """Answers right, and in fp32 equal to transformers, which computes on the CPU."""
    given = {"cp_size": 4, "transfer": "tcp", "prompt_tokens": 3000, "max_new_tokens": 5, "index_dtype": "float32"}
    options = DemoOptions(**{"device": "cuda", **given, **CASES[case]})
    report = run_demo(options, "", tmp_path, lambda phase: None)
    assert report.differences == []
    assert report.shared.same_bits(report.replicated)
    assert report.recall_right == report.recall_asked > 0
    views = {view for counters in report.shared.counters for view in counters.batches}
    assert views <= {"current", CASES[case].get("kv_view", "unified")}
