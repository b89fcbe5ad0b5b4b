"""The recall model of every family in every row format, with longer prompts than the daily test; nightly."""

from __future__ import annotations

from pathlib import Path

import pytest
from decode_runs import check_recall

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=25, suite="models", nightly=True)

pytestmark = pytest.mark.usefixtures("own_temporary_folder")


@pytest.mark.parametrize(
    ("dtype", "index_dtype"),
    [("float32", "float32"), ("float32", "fp8"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8")],
)
@pytest.mark.parametrize("family", ["glm5", "glm52", "deepseek-v32"])
def test_the_recall_model_answers_right(family: str, dtype: str, index_dtype: str, tmp_path: Path) -> None:
    check_recall(tmp_path / "checkpoint", family, dtype, index_dtype, (800, 500))
