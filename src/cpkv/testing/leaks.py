"""What a test must not leave behind: processes, shared-memory segments, workspaces, pages."""

from __future__ import annotations

import contextlib
import gc
import os
import re
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

    Named segments and folders count when their names hold the process id, since other tests run beside this one;
    anonymous segments (memfd) while this process has a descriptor or a mapping of them.
    """
    workers = {thread.name for thread in threading.enumerate() if thread.name.startswith(("prefill rank", "decode"))}
    return Traces(
        processes=frozenset(f"{pid} {command}" for pid, command in child_processes().items()),
        segments=frozenset([*_named_segments(), *_anonymous_segments()]),
        workspaces=frozenset(str(path) for path in Path(tempfile.gettempdir()).glob(f"cpkv-{os.getpid()}-*")),
        threads=frozenset(workers),
    )


def _named_segments() -> Iterator[str]:
    own = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
    return (entry.name for entry in Path("/dev/shm").iterdir() if own.search(entry.name))


def _anonymous_segments() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := os.readlink(link)).startswith("/memfd:cpkv"):
                yield f"descriptor {link.name} of {target}"
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "/memfd:cpkv" in line:
            yield f"mapping {line.split()[0]} of {line.partition('/')[2]}"


@contextlib.contextmanager
def nothing_left_behind(*allocators: PageAllocator) -> Iterator[None]:
    """Fail when the body leaves a process, a segment, a workspace, a worker thread, or pages of these allocators.

    Raises:
        AssertionError: naming everything that is left.
    """
    before = traces()
    yield
    after = traces()
    if after.segments - before.segments:
        # A tensor in a reference cycle holds its mapping until it is collected.
        gc.collect()
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
