"""Comparison bit for bit, and words for the first difference."""

from __future__ import annotations

import torch

from cpkv.layout.placement import PagePlacement
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


def gathered_pages(pools: list[PagePool], placement: PagePlacement, pages: tuple[int, ...]) -> torch.Tensor:
    """A request's latent pages uint8 [pages, layers, page_size, row_bytes], each from its owner's pool."""
    return torch.stack([pools[placement.owner(page)].latent[placement.local_page(page)] for page in pages])
