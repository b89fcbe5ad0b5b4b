"""A pairwise covering set of what a prefill can look like: every pair of values occurs in some case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from allpairspy import AllPairs

from cpkv.testing.checkpoints import Family

PAGE = 16
LONG = 5000
# The reference over LONG tokens takes seconds, so each family meets it with one number of heads.
LONG_HEADS = {"glm5": 16, "glm52": 4, "deepseek-v32": 16}


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

    def __str__(self) -> str:
        """For test ids."""
        return "-".join(map(str, self))


LENGTHS = ("5000", "chunk+1", "chunk-1", "cp*page+1", "cp*page-1", "page+1", "page", "page-1", "1")
PARAMETERS = (
    ("glm5", "glm52", "deepseek-v32"),
    LENGTHS,
    (1, 2, 3, 4),
    ("zigzag", "interleave"),
    (37, 250, 700),
    (16, 4),
)


def allowed(row: Sequence[object]) -> bool:
    """Whether a (partial) case may be in the set."""
    return not (len(row) > 5 and row[1] == "5000" and LONG_HEADS[str(row[0])] != row[5])


def covering_set() -> list[Case]:
    """About 40 cases."""
    return [Case(*row) for row in AllPairs(PARAMETERS, filter_func=allowed)]
