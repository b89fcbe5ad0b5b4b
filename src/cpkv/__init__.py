"""cpkv keeps one copy of the KV cache across the ranks of a context-parallel group.

Importing this package, or any part of `cpkv.layout`, `cpkv.cache`, `cpkv.config`, `cpkv.protocol` and
`cpkv.errors`, imports neither torch nor a transfer engine.
"""

__version__ = "0.1.0"
