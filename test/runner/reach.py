"""Which test files a change can reach, by the import graph of `src/cpkv` and the test files.

The graph is read from syntax trees, and is too large rather than too small: a string that names a module counts as an
import of it, and a module that imports by computed names counts as importing everything below its package. What the
graph cannot judge (a file that is no Python module of the graph, a deleted module, a conftest.py) reaches every test.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runner.discovery import REGISTERED, python_files

PACKAGE = "cpkv"
_DOTTED = re.compile(rf"\b{PACKAGE}((?:\.\w+)*)(\.?)")
_DYNAMIC = {"import_module", "__import__"}


@dataclass(frozen=True)
class Reach:
    """Either `everything`, with the reason, or the paths of the test files that the change can reach."""

    paths: frozenset[str]
    everything: str | None = None


def changed_files(root: Path, revision: str) -> list[str] | None:
    """Paths that differ between `revision` and the working tree, untracked files too; None if git cannot say."""
    commands = (
        ["git", "diff", "--name-only", "--no-renames", "--relative", "-z", revision, "--"],
        ["git", "ls-files", "--others", "--exclude-standard", "-z"],
    )
    names: set[str] = set()
    for command in commands:
        try:
            answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        names.update(name for name in answer.stdout.split("\0") if name)
    return sorted(names)


def reached(root: Path, changed: Iterable[str] | None, tests: Iterable[str]) -> Reach:
    """The test files among `tests` that a change of the paths `changed` can reach."""
    tests = frozenset(tests)
    if changed is None:
        return Reach(tests, "git cannot compare with that revision")
    graph = ImportGraph(root)
    dirty: set[str] = set()
    for path in changed:
        if path.endswith(".md") and not path.startswith(("src/", "test/")):
            dirty |= graph.readers_of_markdown
        elif path in graph.texts and not path.endswith("conftest.py"):
            dirty.add(path)
        else:
            return Reach(tests, f"{path} can reach any test")
    return Reach(frozenset(test for test in tests if graph.closure(test) & dirty))


class ImportGraph:
    """Which file imports which, over the package and the registered test files; files are paths from the root."""

    def __init__(self, root: Path) -> None:
        self.texts: dict[str, str] = {}
        self.modules: dict[str, str] = {}
        for folder in (root / "src" / PACKAGE, root / REGISTERED):
            for path in python_files(folder):
                name = path.relative_to(root).as_posix()
                self.texts[name] = path.read_text(encoding="utf-8", errors="replace")
                if name.startswith("src/"):
                    module = ".".join(Path(name).with_suffix("").parts[1:]).removesuffix(".__init__")
                    self.modules[module] = name
        self.edges = {name: self._imports(name, text) for name, text in self.texts.items()}
        self.readers_of_markdown = {name for name, text in self.texts.items() if ".md" in text}

    def closure(self, start: str) -> set[str]:
        """`start` and every file that it imports, directly or not."""
        seen, todo = {start}, [start]
        while todo:
            for name in self.edges.get(todo.pop(), set()) - seen:
                seen.add(name)
                todo.append(name)
        return seen

    def _imports(self, name: str, text: str) -> set[str]:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return set(self.modules.values())
        edges = self._conftests(name)
        docstrings = _docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    edges |= self._resolve(name, alias.name)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(name, node)
                edges |= self._resolve(name, base)
                for alias in node.names:
                    edges |= self._resolve(name, f"{base}.{alias.name}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                edges |= self._named_in(name, node.value)
            elif _names_dynamically(node):
                edges |= self._below(self._package_of(name))
        return edges

    def _conftests(self, name: str) -> set[str]:
        above = [(parent / "conftest.py").as_posix() for parent in Path(name).parents]
        return {path for path in above if path in self.texts and path != name}

    def _package_of(self, name: str) -> str:
        """The package that relative and computed imports of `name` start from; empty for test files."""
        return ".".join(Path(name).parts[1:-1]) if name.startswith("src/") else ""

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self._package_of(name).split(".")
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _resolve(self, name: str, module: str) -> set[str]:
        """The file of `module` with those of the packages above it, or a helper file beside a test file."""
        parts = module.split(".")
        found = {self.modules[above] for i in range(len(parts)) if (above := ".".join(parts[: i + 1])) in self.modules}
        beside = (Path(name).parent / f"{parts[0]}.py").as_posix()
        return found | ({beside} if not name.startswith("src/") and beside in self.texts else set())

    def _named_in(self, name: str, text: str) -> set[str]:
        """What a string names: a script that a test runs, a module to load, the command itself."""
        if not name.startswith("src/") and ".py" in text:
            return set(self.modules.values())
        edges: set[str] = set()
        for dotted, open_end in _DOTTED.findall(text):
            module = f"{PACKAGE}{dotted}"
            while module not in self.modules and "." in module:
                module = module.rpartition(".")[0]
            if module != PACKAGE or not name.startswith("src/") or open_end:
                edges |= self._resolve(name, module) | self._below(module)
        return edges

    def _below(self, module: str) -> set[str]:
        prefix = module or PACKAGE
        return {path for name, path in self.modules.items() if name == prefix or name.startswith(f"{prefix}.")}


def _names_dynamically(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == "__getattr__"
    if isinstance(node, ast.Call):
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
        return called in _DYNAMIC and not _is_absolute_name(node.args[0] if node.args else None)
    return False


def _is_absolute_name(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.startswith(".")


def _docstrings(tree: ast.Module) -> set[int]:
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
