"""Finds the test files and reads what each states about itself, from the syntax tree, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from runner.suites import SUITES

REGISTERED = Path("test/registered")
KINDS = {"register_cpu_ci": "cpu", "register_cuda_ci": "cuda", "register_amd_ci": "amd", "register_npu_ci": "npu"}
NOT_TESTS = {"__pycache__", ".venv", "node_modules"}


@dataclass(frozen=True)
class Registration:
    """One `register_*_ci` call: the hardware it names, seconds, suite."""

    hw: str
    est_time: float
    suite: str
    num_gpus: int = 0
    alone: bool = False
    nightly: bool = False
    disabled: str | None = None


@dataclass(frozen=True)
class TestFile:
    """A test file, its path relative to the root, and its registrations, at most one for each hardware."""

    __test__ = False

    path: str
    registrations: tuple[Registration, ...]


class BadTestFile(Exception):
    """A test file that would never run, or not as it says; the message begins with its path."""


def discover(root: Path) -> tuple[list[TestFile], list[str]]:
    """Every test file under `root`, sorted by path, and one message for each file that cannot be placed."""
    files, errors = [], []
    for path in python_files(root / "test"):
        try:
            registered = read_file(root, path)
        except BadTestFile as error:
            errors.append(str(error))
        else:
            if registered is not None:
                files.append(registered)
    return files, errors


def python_files(folder: Path) -> Iterator[Path]:
    """The Python files below `folder`, sorted."""
    for path in sorted(folder.rglob("*.py")):
        if not NOT_TESTS.intersection(path.relative_to(folder).parts):
            yield path


def read_file(root: Path, path: Path) -> TestFile | None:
    """What `path` states about itself, or None where it is no test file and holds no test."""
    name = path.relative_to(root).as_posix()
    try:
        tree = ast.parse(path.read_bytes(), filename=name)
    except (SyntaxError, ValueError) as error:
        raise BadTestFile(f"{name}: cannot be parsed: {error}") from error
    parts = Path(name).parts[len(REGISTERED.parts) :] if name.startswith(f"{REGISTERED.as_posix()}/") else ()
    if not path.name.startswith("test_"):
        if parts and path.name != "conftest.py" and _holds_tests(tree):
            raise BadTestFile(f"{name}: holds tests that never run, since its name does not start with test_")
        return None
    if len(parts) < 2:
        raise BadTestFile(f"{name}: a test file belongs into a suite's folder: {REGISTERED.as_posix()}/<suite>/")
    if not _holds_tests(tree):
        raise BadTestFile(f"{name}: holds no test function at module level and no Test class")
    return TestFile(name, _registrations(name, tree, folder=parts[0]))


def _holds_tests(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"))
        or (isinstance(node, ast.ClassDef) and node.name.startswith("Test"))
        for node in tree.body
    )


def _registrations(name: str, tree: ast.Module, folder: str) -> tuple[Registration, ...]:
    at_top = [node.value for node in tree.body if isinstance(node, ast.Expr) and _called(node.value) in KINDS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in KINDS and node not in at_top:
            raise BadTestFile(f"{name}:{node.lineno}: {_called(node)} must be a statement of its own at module level")
    found: dict[str, Registration] = {}
    for call in at_top:
        registration = _registration(name, call, folder)
        if registration.hw in found:
            raise BadTestFile(f"{name}:{call.lineno}: {_called(call)} is called twice")
        found[registration.hw] = registration
    if not found:
        raise BadTestFile(f"{name}: has no registration; add register_cpu_ci(est_time=1, suite={folder!r}) or a like")
    return tuple(found.values())


def _called(node: ast.AST) -> str | None:
    """The last part of the name that a call calls."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def _registration(name: str, call: ast.expr, folder: str) -> Registration:
    assert isinstance(call, ast.Call)
    where, function = f"{name}:{call.lineno}", str(_called(call))
    hw = KINDS[function]
    if call.args:
        raise BadTestFile(f"{where}: {function} takes keyword arguments only")
    allowed = {field.name for field in fields(Registration)} - {"hw", "num_gpus" if hw == "cpu" else "alone"}
    arguments: dict[str, object] = {} if hw == "cpu" else {"num_gpus": 1}
    for keyword in call.keywords:
        if keyword.arg not in allowed:
            raise BadTestFile(f"{where}: {function} has no argument {keyword.arg or '**'}; it has {sorted(allowed)}")
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError) as error:
            text = ast.unparse(keyword.value)
            raise BadTestFile(f"{where}: {keyword.arg}={text} of {function} is not a literal") from error
    _check_arguments(f"{where}: {function}", arguments, folder)
    return Registration(hw=hw, **arguments)  # type: ignore[arg-type]


def _check_arguments(where: str, arguments: dict[str, object], folder: str) -> None:
    for required in ("est_time", "suite"):
        if required not in arguments:
            raise BadTestFile(f"{where} lacks {required}")
    est_time, suite = arguments["est_time"], arguments["suite"]
    if isinstance(est_time, bool) or not isinstance(est_time, int | float) or not 0 < est_time < 1e6:
        raise BadTestFile(f"{where}: est_time={est_time!r} is not a number of seconds above 0")
    if not isinstance(suite, str) or suite not in SUITES:
        raise BadTestFile(f"{where}: unknown suite {suite!r}; the suites are {', '.join(SUITES)}")
    if suite != folder:
        raise BadTestFile(f"{where}: suite {suite!r} is not the file's folder, {folder!r}: move the file or say so")
    num_gpus = arguments.get("num_gpus", 0)
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or ("num_gpus" in arguments and num_gpus < 1):
        raise BadTestFile(f"{where}: num_gpus={num_gpus!r} is not a count from 1")
    for flag in ("alone", "nightly"):
        if not isinstance(arguments.get(flag, False), bool):
            raise BadTestFile(f"{where}: {flag} is neither True nor False")
    disabled = arguments.get("disabled")
    if disabled is not None and not (isinstance(disabled, str) and disabled.strip()):
        raise BadTestFile(f"{where}: disabled must give the reason as a string")
