"""The split: which rank computes which token, against a loop written from its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.config.names import SplitStrategy
from cpkv.errors import PlanError
from cpkv.layout.split import TokenSplit, split_tokens
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

STRATEGIES: tuple[SplitStrategy, ...] = ("zigzag", "interleave")
Triple = tuple[int, int, int, int]
"""request, position, length of the request, token id"""


def triples_of(lengths: list[int]) -> list[Triple]:
    """One entry a token of the packed batch; token ids differ from every other number."""
    tokens = [(number, pos, length) for number, length in enumerate(lengths) for pos in range(length)]
    return [(*token, 10_000 + packed) for packed, token in enumerate(tokens)]


def naive_split(lengths: list[int], cp_size: int, strategy: SplitStrategy) -> list[list[Triple]]:
    """By the definition, token after token.

    zigzag: per request 2N blocks, the first `remainder` blocks one token longer, rank r takes blocks r and 2N-1-r.
    interleave: token i of the packed batch goes to rank i % N.
    """
    ranks: list[list[Triple]] = [[] for _ in range(cp_size)]
    tokens = iter(triples_of(lengths))
    if strategy == "interleave":
        turn = 0
        for token in tokens:
            ranks[turn].append(token)
            turn = 0 if turn == cp_size - 1 else turn + 1
        return ranks
    for length in lengths:
        size, remainder = divmod(length, 2 * cp_size)
        for block in range(2 * cp_size):
            for _ in range(size + 1 if block < remainder else size):
                taker = next(rank for rank in range(cp_size) if block in (rank, 2 * cp_size - 1 - rank))
                ranks[taker].append(next(tokens))
    return ranks


def check_split(lengths: list[int], cp_size: int, strategy: SplitStrategy) -> TokenSplit:
    split = split_tokens(lengths, cp_size, strategy)
    columns = [np.asarray(column) for column in zip(*triples_of(lengths), strict=True)]
    naive = naive_split(lengths, cp_size, strategy)
    for rank in range(cp_size):
        mine = split.rank_tokens[rank]
        pairs = list(zip(*(column[mine].tolist() for column in columns), strict=True))
        assert pairs == naive[rank], f"{strategy}, lengths {lengths}, rank {rank} of {cp_size}"
    assert split.max_tokens == max(map(len, naive))
    return split


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", range(1, 9))
def test_position_length_and_token_stay_together_for_every_token_count(cp_size: int, strategy: SplitStrategy) -> None:
    """Kinds 18 and 22: one request of 1 .. 4N tokens, and behind it requests of other lengths."""
    for tokens in range(1, 4 * cp_size + 1):
        check_split([tokens], cp_size, strategy)
        check_split([tokens, 1, 2 * cp_size + 1], cp_size, strategy)
        check_split([3, tokens], cp_size, strategy)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 8), st.sampled_from(STRATEGIES))
def test_any_batch_is_split_as_defined(lengths: list[int], cp_size: int, strategy: SplitStrategy) -> None:
    """Kind 18."""
    check_split(lengths, cp_size, strategy)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 8), st.sampled_from(STRATEGIES))
def test_gather_slots_put_padded_buffers_back_in_token_order(
    lengths: list[int], cp_size: int, strategy: SplitStrategy
) -> None:
    split = split_tokens(lengths, cp_size, strategy)
    buffers = np.full((cp_size, split.max_tokens), -1)
    for rank, tokens in enumerate(split.rank_tokens):
        buffers[rank, : len(tokens)] = tokens
    assert buffers.reshape(-1)[split.gather_slots].tolist() == list(range(sum(lengths)))
    padding = set(range(cp_size * split.max_tokens)) - set(split.gather_slots.tolist())
    assert (buffers.reshape(-1)[sorted(padding)] == -1).all(), "a slot of padding is read"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_ranks_without_a_token_get_an_empty_array_of_ints(cp_size: int, strategy: SplitStrategy) -> None:
    """Kind 21: fewer tokens than ranks."""
    for tokens in range(1, cp_size):
        split = check_split([tokens], cp_size, strategy)
        idle = [rank for rank in range(cp_size) if not len(split.rank_tokens[rank])]
        assert len(idle) == cp_size - tokens
        assert split.max_tokens == 1
        assert all(split.rank_tokens[rank].dtype == np.int64 for rank in idle)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 8), st.sampled_from(STRATEGIES))
def test_every_token_goes_to_one_rank_and_the_work_is_even(
    lengths: list[int], cp_size: int, strategy: SplitStrategy
) -> None:
    split = split_tokens(lengths, cp_size, strategy)
    everything = sorted(token for tokens in split.rank_tokens for token in tokens.tolist())
    assert everything == list(range(sum(lengths)))
    assert all((np.diff(tokens) > 0).all() for tokens in split.rank_tokens)
    counts = [len(tokens) for tokens in split.rank_tokens]
    assert max(counts) - min(counts) <= (len(lengths) if strategy == "zigzag" else 1)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_zigzag_gives_every_rank_the_same_causal_work(cp_size: int) -> None:
    """A rank pairs an early block with a late one: equal sums of visible keys where the blocks are equal."""
    split = split_tokens([2 * cp_size * 7], cp_size, "zigzag")
    work = {int((tokens + 1).sum()) for tokens in split.rank_tokens}
    assert len(work) == 1


def test_zigzag_splits_each_request_as_if_it_were_alone() -> None:
    """Kind 18: a neighbour in the batch moves no token of a request to another rank."""
    together = split_tokens([9, 3, 20], 4, "zigzag")
    for first, length in ((0, 9), (9, 3), (12, 20)):
        alone = split_tokens([length], 4, "zigzag")
        for rank in range(4):
            mine = together.rank_tokens[rank]
            inside = mine[(mine >= first) & (mine < first + length)] - first
            assert inside.tolist() == alone.rank_tokens[rank].tolist()


def test_the_drawing_at_the_top_of_the_module_is_right() -> None:
    zigzag = split_tokens([9, 3], 4, "zigzag").rank_tokens
    assert [tokens.tolist() for tokens in zigzag] == [[0, 1, 8, 9], [2, 7, 10], [3, 6, 11], [4, 5]]
    interleave = split_tokens([9, 3], 4, "interleave").rank_tokens
    assert [tokens.tolist() for tokens in interleave] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [[0], [5, 0], [3, -1, 2]])
def test_a_request_without_a_token_is_refused_with_its_length(lengths: list[int], strategy: SplitStrategy) -> None:
    with pytest.raises(PlanError, match=f"a request of {min(lengths)} tokens; leave such a request out of the batch"):
        split_tokens(lengths, 4, strategy)
