"""The length gate: 400 lines a file, 60 a function, and a list of exceptions that can only shrink."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")

SCRIPT = Path(__file__).parents[4] / "tools/check_lengths.py"
LIST = "tools/length_exceptions.txt"


@pytest.fixture
def lengths():
    spec = importlib.util.spec_from_file_location("check_lengths", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    pass\n" * (lines - 1)


def test_a_file_of_400_and_a_function_of_60_lines_pass(lengths, tmp_path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text(function("f", 60) + "\n" * 340)
    assert list(lengths.problems(lengths.measure(tmp_path), {})) == []


def test_one_line_more_is_named(lengths, tmp_path) -> None:
    (tmp_path / "src").mkdir()
    inside = "\n".join("    " + line for line in function("f", 61).splitlines())
    (tmp_path / "src/a.py").write_text(f"class A:\n{inside}\n" + "\n" * 339)
    found = list(lengths.problems(lengths.measure(tmp_path), {}))
    assert [problem.split(",")[0] for problem in found] == ["src/a.py has 401 lines", "src/a.py::A.f has 61 lines"]


@pytest.mark.parametrize(
    ("allowed", "problem"),
    [
        ({"a.py::f": 70}, None),
        ({"a.py::f": 69}, "a.py::f has grown to 70 lines, its exception allows 69"),
        ({"a.py::f": 71}, "a.py::f has shrunk to 70 lines: lower its 71"),
        ({"a.py::f": 70, "a.py::g": 65}, "a.py::g needs no exception any more"),
        ({"a.py::f": 70, "b.py": 500}, "b.py needs no exception any more"),
    ],
)
def test_exceptions_are_exact(lengths, allowed, problem) -> None:
    measured = {"a.py": (300, 400), "a.py::f": (70, 60), "a.py::g": (60, 60)}
    found = list(lengths.problems(measured, allowed))
    assert len(found) == (problem is not None)
    assert all(str(problem) in line for line in found)


def test_against_an_earlier_list_entries_may_go_or_shrink_only(lengths) -> None:
    earlier = {"a.py": 500, "b.py": 450}
    assert list(lengths.growth({"a.py": 480}, earlier, "abc")) == []
    (new,) = lengths.growth({"c.py": 401}, earlier, "abc")
    assert "c.py was not listed in abc" in new
    (grown,) = lengths.growth({"a.py": 501}, earlier, "abc")
    assert "a.py allows 501 lines, 500 in abc" in grown


def test_the_script_compares_with_every_committed_list(tmp_path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)

    def git(*words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    for folder in ("src", "tools"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src/a.py").write_text(function("f", 65))
    (tmp_path / LIST).write_text("src/a.py::f 65  # to be split\n")
    assert run().returncode == 0
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "src/a.py").write_text(function("f", 65) + function("g", 66))
    (tmp_path / LIST).write_text("src/a.py::f 65\nsrc/a.py::g 66\n")
    assert "src/a.py::g was not listed in" in run().stdout
    git("commit", "-qam", "two")
    (tmp_path / "src/b.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "three")
    assert run().returncode == 1
    (tmp_path / LIST).write_text("src/a.py::f 65 lines\n")
    assert f"{LIST}:1: not one" in run().stdout
