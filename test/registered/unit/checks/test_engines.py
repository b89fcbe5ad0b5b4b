"""Trials of back ends: what each outcome becomes, and that one that hangs, crashes or raises stops nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest

from cpkv.checks import engine_trial
from cpkv.checks.engine_trial import Trial, try_engine
from cpkv.checks.engines import Command, back_ends, check_engine
from cpkv.checks.machine import machine_checks
from cpkv.checks.result import Check, CheckResult, run_checks
from cpkv.errors import ConfigError, TransferError
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.inprocess import InProcessBackend, InProcessFabric

register_cpu_ci(est_time=4, suite="unit")


def program(text: str) -> Command:
    def command(name: str, host: str) -> Sequence[str]:
        return [sys.executable, "-c", text, name, host]

    return command


def printing(**trial: object) -> Command:
    return program(f"print({json.dumps(trial)!r})")


def test_each_outcome_becomes_a_result() -> None:
    moved = check_engine("tcp", "h", wanted=False, command=printing(outcome="moved", seconds=0.0125))
    assert moved == CheckResult("transfer tcp", "ok", "1 MiB moved and compared in 12.5 ms")
    reason = "NIXL is not installed (no; such module); pip install 'cpkv[nixl]'"
    for wanted, state in ((False, "warning"), (True, "failed")):
        missing = check_engine("nixl", "h", wanted=wanted, command=printing(outcome="cannot", cause=reason))
        assert (missing.state, missing.figure) == (state, "NIXL is not installed (no; such module)")
        assert missing.remedy == "pip install 'cpkv[nixl]'"
    bare = check_engine("shm", "h", wanted=False, command=printing(outcome="cannot", cause="this is no Linux"))
    assert (bare.figure, bare.remedy) == ("this is no Linux", "use another --transfer")
    failed = check_engine("tcp", "h", wanted=False, command=printing(outcome="failed", cause="3 bytes wrong"))
    assert (failed.state, failed.figure) == ("failed", "3 bytes wrong") and failed.remedy


def test_a_trial_that_hangs_is_killed_with_what_it_started() -> None:
    endless = "import time; time.sleep(30)"
    text = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {endless!r}])\n"
        "print(child.pid, file=sys.stderr, flush=True)\n"
        "child.wait()"
    )
    begun = time.monotonic()
    found = check_engine("mooncake", "h", wanted=False, limit_s=2, command=program(text))
    assert (found.state, found.figure) == ("failed", "the engine hung: no answer within 2 s")
    assert time.monotonic() - begun < 20, "it waited for the pipes that the child held"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os; os.abort()", "ended with status -6 before it answered"),
        ("import sys; sys.exit('libfoo is missing')", "ended with status 1 before it answered; libfoo is missing"),
        ("print('no JSON')", "ended with status 0 before it answered"),
        ('print(\'{"outcome": "splendid"}\')', "ended with status 0 before it answered"),
    ],
)
def test_a_trial_that_crashes_or_talks_nonsense_fails_with_its_last_words(text: str, says: str) -> None:
    found = check_engine("mooncake", "h", wanted=False, command=program(text))
    assert found.state == "failed" and says in found.figure


def test_a_check_that_raises_fails_alone_and_the_others_go_on() -> None:
    def broken() -> CheckResult:
        raise ZeroDivisionError("by zero")

    good = CheckResult("good", "ok", "1")
    results = run_checks([Check("broken", broken), Check("good", lambda: good)])
    assert results[1] == good
    assert (results[0].name, results[0].state) == ("broken", "failed")
    assert results[0].figure == "the check itself raised ZeroDivisionError: by zero"


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> InProcessFabric:
    """Trials open in-process engines on this fabric."""
    fabric = InProcessFabric()
    monkeypatch.setattr(engine_trial, "why_not", lambda name: None)
    monkeypatch.setattr(engine_trial, "open_backend", lambda *_, **__: InProcessBackend(fabric))
    return fabric


def test_a_trial_moves_and_compares(fabric: InProcessFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_engine("tcp", "h").outcome == "moved"
    fabric.fail_next("the cable was pulled")
    assert try_engine("tcp", "h").cause.startswith("the cable was pulled")
    monkeypatch.setattr("ctypes.memmove", lambda *_: None)
    wrong = try_engine("tcp", "h")
    assert wrong.outcome == "failed" and "of 1,048,576 bytes arrived wrong" in wrong.cause


def test_a_trial_that_cannot_open_an_engine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_trial, "why_not", lambda name: f"{name} is not here; fetch it")
    assert try_engine("tcp", "h") == Trial("cannot", "tcp is not here; fetch it")

    def refuse(*_: object, **__: object) -> None:
        raise TransferError("no port is free; free one")

    monkeypatch.setattr(engine_trial, "why_not", lambda name: None)
    monkeypatch.setattr(engine_trial, "open_backend", refuse)
    assert try_engine("tcp", "h") == Trial("failed", "no port is free; free one")


def test_the_answer_is_alone_on_stdout() -> None:
    text = (
        "import os\n"
        "from cpkv.checks import engine_trial as trial\n"
        "trial.why_not = lambda name: os.write(1, b'a library greets') and None\n"
        "def refuse(name, host, **_): raise trial.TransferError(f'{name} {host}')\n"
        "trial.open_backend = refuse\n"
        "trial.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, "tcp", "10.0.0.1"], capture_output=True, text=True, timeout=20, check=True
    )
    assert json.loads(done.stdout)["cause"] == "tcp 10.0.0.1" and done.stderr == "a library greets"


def test_real_engines_are_tried_in_a_process_of_their_own() -> None:
    assert check_engine("tcp", "127.0.0.1", wanted=True).state == "ok"


def test_names_that_are_no_back_end_are_refused() -> None:
    assert back_ends(["nixl", "tcp", "tcp"]) == ("tcp", "nixl") and back_ends([]) == ()
    with pytest.raises(ConfigError, match="--transfer is 'inprocess', which is no back end; there are tcp, shm, moon"):
        back_ends(["tcp", "inprocess"])


@pytest.mark.parametrize(
    ("arguments", "present", "absent"),
    [
        ((None, (), ()), ["reach 127.0.0.1", "ports of mooncake", "transfer nixl", "transfer shm"], ["port "]),
        ((None, ("tcp",), ()), ["transfer tcp", "memory limit"], ["transfer shm", "ports of mooncake"]),
        (("10.1.2.3", ("tcp",), (7, 8)), ["reach 127.0.0.1", "reach 10.1.2.3", "port 10.1.2.3:8"], ["port 127"]),
        (("127.0.0.1", ("mooncake",), ()), ["reach 127.0.0.1", "ports of mooncake"], ["transfer tcp"]),
    ],
)
def test_which_checks_a_machine_gets(arguments: tuple, present: list[str], absent: list[str]) -> None:
    names = [check.name for check in machine_checks(*arguments)]
    assert set(present) <= set(names) and len(names) == len(set(names))
    assert not any(name.startswith(prefix) for name in names for prefix in absent)


def test_only_back_ends_that_were_asked_for_must_run() -> None:
    def wanted(transfers: tuple) -> set[bool]:
        looks: list[Callable] = [c.look for c in machine_checks(None, transfers, ()) if c.name.startswith("transfer")]
        return {look.keywords["wanted"] for look in looks}  # type: ignore[attr-defined]

    assert wanted(()) == {False} and wanted(("tcp",)) == {True}
