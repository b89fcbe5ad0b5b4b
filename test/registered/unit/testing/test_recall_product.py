"""The recall model at lengths that the daily tests leave out; nightly."""

from __future__ import annotations

from pathlib import Path

import pytest
from recall_runs import PLANTED, answer, assert_right, check_planted, load, prompt_of

from cpkv.testing.recall_prompt import RECALL_FAMILIES
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="unit", nightly=True)


@pytest.mark.parametrize("family", RECALL_FAMILIES)
@pytest.mark.parametrize(("tokens", "page_size"), [(40, 8), (193, 64), (600, 64), (1000, 1), (4000, 64)])
def test_every_answer_is_right(tmp_path: Path, family: str, tokens: int, page_size: int) -> None:
    prompt = prompt_of(family, tokens, page_size)
    assert_right(answer(load(tmp_path, family, prompt), prompt), prompt)


@pytest.mark.parametrize("tokens", [600, 1000])
@pytest.mark.parametrize(("family", "fault"), PLANTED)
def test_a_planted_fault_leaves_no_answer_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, fault: str, tokens: int
) -> None:
    check_planted(family, fault, tokens, tmp_path, monkeypatch)
