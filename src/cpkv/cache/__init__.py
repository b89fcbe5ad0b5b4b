"""Who holds which page: the allocator. Pure bookkeeping, without torch."""

from cpkv.cache.allocator import PageAllocator

__all__ = ["PageAllocator"]
