"""Which rank computes which tokens of a packed batch. Ownership of pages never depends on it.

A batch of two requests of 9 and 3 tokens, packed as tokens 0..11, over 4 ranks:

    zigzag       per request 2N blocks, the first `tokens % 2N` one longer; rank r takes blocks r and 2N-1-r
      request 0  blocks 0,1 | 2 | 3 | 4 | 5 | 6 | 7 | 8      request 1  blocks 9 | 10 | 11 | - | - | - | - | -
      rank 0     0 1 8 9     rank 1  2 7 10     rank 2  3 6 11     rank 3  4 5
    interleave   token i goes to rank i % N
      rank 0     0 4 8       rank 1  1 5 9      rank 2  2 6 10     rank 3  3 7 11
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpkv.config.names import SplitStrategy
from cpkv.errors import PlanError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of a packed batch by rank, and the way back.

    Attributes:
        rank_tokens: per rank, the packed token numbers that it computes, ascending.
        gather_slots: [tokens] for each packed token, its row in the ranks' all-gathered buffers, each padded
            to `max_tokens` rows: `rank * max_tokens + place`.
        max_tokens: rows that each rank contributes to an all-gather, padding included.
    """

    rank_tokens: tuple[IntArray, ...]
    gather_slots: IntArray
    max_tokens: int


def _zigzag_owner(tokens: int, cp_size: int) -> IntArray:
    """[tokens] the computing rank of each token of one request."""
    blocks = np.arange(2 * cp_size)
    lengths = tokens // (2 * cp_size) + (blocks < tokens % (2 * cp_size))
    ranks = np.where(blocks < cp_size, blocks, 2 * cp_size - 1 - blocks)
    return np.repeat(ranks, lengths).astype(np.int64)


def split_tokens(lengths: Sequence[int], cp_size: int, strategy: SplitStrategy) -> TokenSplit:
    """Split a batch of requests, `lengths` tokens each, over `cp_size` ranks.

    Every token goes to exactly one rank; a rank may get none.

    Raises:
        PlanError: a request of no tokens.
    """
    if any(length < 1 for length in lengths):
        raise PlanError(f"a batch holds a request of {min(lengths)} tokens; leave such a request out of the batch")
    if strategy == "zigzag":
        ranks = np.concatenate([_zigzag_owner(length, cp_size) for length in lengths])
    else:
        ranks = np.arange(sum(lengths), dtype=np.int64) % cp_size
    rank_tokens = tuple(np.flatnonzero(ranks == rank).astype(np.int64) for rank in range(cp_size))
    max_tokens = max(len(tokens) for tokens in rank_tokens)
    gather_slots = np.empty(len(ranks), dtype=np.int64)
    for rank, tokens in enumerate(rank_tokens):
        gather_slots[tokens] = rank * max_tokens + np.arange(len(tokens))
    return TokenSplit(rank_tokens, gather_slots, max_tokens)
