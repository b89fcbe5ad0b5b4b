"""Where a page lives: a bijection between logical pages and (owner, local page), by arithmetic alone.

With cp_size = 4 and page_size = 2 (r = a reserved page, local page 0 of each rank, its trash page):

    logical page    0r   1r   2r   3r   4    5    6    7    8    9   ...
    owner           0    1    2    3    0    1    2    3    0    1
    local page      0    0    0    0    1    1    1    1    2    2
    locs            0,1  2,3  4,5  6,7  8,9  10,11  ...

    rank 0 holds [0r 4 8 ..]   rank 1 [1r 5 9 ..]   rank 2 [2r 6 10 ..]   rank 3 [3r 7 11 ..]

The value -1 means "no token" and stays -1 through every translation; it is handled here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType, TypeVar

from cpkv.errors import ConfigError

Page = NewType("Page", int)
LocalPage = NewType("LocalPage", int)
Loc = NewType("Loc", int)
LocalRow = NewType("LocalRow", int)

Ints = TypeVar("Ints", bound=Any)


def keep_none(value: Ints, translated: Ints) -> Ints:
    """`translated` where `value` is a token or page (>= 0), -1 elsewhere; ints and int arrays alike."""
    return (translated + 1) * (value >= 0) - 1


@dataclass(frozen=True)
class PagePlacement:
    """Page p lives on rank p % cp_size, at local page p // cp_size.

    Every method takes and returns an int or an int array (numpy, or any array with the same operators), and
    keeps -1. The caller must not pass a value that is translated already: `loc` and `local_row`, `page` and
    `local_page` are different units.
    """

    page_size: int
    cp_size: int

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive."""
        for name in ("page_size", "cp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    @property
    def reserved_pages(self) -> int:
        """How many logical pages are never allocated: one trash page on each rank."""
        return self.cp_size

    def owner(self, page: Ints) -> Ints:
        """The rank that stores a page."""
        return keep_none(page, page % self.cp_size)

    def local_page(self, page: Ints) -> Ints:
        """The place of a page on its owner."""
        return keep_none(page, page // self.cp_size)

    def page(self, owner: Ints, local_page: Ints) -> Ints:
        """The logical page at a place of an owner: the inverse of `owner` and `local_page`."""
        return keep_none(local_page, local_page * self.cp_size + owner)

    def page_of_loc(self, loc: Ints) -> Ints:
        """The logical page that holds a loc."""
        return keep_none(loc, loc // self.page_size)

    def offset_of_loc(self, loc: Ints) -> Ints:
        """The place of a loc inside its page."""
        return keep_none(loc, loc % self.page_size)

    def owner_of_loc(self, loc: Ints) -> Ints:
        """The rank that stores a loc."""
        return keep_none(loc, loc // self.page_size % self.cp_size)

    def local_row(self, loc: Ints) -> Ints:
        """The row of a loc on its owner, in units of tokens of one layer."""
        local_page = loc // self.page_size // self.cp_size
        return keep_none(loc, local_page * self.page_size + loc % self.page_size)

    def loc(self, owner: Ints, local_row: Ints) -> Ints:
        """The loc at a row of an owner: the inverse of `owner_of_loc` and `local_row`."""
        page = local_row // self.page_size * self.cp_size + owner
        return keep_none(local_row, page * self.page_size + local_row % self.page_size)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)
