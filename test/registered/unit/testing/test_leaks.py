"""The fixtures that look for leaks: each kind of leak fails the test that made it, by name, and nothing else does."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpkv.cache.allocator import PageAllocator
from cpkv.layout.placement import PagePlacement
from cpkv.testing.leaks import nothing_left_behind
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

SEGMENTS = Path("/dev/shm")
LEAKY = """
import os, subprocess, sys, tempfile, threading
from cpkv.cache.allocator import PageAllocator
from cpkv.layout.placement import PagePlacement

pytest_plugins = ["cpkv.testing.fixtures"]
kept = []

def test_clean():
    pass

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_segment():
    open(f"/dev/shm/cpkv-{os.getpid()}", "wb").close()

def test_anonymous_segment():
    kept.append(os.memfd_create("cpkv-pool"))

def test_workspace():
    tempfile.mkdtemp(prefix=f"cpkv-{os.getpid()}-")

def test_thread():
    threading.Thread(target=threading.Event().wait, name="prefill rank 0", daemon=True).start()

def test_page(watch_pages):
    watch_pages(PageAllocator(8, PagePlacement(4, 2))).allocate("request", 1)

def test_pages_given_back(watch_pages):
    allocator = watch_pages(PageAllocator(8, PagePlacement(4, 2)))
    allocator.allocate("request", 1)
    allocator.free("request")
"""


@pytest.fixture(autouse=True)
def remove_segments() -> Iterator[None]:
    yield
    for segment in SEGMENTS.glob("cpkv-*"):
        segment.unlink()


def test_every_kind_of_leak_fails_its_test_and_is_named(tmp_path: Path) -> None:
    """A run of pytest over leaky tests, with nothing but the plugin."""
    (tmp_path / "leaky.py").write_text(LEAKY)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "leaky.py"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    errors = {line.split("::")[1].split(" ")[0]: line for line in ended.stdout.splitlines() if line.startswith("ERROR")}
    expected = {
        "test_process": "processes",
        "test_segment": "segments: cpkv-",
        "test_anonymous_segment": "segments: descriptor",
        "test_workspace": "workspaces",
        "test_thread": "threads: prefill rank 0",
        "test_page": "pages",
    }
    assert set(errors) == set(expected), ended.stdout
    for name, kind in expected.items():
        assert f"left behind: {kind}" in ended.stdout, f"{name}: {kind} is not named in\n{ended.stdout}"


def test_a_segment_counts_until_it_is_unlinked() -> None:
    with pytest.raises(AssertionError, match=rf"segments: cpkv-{os.getpid()}-x"), nothing_left_behind():
        (SEGMENTS / f"cpkv-{os.getpid()}-x").touch()
    with nothing_left_behind():
        (SEGMENTS / f"cpkv-{os.getpid()}-x").unlink()


def test_a_mapping_of_a_closed_descriptor_counts_until_it_is_unmapped() -> None:
    with pytest.raises(AssertionError, match=r"segments: .*mapping \S+ of memfd:cpkv-pool"), nothing_left_behind():
        descriptor = os.memfd_create("cpkv-pool")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
    with nothing_left_behind():
        memory.close()


def test_what_others_leave_does_not_count() -> None:
    """A segment, a folder and a thread of another process or another purpose."""
    with nothing_left_behind():
        segment = SEGMENTS / f"cpkv-{os.getpid()}1"
        segment.touch()
        folder = tempfile.TemporaryDirectory(prefix=f"cpkv-{os.getpid()}1-")
        done = threading.Event()
        thread = threading.Thread(target=done.wait, name="somebody else")
        thread.start()
    done.set()
    thread.join()
    folder.cleanup()


def test_pages_count_for_the_allocators_given() -> None:
    allocator = PageAllocator(8, PagePlacement(4, 2))
    with pytest.raises(AssertionError, match="pages"), nothing_left_behind(allocator):
        allocator.allocate("request", 1)
    with nothing_left_behind(allocator):
        allocator.free("request")
