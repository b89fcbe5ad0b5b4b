"""The memory of one rank: its pages of latent rows and index keys."""

from cpkv.pool.page_pool import PagePool

__all__ = ["PagePool"]
