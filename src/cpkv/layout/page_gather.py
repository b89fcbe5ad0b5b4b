"""Which pages a batch gathers from whom, and where each lands: by owner, padded to the same number from each.

4 ranks, pages 4 5 6 8 9 of the batch; every rank contributes max_pages = 2 and pads with its trash page:

    gathered page   0    1    2    3    4    5    6    7
    page            4    8    5    9    6    -    -    -
    owner           0    0    1    1    2    2    3    3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpkv.layout.placement import PagePlacement
from cpkv.layout.split import IntArray


@dataclass(frozen=True)
class PageGather:
    """Pages by owner, and the gathered page of each.

    Attributes:
        local_pages: per owner, the local pages that it contributes; fewer than `max_pages` on most ranks.
        max_pages: pages that each owner contributes, its padding included.
        gathered_pages: per list of pages, the place of each among the gathered ones, owner by owner.
        num_pages: different pages, without padding.
    """

    local_pages: tuple[IntArray, ...]
    max_pages: int
    gathered_pages: tuple[IntArray, ...]
    num_pages: int

    @property
    def padded_pages(self) -> int:
        """Pages that arrive on every rank, its own and the padding included."""
        return self.max_pages * len(self.local_pages)

    def padded_local_pages(self, owner: int) -> IntArray:
        """What an owner contributes: its pages, then its trash page (0) again and again."""
        return np.pad(self.local_pages[owner], (0, self.max_pages - len(self.local_pages[owner])))

    @classmethod
    def of(cls, page_lists: Sequence[IntArray], placement: PagePlacement) -> PageGather:
        """Plan the gather of lists of logical pages; a page in several of them is gathered once."""
        pages = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *page_lists]))
        owners = placement.owner(pages)
        counts = np.bincount(owners, minlength=placement.cp_size)
        max_pages = int(counts.max())
        # `pages` ascend within each owner, so a page's place there is how many of that owner's pages came before it.
        by_owner = np.argsort(owners, kind="stable")
        first_of_owner = np.cumsum(counts) - counts
        place = np.empty_like(pages)
        place[by_owner] = np.arange(len(pages)) - np.repeat(first_of_owner, counts)
        gathered = owners * max_pages + place
        return cls(
            local_pages=tuple(placement.local_page(pages[owners == owner]) for owner in range(placement.cp_size)),
            max_pages=max_pages,
            gathered_pages=tuple(gathered[np.searchsorted(pages, listed)] for listed in page_lists),
            num_pages=len(pages),
        )
