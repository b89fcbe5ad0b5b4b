"""Fixtures for any test suite: `pytest_plugins = ["cpkv.testing.fixtures"]` in its conftest.py turns them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cpkv.cache.allocator import PageAllocator
from cpkv.testing.leaks import nothing_left_behind


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails every test that leaves a process, a shared-memory segment, a workspace or a worker thread behind."""
    with nothing_left_behind():
        yield


@pytest.fixture
def watch_pages() -> Iterator[Callable[[PageAllocator], PageAllocator]]:
    """Takes note of an allocator and returns it; the test fails if in the end any of its pages is not free."""
    watched: list[PageAllocator] = []

    def watch(allocator: PageAllocator) -> PageAllocator:
        watched.append(allocator)
        return allocator

    yield watch
    with nothing_left_behind(*watched):
        pass
