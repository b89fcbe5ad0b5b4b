"""A run from outside: counts, reasons, order, JUnit, the last line."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from cpkv.testing.registration import register_cpu_ci
from runner.discovery import Registration
from runner.process import Ended
from runner.results import read_result
from runner.selection import Entry

register_cpu_ci(est_time=9, suite="unit")

MIXED = """
import pytest


def test_right():
    pass


def test_wrong():
    assert 1 == 2


@pytest.mark.skip(reason="no such device")
def test_skipped():
    pass


@pytest.fixture
def broken():
    yield
    raise RuntimeError("teardown")


def test_wrong_twice(broken):
    raise RuntimeError("call")
"""


def last_line(ended) -> str:
    return ended.stdout.splitlines()[-1]


def test_tests_are_counted_and_each_skip_says_why(checkout) -> None:
    checkout.test("unit/test_mixed.py", MIXED)
    checkout.test("unit/test_good.py")
    checkout.test("unit/test_off.py", register='register_cpu_ci(est_time=1, suite="unit", disabled="waits for a fix")')
    ended = checkout.run("--continue-on-error", "--junit", str(checkout.root / "out/junit.xml"))
    assert ended.returncode == 1
    assert last_line(ended) == "2 passed, 2 failed, 2 skipped"
    assert "skipped: test/registered/unit/test_mixed.py::test_skipped: no such device" in ended.stdout
    assert "skipped: test/registered/unit/test_off.py::(whole file): disabled: waits for a fix" in ended.stdout
    assert "failed: test/registered/unit/test_mixed.py::test_wrong\n" in ended.stdout
    assert "assert 1 == 2" in ended.stdout
    merged = ET.parse(checkout.root / "out/junit.xml").getroot()
    assert {suite.get("name") for suite in merged} == {
        f"test/registered/unit/test_{name}.py" for name in ("mixed", "good", "off")
    }
    assert {case.get("name") for case in merged.iter("testcase")} >= {"test_right", "test_wrong", "test_one"}
    assert merged.get("skipped") == "2"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import no_such_module\n\n\ndef test_one():\n    pass\n", "no_such_module"),
        ("class TestNothing:\n    pass\n", "no test ran"),
        ("import os\n\n\ndef test_one():\n    os._exit(0)\n", "ended without a result"),
        ("class TestHidden:\n    def __init__(self):\n        pass\n", "no test ran"),
    ],
    ids=["import fails", "no test", "early exit", "class that pytest skips"],
)
def test_a_file_that_runs_no_test_fails(checkout, body: str, reason: str) -> None:
    checkout.test("unit/test_none.py", body)
    ended = checkout.run()
    assert ended.returncode == 1
    assert reason in ended.stdout
    assert last_line(ended) == "0 passed, 1 failed, 0 skipped"


def test_a_test_that_fails_once_more_in_its_teardown_counts_once(tmp_path) -> None:
    cases = ["<testcase name='test_a'><error/></testcase>", "<testcase name='test_a'/>", "<testcase name='test_b'/>"]
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    entry = Entry("test_a.py", Registration("cpu", 1, "unit"))
    result = read_result(entry, Ended(1, 1.0), tmp_path / "junit.xml")
    assert (result.passed, result.failed) == (1, ["test_a"])


def test_without_continue_on_error_the_first_failure_ends_the_run(checkout) -> None:
    for number in range(3):
        checkout.test(f"unit/test_{number}.py", "def test_wrong():\n    raise ValueError\n")
    ended = checkout.run("--jobs", "1")
    assert ended.returncode == 1
    assert "2 of 3 files did not run" in ended.stdout
    assert last_line(ended) == "0 passed, 1 failed, 0 skipped"


def test_the_seed_gives_the_order_of_files_again(checkout) -> None:
    for number in range(6):
        checkout.test(f"unit/test_{number}.py", register='register_cpu_ci(est_time=1, suite="unit", disabled="x")')
    orders = {seed: order_of(checkout.run("--seed", seed)) for seed in ("1", "2", "3", "4")}
    assert order_of(checkout.run("--seed", "1")) == orders["1"]
    assert len(set(map(tuple, orders.values()))) > 1


def order_of(ended) -> list[str]:
    return re.findall(r"test_\d\.py(?=  )", ended.stdout)


def test_a_wrong_est_time_is_reported_with_the_value_to_write(checkout) -> None:
    path = checkout.test("unit/test_one.py", register='register_cpu_ci(est_time=300, suite="unit")')
    ended = checkout.run()
    assert ended.returncode == 0
    assert re.search(
        rf"est_time: {path}: est_time=300 is stated, [\d.]+ s were taken: write est_time=\d+\n", ended.stdout
    )
    assert last_line(ended) == "1 passed, 0 failed, 0 skipped"


def test_what_this_machine_cannot_run_is_said(checkout) -> None:
    checkout.test("unit/test_one.py")
    checkout.test("kernels/test_gpu.py", register='register_cuda_ci(est_time=1, suite="kernels")')
    checkout.test("unit/test_night.py", register='register_cpu_ci(est_time=1, suite="unit", nightly=True)')
    ended = checkout.run()
    assert "not run, for other hardware: test/registered/kernels/test_gpu.py [cuda]" in ended.stderr
    assert "not run, nightly only: test/registered/unit/test_night.py" in ended.stderr
    asked = checkout.run("--hw", "cuda")
    assert "needs 1 devices (cuda), this machine has 0" in asked.stdout
    assert last_line(asked) == "0 passed, 0 failed, 1 skipped"
