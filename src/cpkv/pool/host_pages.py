"""A GPU pool's pages as transfer engines see them that read and write memory of the host alone.

rank 2, pool on its GPU     | trash | page 6 | page 10 | ...
                                        |  stage [1]          (prefill)      ^ copy_pages [1]     (decode)
copy, memory of the host    | trash | page 6 | ...     | ...
"""

from __future__ import annotations

from collections.abc import Sequence

from cpkv.pool.page_pool import PagePool, PageSpan


class HostPages:
    """The pages of a pool, copied to memory of the host before they are sent. As large as the pool.

    Args:
        pool: on a GPU as a rule.

    Raises:
        ConfigError: the memory is not there.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._copy = PagePool(pool.geometry, pool.local_pages, pinned=pool.device.type == "cuda")

    def stage(self, local_pages: Sequence[int]) -> None:
        """Copy pages; they are complete, and are not written before their transfer has ended."""
        self._copy.copy_pages(self._pool, local_pages)

    def regions(self) -> tuple[PageSpan, PageSpan]:
        """The two allocations."""
        return self._copy.regions()

    def page_spans(self, local_page: int) -> tuple[PageSpan, PageSpan]:
        """The bytes of one page: one span in each allocation."""
        return self._copy.page_spans(local_page)

    def page_digest(self, local_page: int) -> str:
        """SHA-256 of a page's bytes as they lie on the GPU: a wrong copy shows too."""
        return self._pool.page_digest(local_page)
