"""What a test must not leave behind: processes, shared-memory segments, workspaces, pages."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cpkv.cache.allocator import PageAllocator


class Traces(NamedTuple):
    """What exists at one moment."""

    processes: frozenset[str]
    segments: frozenset[str]
    workspaces: frozenset[str]
    threads: frozenset[str]


def child_processes(parent: int | None = None) -> dict[int, str]:
    """Direct children of a process (this one by default), zombies included: pid -> command line. Linux only."""
    parent = os.getpid() if parent is None else parent
    children = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The command name in parentheses may hold spaces, so fields are counted behind it.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    children[int(folder.name)] = command.strip() or f"zombie {folder.name}"
    return children


def traces() -> Traces:
    """Children, shared-memory segments, temporary folders and worker threads of this process that exist now.

    Segments and folders count when their names hold the process id, since other tests run beside this one.
    """
    memory = Path("/dev/shm")
    workers = {thread.name for thread in threading.enumerate() if thread.name.startswith(("prefill rank", "decode"))}
    return Traces(
        processes=frozenset(f"{pid} {command}" for pid, command in child_processes().items()),
        segments=frozenset(entry.name for entry in memory.glob(f"*{os.getpid()}*")),
        workspaces=frozenset(str(path) for path in Path(tempfile.gettempdir()).glob(f"cpkv-{os.getpid()}-*")),
        threads=frozenset(workers),
    )


@contextlib.contextmanager
def nothing_left_behind(*allocators: PageAllocator) -> Iterator[None]:
    """Fail when the body leaves a process, a segment, a workspace, a worker thread, or pages of these allocators.

    Raises:
        AssertionError: naming everything that is left.
    """
    before = traces()
    yield
    after = traces()
    left = [
        f"{kind}: {', '.join(sorted(now - then))}"
        for kind, then, now in zip(Traces._fields, before, after, strict=True)
        if now - then
    ]
    for allocator in allocators:
        allocator.check()
        if allocator.free_pages != allocator.capacity_pages:
            left.append(f"pages: {allocator}")
    assert not left, "left behind: " + "; ".join(left)
