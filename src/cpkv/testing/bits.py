"""Comparison bit for bit, and words for the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpkv.layout.placement import PagePlacement
from cpkv.ops.reference.index_keys import unpack_index_keys
from cpkv.pool.page_pool import PagePool


def first_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Where two tensors first differ in a bit, with both values; empty when they are equal.

    NaNs with equal bits are equal, and +0.0 and -0.0 are not.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{tuple(ours.shape)} {ours.dtype} against {tuple(theirs.shape)} {theirs.dtype}"
    if ours.numel() == 0:
        return ""
    flat_ours, flat_theirs = ours.contiguous().reshape(-1), theirs.contiguous().reshape(-1)
    bytes_ours = flat_ours.view(torch.uint8).view(flat_ours.numel(), -1)
    bytes_theirs = flat_theirs.view(torch.uint8).view(flat_theirs.numel(), -1)
    wrong = (bytes_ours != bytes_theirs).any(dim=1).nonzero().flatten()
    if not len(wrong):
        return ""
    at = int(wrong[0])
    place = [int(value) for value in torch.unravel_index(wrong[0], ours.shape)]
    return f"{len(wrong)} values differ, the first at {place}: {flat_ours[at].item()} against {flat_theirs[at].item()}"


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Fail with the first difference."""
    difference = first_difference(ours, theirs)
    assert not difference, f"{what}: {difference}"


@dataclass(frozen=True)
class StoredRequest:
    """A request's rows where they are stored.

    Attributes:
        pools: by owner; one pool where a worker holds every page.
        placement: of these pools.
        pages: logical pages by position.
        tokens: how many of their rows hold tokens; the rest is never compared.
    """

    pools: Sequence[PagePool]
    placement: PagePlacement
    pages: Sequence[int]
    tokens: int

    def latent_rows(self) -> torch.Tensor:
        """uint8 [layers, tokens, latent_row_bytes], in position order."""
        pages = [self._pool(page).latent[self.placement.local_page(page)] for page in self.pages]
        return torch.cat(pages, dim=1)[:, : self.tokens]

    def index_keys(self) -> torch.Tensor:
        """uint8 [index slots, tokens, index_row_bytes], in position order."""
        geometry = self.pools[0].geometry
        rows = [
            torch.stack(
                [
                    unpack_index_keys(
                        self._pool(page).index[self.placement.local_page(page)],
                        torch.tensor([slot], device=self.pools[0].device),
                        tokens=geometry.page_size,
                        page_size=geometry.page_size,
                        key_bytes=geometry.row_format.index_key_bytes,
                    )
                    for slot in range(geometry.num_slots)
                ]
            )
            for page in self.pages
        ]
        return torch.cat(rows, dim=1)[:, : self.tokens]

    def where(self, position: int) -> str:
        """A position's place in words."""
        page = self.pages[position // self.placement.page_size]
        return (
            f"page {page} of owner {self.placement.owner(page)}, local page {self.placement.local_page(page)}, "
            f"offset {position % self.placement.page_size}"
        )

    def _pool(self, page: int) -> PagePool:
        return self.pools[self.placement.owner(page)]


def assert_same_rows(ours: StoredRequest, theirs: StoredRequest, what: str) -> None:
    """Fail at the first stored row that differs, with layer, position, both places and the first byte's values."""
    pairs = {
        "layer": (ours.latent_rows(), theirs.latent_rows()),
        "index slot": (ours.index_keys(), theirs.index_keys()),
    }
    for unit, (our_rows, their_rows) in pairs.items():
        wrong = (our_rows != their_rows).nonzero()
        if len(wrong):
            number, position, byte = wrong[0].tolist()
            raise AssertionError(
                f"{what}: {unit} {number}, position {position}, byte {byte}: {our_rows[number, position, byte]} at "
                f"{ours.where(position)}, and {their_rows[number, position, byte]} at {theirs.where(position)}"
            )
