"""The pure part of the layout: placement, split, pool geometry, batch plans, schedules and the transfer map.

Integer functions and frozen values; nothing here imports torch or opens a socket.
"""

from cpkv.layout.placement import PagePlacement
from cpkv.layout.pool_geometry import PoolGeometry, index_slots, local_pages
from cpkv.layout.row_format import RowFormat
from cpkv.layout.split import TokenSplit, split_tokens

__all__ = ["PagePlacement", "PoolGeometry", "RowFormat", "TokenSplit", "index_slots", "local_pages", "split_tokens"]
