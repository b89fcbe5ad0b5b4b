"""The flags of `cpkv demo`, the prompts that it makes, and what it counts as a difference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from cpkv.cli.demo_inputs import DemoInputs, demo_inputs, request_lengths
from cpkv.cli.demo_options import DemoOptions
from cpkv.cli.demo_reference import Reference
from cpkv.cli.demo_report import DemoReport, print_report
from cpkv.cli.main import make_app
from cpkv.engine.commands import CountersAre
from cpkv.engine.generation import GenerationResult
from cpkv.engine.prefill import PrefillReport
from cpkv.engine.request import Request
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

# Frozen: a flag that is added, renamed or dropped, or another default, is a change of the command that people use.
FLAGS: dict[str, Any] = {
    "model_family": "glm5",
    "model": None,
    "dtype": "float32",
    "index_dtype": None,
    "cp_size": 4,
    "cp_strategy": "zigzag",
    "enable_cp_shared_kv": None,
    "latent_dtype": None,
    "kv_view": "auto",
    "no_current_reuse": False,
    "no_prefetch": False,
    "scratch_bytes": None,
    "device": "cpu",
    "kernels": "auto",
    "page_size": 64,
    "chunk_size": 2048,
    "num_pages": None,
    "transfer": "mooncake",
    "no_overlap": False,
    "verify_transfer": False,
    "host": "127.0.0.1",
    "decode_at": None,
    "registry": None,
    "secret_file": None,
    "prompt_tokens": 4000,
    "prompt_file": None,
    "requests": 1,
    "max_new_tokens": 16,
    "seed": 0,
    "dump": None,
    "json": False,
}
CHOICES = {
    "model_family": ("glm5", "glm52", "deepseek-v32"),
    "dtype": ("float64", "float32", "bfloat16"),
    "index_dtype": ("float64", "float32", "bfloat16", "fp8"),
    "cp_strategy": ("zigzag", "interleave"),
    "device": ("cpu", "cuda"),
    "kernels": ("auto", "ours", "vendor"),
    "transfer": ("mooncake", "tcp", "shm", "nixl", "inprocess"),
}


def flags() -> dict[str, Any]:
    """Flag, in the spelling of the JSON -> parameter of the command."""
    command = get_command(make_app())
    parameters = command.commands["demo"].params  # type: ignore[attr-defined]
    return {parameter.opts[0].removeprefix("--").replace("-", "_"): parameter for parameter in parameters}


def help_text(*words: str, columns: int = 160) -> str:
    shown = CliRunner().invoke(make_app(), [*words, "--help"], env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert shown.exit_code == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)


def test_flags_and_their_defaults() -> None:
    assert {name: parameter.default for name, parameter in flags().items()} == FLAGS
    text = help_text("demo", columns=240)
    for name, choices in CHOICES.items():
        flag = "--" + name.replace("_", "-")
        listed = re.escape("|".join(choices)) + "|" + ".* or .*".join(choices)
        assert re.search(rf"{flag} .*({listed})", text), f"{flag} takes {choices}"


def test_help_names_every_flag_and_groups_them() -> None:
    text = help_text("demo")
    assert len(FLAGS) < 40
    for name, parameter in flags().items():
        for flag in (*parameter.opts, *parameter.secondary_opts):
            assert re.search(rf"{flag}\b", text), f"{flag} is not in the help"
        assert parameter.help, f"{name} has no help"
        assert len(parameter.help) < 100
    for group in ("Model", "Prefill group and pools", "A decode worker elsewhere", "Requests", "Output"):
        assert group in text, "options are grouped"
    assert "cpkv demo --model-family" in text, "an example"
    assert "demo" in help_text()


def test_help_can_be_read_on_80_columns() -> None:
    assert "\N{HORIZONTAL ELLIPSIS}" not in help_text("demo", columns=80)


def test_the_version_is_printed() -> None:
    from cpkv import __version__

    assert CliRunner().invoke(make_app(), ["--version"]).stdout == f"cpkv {__version__}\n"


def test_config_keys_are_the_flags() -> None:
    keys = set(report_of().as_json()["config"])
    # A report does not tell where a secret lies.
    reported = FLAGS.keys() - {"secret_file"}
    assert keys == reported | {"debug"}
    assert {name: getattr(DemoOptions(), name) for name in reported if name != "index_dtype"} == {
        name: default
        for name, default in (FLAGS | {"enable_cp_shared_kv": True}).items()
        if name in reported and name != "index_dtype"
    }


# Prompts.


@pytest.mark.parametrize("tokens", [1, 2, 7, 4000])
@pytest.mark.parametrize("requests", [1, 2, 3, 64])
def test_requests_have_different_lengths_where_they_can(tokens: int, requests: int) -> None:
    lengths = request_lengths(tokens, requests)
    assert lengths[0] == tokens
    assert lengths == sorted(lengths, reverse=True)
    assert min(lengths) >= max(1, tokens // 2)
    assert len(lengths) == requests
    if tokens >= 2 * requests:
        assert len(set(lengths)) == requests


def test_prompts_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def prompts(seed: int) -> list[tuple[int, ...]]:
        options = DemoOptions(prompt_tokens=500, requests=2, seed=seed, page_size=16)
        return [request.token_ids for request in demo_inputs(options, tmp_path / str(seed)).requests]

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)
    assert [len(ids) for ids in prompts(1)] == [500, 375]


@pytest.mark.parametrize("family", ["glm5", "glm52", "deepseek-v32"])
@pytest.mark.parametrize(("tokens", "new_tokens"), [(4000, 16), (200, 3), (60, 40)])
def test_the_recall_model_is_asked_for_fewer_tokens_than_delta(
    tmp_path: Path, family: str, tokens: int, new_tokens: int
) -> None:
    inputs = demo_inputs(
        DemoOptions(model_family=family, prompt_tokens=tokens, max_new_tokens=new_tokens, page_size=8),
        tmp_path,  # type: ignore[arg-type]
    )
    delta = min(100 if family == "deepseek-v32" else 1000, tokens // 4)
    assert inputs.model == "recall"
    assert [len(answers) for answers in inputs.answers] == [min(new_tokens, delta - 1)]


def test_no_page_to_ask_means_the_hot_model(tmp_path: Path) -> None:
    # Delta is 16, and no whole page of 64 lies between 32 and the last of 64 tokens.
    inputs = demo_inputs(DemoOptions(prompt_tokens=64), tmp_path)
    assert (inputs.model, inputs.answers) == ("hot", ())


# Differences.


def result_of(tokens: list[int], first_logit: float = 0.5) -> GenerationResult:
    logits = torch.full((len(tokens), 4), first_logit)
    prefill = PrefillReport(sent_pages=[3, 2], sent_bytes=[300, 200])
    counters = [CountersAre({"current": 1, "full": 2}, 10 * rank, 7, 1000 + rank, 0.5, 0.25) for rank in range(2)]
    seconds = {"prefill": 1.0, "transfer": 0.5, "decode": 2.0}
    return GenerationResult({"r": tokens}, {"r": logits}, {"r": ("ab",)}, prefill, counters, 600, seconds)


def report_of(
    shared: GenerationResult | None = None,
    replicated: GenerationResult | None = None,
    reference: Reference | None = None,
    answers: tuple[int, ...] = (),
) -> DemoReport:
    tokens = [5, 6, 7]
    return DemoReport(
        options=DemoOptions(cp_size=2, num_pages=12, page_size=16),
        inputs=DemoInputs(Path("checkpoint"), "recall", (Request("r", (1, 2, 3), 3),), (answers,) if answers else ()),
        shared=shared or result_of(tokens),
        replicated=replicated or result_of(tokens),
        reference=reference,
        start_seconds=1.0,
        total_seconds=9.0,
    )


def reference_of(tokens: list[int], difference: float = 0.0, decided: list[int] | None = None) -> Reference:
    return Reference([tokens], difference, [decided or []], 1e-4, "transformers")


def test_nothing_differs() -> None:
    report = report_of(reference=reference_of([5, 6, 7], 9.9e-5), answers=(5, 6))
    assert report.differences == []
    assert report.tokens_equal
    assert (report.recall_right, report.recall_asked) == (2, 2)
    assert json.loads(json.dumps(report.as_json()))["scratch_bytes_per_rank"] == 1001


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (report_of(replicated=result_of([5, 6, 7], 0.5000001)), "the shared run differs from the replicated run"),
        (report_of(replicated=result_of([5, 6, 8])), "the shared run differs from the replicated run"),
        (report_of(answers=(5, 9)), "the recall model gave 1 of 2 answers"),
        (
            report_of(reference=reference_of([5, 6, 7], 1.1e-4)),
            "logits differ from transformers by 0.00011, over 0.0001",
        ),
        (report_of(reference=reference_of([5, 6, 7], float("nan"))), "logits differ from transformers by nan"),
        (report_of(reference=reference_of([5, 6, 8], 0.0, [2])), r"output tokens \[2\] differ from transformers"),
    ],
)
def test_each_difference_is_told(report: DemoReport, words: str) -> None:
    assert len(report.differences) == 1
    assert re.search(words, report.differences[0])


def test_a_token_that_was_not_decided_may_differ() -> None:
    report = report_of(reference=reference_of([5, 6, 8]))
    assert report.differences == []
    assert not report.tokens_equal


def test_the_table_names_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report_of(reference=reference_of([5, 6, 8]), answers=(5, 9)))
    table = capsys.readouterr().out
    for words in ("1 of 2", "bit for bit", "NO", "current: 1, full: 2", "3, 2", "prefill 1.00"):
        assert words in table


def test_without_a_reference_equal_means_equal_to_replicated() -> None:
    values = report_of().as_json()
    assert values["tokens_reference"] is None
    assert values["max_logit_diff_reference"] is None
    assert values["tokens_equal"] is True
    assert report_of(replicated=result_of([5, 6, 8])).as_json()["tokens_equal"] is False
