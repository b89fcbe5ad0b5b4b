"""What a prefill can look like: a pairwise covering set for every day, the full product for the night."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from allpairspy import AllPairs

from cpkv.testing.checkpoints import Family, TinyShape

PAGE = 16
LONG = 5000
# Two layers over LONG tokens: one dense and one of experts, on GLM-5.2 one with an indexer and one that reuses it.
LONG_SHAPE = TinyShape(num_hidden_layers=2)
# Ranks, split, chunk and index heads with which the covering set meets that length.
LONG_SIZES = (4, "zigzag", 250, 4)


class Case(NamedTuple):
    """One prefill."""

    family: Family
    length_name: str
    cp_size: int
    strategy: str
    chunk_size: int
    index_heads: int

    @property
    def tokens(self) -> int:
        """Prompt tokens that the name of the length stands for."""
        return {
            "1": 1,
            "page-1": PAGE - 1,
            "page": PAGE,
            "page+1": PAGE + 1,
            "cp*page-1": self.cp_size * PAGE - 1,
            "cp*page+1": self.cp_size * PAGE + 1,
            "chunk-1": self.chunk_size - 1,
            "chunk+1": self.chunk_size + 1,
            "5000": LONG,
        }[self.length_name]

    @property
    def shape(self) -> TinyShape | None:
        """Sizes of the model; None for the usual ones."""
        return LONG_SHAPE if self.tokens == LONG else None

    def __str__(self) -> str:
        """For test ids."""
        return "-".join(map(str, self))


LENGTHS = ("5000", "chunk+1", "chunk-1", "cp*page+1", "cp*page-1", "page+1", "page", "page-1", "1")
PARAMETERS: tuple[Sequence[object], ...] = (
    ("glm5", "glm52", "deepseek-v32"),
    LENGTHS,
    (1, 2, 3, 4),
    ("zigzag", "interleave"),
    # No multiples of the page; the last is longer than every prompt of the set but the long one and its own.
    (37, 250, 700),
    (16, 4),
)


def allowed(case: Case, long: Family | None) -> bool:
    """Whether the covering set is about this case.

    References over LONG tokens take seconds, so the family `long` alone meets that length, and once.
    """
    return case.length_name != "5000" or (case.family == long and case[2:] == LONG_SIZES)


def covering_set(long: Family | None = None) -> list[Case]:
    """About 40 cases in which every pair of values occurs that `allowed` leaves possible; the same ones every time."""
    cases = [Case(*row) for row in AllPairs((PARAMETERS[0], LENGTHS[1:], *PARAMETERS[2:]))]
    if long is not None:
        cases.append(Case(long, "5000", *LONG_SIZES))
    return cases


def full_product() -> list[Case]:
    """Every case."""
    return [Case(*row) for row in itertools.product(*PARAMETERS)]  # type: ignore[arg-type]


def uncovered_pairs(cases: Sequence[Case], long: Family | None) -> set[tuple[tuple[int, object], tuple[int, object]]]:
    """Pairs of (number of the parameter, value) that occur in no case although `allowed` leaves them possible."""

    def pairs(rows: Sequence[Sequence[object]]) -> set[tuple[tuple[int, object], tuple[int, object]]]:
        return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}

    return pairs([case for case in full_product() if allowed(case, long)]) - pairs(cases)
