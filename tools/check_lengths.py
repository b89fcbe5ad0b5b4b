"""Files have at most 400 lines and functions at most 60; tools/length_exceptions.txt lists what is longer.

The list may only shrink. An entry is an error once it is not needed any more, once it allows more than there is, once
what it allows has grown, and when an earlier version of the list did not have it or allowed less.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60
FOLDERS = ("src", "test", "benchmarks", "tools")
LIST = Path("tools/length_exceptions.txt")


def measure(root: Path) -> dict[str, tuple[int, int]]:
    """Lines and limit of each file (`path`) and function (`path::qualified.name`) below `root`."""
    found: dict[str, tuple[int, int]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if "__pycache__" in path.parts:
                continue
            name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            found[name] = (len(text.splitlines()), FILE_LINES)
            for function, lines in _functions(ast.parse(text, filename=name), ""):
                key = f"{name}::{function}"
                # Overloads and property setters share a name: the longest counts.
                found[key] = (max(lines, found.get(key, (0, 0))[0]), FUNCTION_LINES)
    return found


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                yield inner[:-1], (child.end_lineno or child.lineno) - child.lineno + 1
        yield from _functions(child, inner)


def read_list(text: str) -> dict[str, int]:
    """The exceptions in `text`: one `name lines` per line, `#` starts a comment; ValueError names a bad line."""
    entries: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not words[1].isdecimal() or words[0] in entries:
            raise ValueError(f"{LIST}:{number}: not one `name lines` per line, or named twice: {line.strip()}")
        entries[words[0]] = int(words[1])
    return entries


def earlier_lists(root: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Each committed version of the list with its commit; none where git or the history is missing."""
    for revision in _git(root, "log", "--format=%h", "--", LIST.as_posix()).split():
        text = _git(root, "show", f"{revision}:./{LIST.as_posix()}")
        if text:
            yield revision, read_list(text)


def _git(root: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def problems(measured: dict[str, tuple[int, int]], allowed: dict[str, int]) -> Iterator[str]:
    """What is too long, and what is wrong with the list."""
    for name, (lines, limit) in measured.items():
        if lines > limit and name not in allowed:
            yield f"{name} has {lines} lines, at most {limit} are allowed: split it"
        elif lines > limit and lines > allowed[name]:
            yield f"{name} has grown to {lines} lines, its exception allows {allowed[name]}: shorten it"
    for name, lines_allowed in allowed.items():
        lines, limit = measured.get(name, (0, 0))
        if lines <= limit:
            yield f"{LIST}: {name} needs no exception any more: remove the line"
        elif lines < lines_allowed:
            yield f"{LIST}: {name} has shrunk to {lines} lines: lower its {lines_allowed} to that"


def growth(allowed: dict[str, int], earlier: dict[str, int], revision: str) -> Iterator[str]:
    """What `allowed` has that the list of `revision` did not allow."""
    for name, lines in allowed.items():
        if name not in earlier:
            yield f"{LIST}: {name} was not listed in {revision}; the list may only shrink"
        elif lines > earlier[name]:
            yield f"{LIST}: {name} allows {lines} lines, {earlier[name]} in {revision}; the list may only shrink"


def main() -> int:
    """Prints every problem; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root
    try:
        allowed = read_list((root / LIST).read_text(encoding="utf-8")) if (root / LIST).exists() else {}
        found = list(problems(measure(root), allowed))
        for revision, earlier in earlier_lists(root):
            found += growth(allowed, earlier, revision)
    except (ValueError, SyntaxError) as error:
        found = [str(error)]
    print("\n".join(dict.fromkeys(found)), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
