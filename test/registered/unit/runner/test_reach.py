"""--changed-since runs what the change can reach by the import graph, and everything when in doubt."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cpkv.testing.registration import register_cpu_ci
from runner.reach import changed_files, reached

register_cpu_ci(est_time=2, suite="unit")

PLACEMENT, PLAN, TOKENS = "src/cpkv/layout/placement.py", "src/cpkv/layout/plan.py", "src/cpkv/model/tokens.py"
FILES = {
    "src/cpkv/__init__.py": '"""cpkv does much, as cpkv.model shows."""\n',
    "src/cpkv/layout/__init__.py": "",
    PLACEMENT: "",
    PLAN: "from .placement import owner\n",
    "src/cpkv/cache/__init__.py": "from cpkv.cache.allocator import Allocator\n",
    "src/cpkv/cache/allocator.py": "from cpkv.layout import placement\n",
    "src/cpkv/model/__init__.py": "",
    TOKENS: "",
    "src/cpkv/ops/__init__.py": "from importlib import import_module\n\n\ndef f(x):\n    return import_module(x)\n",
    "src/cpkv/ops/fast.py": "",
    "src/cpkv/cli.py": 'BACK_END = "cpkv.model.tokens:load"\n',
}
TESTS = {
    "unit/test_placement.py": "from cpkv.layout.placement import owner\n",
    "unit/test_plan.py": "import cpkv.layout.plan\n",
    "unit/test_cache.py": "from cpkv import cache\n",
    "unit/test_tokens.py": "def late():\n    from cpkv.model import tokens\n",
    "unit/test_helper.py": "from shapes import TABLE\n",
    "unit/test_ops.py": "import cpkv.ops\n",
    "unit/test_cli.py": "import cpkv.cli\n",
    "models/test_command.py": 'COMMAND = ["cpkv", "demo"]\n',
    "models/test_script.py": 'SCRIPT = "benchmarks/prefill.py"\n',
    "unit/test_readme.py": 'README = "README.md"\n',
}
ALL = {f"test/registered/{path}" for path in TESTS}
# They start the command or a script, which may import anything.
STARTERS = {"test/registered/models/test_command.py", "test/registered/models/test_script.py"}


@pytest.fixture
def tree(checkout) -> Path:
    for path, text in FILES.items():
        checkout.write(path, text)
    for path, text in TESTS.items():
        checkout.write(f"test/registered/{path}", text)
    checkout.write("test/registered/unit/shapes.py", "from cpkv.layout.plan import x\nTABLE = 1\n")
    return checkout.root


def names(paths) -> set[str]:
    return {Path(path).stem.removeprefix("test_") for path in paths - STARTERS}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([PLACEMENT], {"placement", "plan", "cache", "helper"}),
        ([PLAN], {"plan", "helper"}),
        ([TOKENS], {"tokens", "cli"}),
        (["src/cpkv/ops/fast.py"], {"ops"}),
        (["test/registered/unit/shapes.py"], {"helper"}),
        (["test/registered/unit/test_plan.py"], {"plan"}),
        (["src/cpkv/layout/__init__.py"], {"placement", "plan", "cache", "helper"}),
        ([PLAN, TOKENS], {"plan", "helper", "tokens", "cli"}),
        (["docs/design.md", "README.md"], {"readme"}),
        ([], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_change_reaches_those_that_import_it(tree: Path, changed: list[str], expected: set[str]) -> None:
    reach = reached(tree, changed, ALL)
    assert reach.everything is None
    assert names(reach.paths) == expected
    if any(path.startswith("src/") for path in changed):
        assert reach.paths >= STARTERS


@pytest.mark.parametrize(
    "changed",
    [
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "test/conftest.py",
        "test/registered/unit/conftest.py",
        "test/registered/unit/data.json",
        "test/registered/unit/notes.md",
        "test/runner/main.py",
        "benchmarks/prefill.py",
        "src/cpkv/layout/deleted.py",
    ],
)
def test_when_in_doubt_everything_runs(tree: Path, changed: str) -> None:
    if changed.endswith("conftest.py"):
        (tree / changed).write_text("")
    reach = reached(tree, [PLAN, changed], ALL)
    assert reach.paths == ALL
    assert changed in str(reach.everything)


def test_what_a_conftest_imports_reaches_the_tests_below_it(tree: Path) -> None:
    quiet = "test/registered/models/test_quiet.py"
    (tree / quiet).write_text("")
    assert quiet not in reached(tree, [TOKENS], {*ALL, quiet}).paths
    (tree / "test/registered/models/conftest.py").write_text("from cpkv.model import tokens\n")
    reach = reached(tree, [TOKENS], {*ALL, quiet})
    assert quiet in reach.paths
    assert "test/registered/unit/test_plan.py" not in reach.paths


def test_git_names_committed_uncommitted_and_untracked_changes(tree: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (tree / PLAN).write_text("# changed\n")
    git("commit", "-qam", "two")
    (tree / TOKENS).write_text("# changed\n")
    (tree / "src/cpkv/new module.py").write_text("")
    assert changed_files(tree, "HEAD") == ["src/cpkv/model/tokens.py", "src/cpkv/new module.py"]
    assert changed_files(tree, "HEAD~1") == [PLAN, TOKENS, "src/cpkv/new module.py"]
    assert changed_files(tree, "no-such-revision") is None
    assert reached(tree, None, ALL).paths == ALL


def test_the_command_lists_only_what_the_change_reaches(checkout) -> None:
    checkout.write("src/cpkv/__init__.py", "")
    checkout.write("src/cpkv/one.py", "")
    for name in ("one", "two"):
        register = f'import cpkv.{name}\nregister_cpu_ci(est_time=1, suite="unit")'
        checkout.test(f"unit/test_{name}.py", register=register)
    everything = checkout.run("--list", "--changed-since", "HEAD")
    assert len(everything.stdout.split()) == 2
    assert "git cannot compare" in everything.stderr
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=checkout.root, check=True, capture_output=True)
    (checkout.root / "src/cpkv/one.py").write_text("# changed\n")
    only = checkout.run("--list", "--changed-since", "HEAD")
    assert only.stdout.split() == ["test/registered/unit/test_one.py"]
    (checkout.root / "src/cpkv/one.py").write_text("")
    assert checkout.run("--changed-since", "HEAD").stdout.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"
