"""What the runner refuses: every test file that would never run, or not as it says, named by its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpkv.testing.registration import register_cpu_ci
from runner.discovery import Registration, discover

register_cpu_ci(est_time=2, suite="unit")

GOOD = 'register_cpu_ci(est_time=1, suite="unit")'
TEST = "\n\ndef test_one():\n    pass\n"

BAD = {
    "no registration": (TEST, "has no registration"),
    "two of one kind": (f"{GOOD}\n{GOOD}{TEST}", "called twice"),
    "a name instead of a literal": (f'T = 3\nregister_cpu_ci(est_time=T, suite="unit"){TEST}', "is not a literal"),
    "a sum instead of a literal": (f'register_cpu_ci(est_time=1 + 2, suite="unit"){TEST}', "is not a literal"),
    "an f-string": (f'register_cpu_ci(est_time=1, suite=f"u{{1}}"){TEST}', "is not a literal"),
    "unpacked arguments": (f'register_cpu_ci(**{{"est_time": 1, "suite": "unit"}}){TEST}', "has no argument **"),
    "positional": (f'register_cpu_ci(1, "unit"){TEST}', "keyword arguments only"),
    "unknown suite": (f'register_cpu_ci(est_time=1, suite="units"){TEST}', "unknown suite 'units'"),
    "suite of another folder": (f'register_cpu_ci(est_time=1, suite="kernels"){TEST}', "not the file's folder"),
    "no suite": (f"register_cpu_ci(est_time=1){TEST}", "lacks suite"),
    "no time": (f'register_cpu_ci(suite="unit"){TEST}', "lacks est_time"),
    "time 0": (f'register_cpu_ci(est_time=0, suite="unit"){TEST}', "est_time=0"),
    "time as text": (f'register_cpu_ci(est_time="4", suite="unit"){TEST}', "est_time='4'"),
    "GPUs for a CPU": (f'register_cpu_ci(est_time=1, suite="unit", num_gpus=1){TEST}', "no argument num_gpus"),
    "no GPU for a GPU": (f'register_cuda_ci(est_time=1, suite="unit", num_gpus=0){TEST}', "num_gpus=0"),
    "disabled for no reason": (f'register_cpu_ci(est_time=1, suite="unit", disabled=""){TEST}', "disabled must give"),
    "nightly as a number": (f'register_cpu_ci(est_time=1, suite="unit", nightly=1){TEST}', "nightly is neither"),
    "alone as a number": (f'register_cpu_ci(est_time=1, suite="unit", alone=1){TEST}', "alone is neither"),
    "alone on a GPU": (f'register_cuda_ci(est_time=1, suite="unit", alone=True){TEST}', "no argument alone"),
    "inside a condition": (f"if True:\n    {GOOD}{TEST}", "at module level"),
    "inside a function": (f"{GOOD}\n\n\ndef test_one():\n    {GOOD}\n", "at module level"),
    "no test in it": (f"{GOOD}\n\n\ndef check_one():\n    pass\n", "holds no test"),
    "not Python": ("def test_one(:\n", "cannot be parsed"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_with_the_reason(tmp_path: Path, case: str) -> None:
    text, reason = BAD[case]
    write(tmp_path, "test/registered/unit/layout/test_bad.py", text)
    write(tmp_path, "test/registered/unit/layout/test_good.py", f"{GOOD}{TEST}")
    files, errors = discover(tmp_path)
    assert [file.path for file in files] == ["test/registered/unit/layout/test_good.py"]
    assert len(errors) == 1
    assert errors[0].startswith("test/registered/unit/layout/test_bad.py")
    assert reason in errors[0]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("test/registered/unit/placement_test.py", "does not start with test_"),
        ("test/registered/test_loose.py", "belongs into a suite's folder"),
        ("test/test_loose.py", "belongs into a suite's folder"),
        ("test/runner/test_loose.py", "belongs into a suite's folder"),
    ],
)
def test_a_misplaced_file_is_an_error(tmp_path: Path, path: str, reason: str) -> None:
    write(tmp_path, path, f"{GOOD}{TEST}")
    assert discover(tmp_path)[0] == []
    (error,) = discover(tmp_path)[1]
    assert error.startswith(path)
    assert reason in error


def test_helpers_and_conftest_are_no_test_files(tmp_path: Path) -> None:
    write(tmp_path, "test/conftest.py", "def test_like_a_fixture():\n    pass\n")
    write(tmp_path, "test/registered/unit/conftest.py", "VALUE = 1\n")
    write(tmp_path, "test/registered/unit/shapes.py", "VALUE = 1\n")
    assert discover(tmp_path) == ([], [])


def test_registrations_are_read_without_importing(tmp_path: Path) -> None:
    write(
        tmp_path,
        "test/registered/kernels/test_both.py",
        'raise SystemExit("imported")\nregistration.register_cpu_ci(est_time=2.5, suite="kernels", nightly=True)\n'
        'register_cuda_ci(est_time=30, suite="kernels", num_gpus=2, disabled="flaky driver")\n\n'
        "class TestBoth:\n    pass\n",
    )
    files, errors = discover(tmp_path)
    assert errors == []
    assert files[0].registrations == (
        Registration("cpu", 2.5, "kernels", nightly=True),
        Registration("cuda", 30, "kernels", num_gpus=2, disabled="flaky driver"),
    )


def test_the_command_fails_with_the_name_of_every_bad_file(checkout) -> None:
    checkout.test("unit/test_good.py")
    checkout.test("unit/test_silent.py", register="")
    checkout.test("unit/test_lost.py", register='register_cpu_ci(est_time=1, suite="lost")')
    ended = checkout.run()
    assert ended.returncode == 2
    assert "test/registered/unit/test_silent.py: has no registration" in ended.stdout
    assert "test/registered/unit/test_lost.py:2: register_cpu_ci: unknown suite 'lost'" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "0 passed, 2 failed, 0 skipped"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
