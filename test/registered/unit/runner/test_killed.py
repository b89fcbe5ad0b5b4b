"""Files that hang, crash or leave processes behind: killed with all they started, and counted as one failure."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from cpkv.testing.registration import register_cpu_ci
from cpkv.testing.waiting import eventually

register_cpu_ci(est_time=12, suite="unit")

RUN_SUITE = Path(__file__).parents[3] / "run_suite.py"

# One child in our group, one in a session of its own.
HANGING = """
import subprocess, threading
from pathlib import Path


def test_waits():
    children = [subprocess.Popen(["sleep", "300"], start_new_session=own) for own in (False, True)]
    Path("children").write_text(" ".join(str(child.pid) for child in children))
    threading.Event().wait()
"""

LEAVING = """
import subprocess
from pathlib import Path


def test_leaves_a_process():
    child = subprocess.Popen(["sleep", "301"], start_new_session=True)
    Path("children").write_text(str(child.pid))
    child.returncode = 0
"""

CRASHING = """
import os


def test_right():
    pass


def test_aborts():
    os.abort()
"""


def last_line(ended) -> str:
    return ended.stdout.splitlines()[-1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_hanging_file_is_killed_with_its_children(checkout) -> None:
    path = checkout.test("unit/test_hang.py", HANGING)
    ended = checkout.run("--timeout-per-file", "8")
    assert ended.returncode == 1
    assert f"failed: {path}: ran longer than 8 s and was killed with its children" in ended.stdout
    assert "in test_waits" in ended.stdout, "the stacks at the moment of the kill are missing"
    assert last_line(ended) == "0 passed, 1 failed, 0 skipped"
    children = [int(word) for word in (checkout.root / "children").read_text().split()]
    assert len(children) == 2
    # A signal has an effect once its process gets a core.
    eventually(lambda: not any(map(alive, children)), "both children have ended")


def test_ending_the_runner_ends_what_it_runs(checkout) -> None:
    checkout.test("unit/test_hang.py", HANGING)
    with subprocess.Popen(
        [sys.executable, str(RUN_SUITE), "--root", str(checkout.root)], stdout=subprocess.PIPE, text=True
    ) as runner:
        wait_for(checkout.root / "children", runner)
        runner.terminate()
        output, _ = runner.communicate(timeout=30)
    assert runner.returncode == 1
    assert output.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"
    assert "1 of 1 files did not run" in output
    children = [int(word) for word in (checkout.root / "children").read_text().split()]
    eventually(lambda: not any(map(alive, children)), "both children have ended")


def wait_for(path: Path, runner: subprocess.Popen[str]) -> None:
    """Returns once `path` is complete; fails where the runner ends before."""
    while not (path.exists() and path.read_text()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"the runner ended with {runner.wait(timeout=0.05)}")


def test_a_crashing_file_counts_as_one_failure(checkout) -> None:
    path = checkout.test("unit/test_crash.py", CRASHING)
    ended = checkout.run("--junit", str(checkout.root / "junit.xml"))
    assert ended.returncode == 1
    assert f"failed: {path}: the interpreter was ended by SIGABRT" in ended.stdout
    assert last_line(ended) == "0 passed, 1 failed, 0 skipped"
    (error,) = ET.parse(checkout.root / "junit.xml").getroot().iter("error")
    assert "SIGABRT" in error.get("message", "")


def test_a_process_left_behind_is_a_failure_and_is_killed(checkout) -> None:
    checkout.test("unit/test_leave.py", LEAVING)
    ended = checkout.run()
    assert ended.returncode == 1
    assert "left processes behind, now killed" in ended.stdout
    assert "sleep 301" in ended.stdout
    assert last_line(ended) == "1 passed, 1 failed, 0 skipped"
    child = int((checkout.root / "children").read_text())
    eventually(lambda: not alive(child), "the process has ended")
