"""`cpkv check`: its flags, its table and JSON, its exit statuses, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cpkv.checks import machine
from cpkv.checks.result import Check, CheckResult
from cpkv.cli.main import make_app
from cpkv.testing.ports import closed_port, taken_port
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

COLUMNS = 160
# Frozen: a flag that is added, renamed or dropped, or another default, is a change of the command that people use.
FLAGS: dict[str, Any] = {"host": None, "transfer": None, "port": None, "json_output": False}


def test_flags_and_their_defaults() -> None:
    parameters = get_command(make_app()).commands["check"].params  # type: ignore[attr-defined]
    assert {parameter.name: parameter.default for parameter in parameters} == FLAGS


def test_help_can_be_read_on_80_columns() -> None:
    shown = CliRunner().invoke(make_app(), ["check", "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and max(map(len, text.splitlines())) <= 80
    for word in ("--host", "--transfer", "--port", "--json", "mooncake", "Exit status: 1", "cpkv check --host"):
        assert word in text


def test_json_has_every_check_and_the_real_engine_moves_its_bytes(cpkv: Any) -> None:
    free = closed_port()
    status, out, _ = cpkv("check", "--transfer", "tcp", "--port", str(free), "--json")
    answer = json.loads(out)
    by_name = {found["name"]: found for found in answer["checks"]}
    assert by_name[f"port 127.0.0.1:{free}"]["state"] == "ok"
    assert by_name["transfer tcp"]["figure"].startswith("1 MiB moved and compared in")
    assert {"locked memory", "open files", "memory files", "memory limit", "/dev/shm"} < by_name.keys()
    assert all(set(found) == {"name", "state", "figure", "remedy"} for found in answer["checks"])
    assert answer["failed"] == sum(found["state"] == "failed" for found in answer["checks"])
    assert status == (1 if answer["failed"] else 0)


def test_a_failed_check_is_exit_status_1_and_a_warning_is_not(cpkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        CheckResult("first", "ok", "[bold]7[/bold] of 9"),
        CheckResult("second", "warning", "small", "make it larger"),
    ]
    asked: list[tuple] = []

    def checks(*arguments: object) -> tuple[Check, ...]:
        asked.append(arguments)
        return tuple(Check(result.name, lambda result=result: result) for result in results)

    monkeypatch.setattr(machine, "machine_checks", checks)
    status, out, _ = cpkv("check", "--host", "10.0.0.1", "--port", "1", "--port", "2", "--transfer", "shm")
    assert status == 0 and asked == [("10.0.0.1", ("shm",), [1, 2])]
    assert "[bold]7[/bold] of 9" in out and "make it larger" in out and "warning" in out
    results.append(CheckResult("third", "failed", "broken", "mend it"))
    status, out, _ = cpkv("check")
    assert status == 1 and asked[-1] == (None, (), []) and "mend it" in out
    status, out, _ = cpkv("check", "--json")
    assert status == 1 and json.loads(out)["failed"] == 1


def test_a_port_that_is_taken_fails(cpkv: Any) -> None:
    with taken_port() as taken:
        status, out, _ = cpkv("check", "--transfer", "tcp", "--port", str(taken), "--json")
    found = next(found for found in json.loads(out)["checks"] if found["name"].startswith("port"))
    assert status == 1 and found["state"] == "failed" and "ss -ltnp" in found["remedy"]


def test_an_unknown_back_end_is_refused_in_one_line(cpkv: Any) -> None:
    status, out, err = cpkv("check", "--transfer", "pigeon")
    assert (status, out) == (2, "")
    assert err == "error: --transfer is 'pigeon', which is no back end; there are tcp, shm, mooncake, nixl\n"
