"""Runs of bytes and the registered regions that they must lie in: pure arithmetic on addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

from cpkv.errors import ConfigError, TransferError

_REGIONS_NAMED = 4


@dataclass(frozen=True)
class Region:
    """One registered run of memory: `address` in the address space of its process, `length` in bytes."""

    address: int
    length: int

    @property
    def end(self) -> int:
        """The first address behind the region."""
        return self.address + self.length

    def holds(self, address: int, length: int) -> bool:
        """Whether all of [address, address + length) lies inside."""
        return self.address <= address and address + length <= self.end

    def __str__(self) -> str:
        return f"[{self.address:#x}, {self.end:#x}) of {self.length:,} bytes"


@dataclass(frozen=True)
class Peer:
    """How a peer names its engine, and the regions that it said it registered (from the handshake)."""

    session_id: str
    regions: tuple[Region, ...]


class Run(NamedTuple):
    """One contiguous write: `length` bytes from address `source` here to address `target` at the peer."""

    source: int
    target: int
    length: int


# The constructor of a named tuple takes three times as long, which shows where a thousand pages leave at once.
_run_of: Callable[[Iterable[int]], Run] = partial(tuple.__new__, Run)


def page_runs(source: int, sources: Sequence[int], target: int, targets: Sequence[int], length: int) -> list[Run]:
    """A run of `length` bytes for each page: from place `sources[i]` behind `source` to `targets[i]` behind `target`.

    Places count pages: page p lies p * length bytes behind its base.
    """
    here = [source + page * length for page in sources]
    there = [target + page * length for page in targets]
    return list(map(_run_of, zip(here, there, repeat(length, len(here)), strict=True)))


def merge_runs(runs: Sequence[Run], limit_bytes: int = 1 << 20) -> list[Run]:
    """Join neighbours that touch in source AND target, into runs of at most `limit_bytes`.

    Order and bytes are conserved; a run that is longer than the limit to begin with stays whole. A write costs about
    30 us over TCP whatever its size up to 64 KiB, which is why runs of 8 pages move four times as fast as single ones.
    """
    if limit_bytes < 1:
        raise ConfigError(f"limit_bytes is {limit_bytes}: a merged run needs room for 1 byte or more")
    merged: list[Run] = []
    first = Run(0, 0, 0)
    source_end = target_end = length = 0
    for run in runs:
        source, target, more = run
        if source == source_end and target == target_end and length + more <= limit_bytes:
            length += more
        else:
            # Most runs of scattered pages touch nothing, and making a run costs as much as looking at two.
            if length:
                merged.append(first if length == first.length else Run(first.source, first.target, length))
            first, length = run, more
        source_end, target_end = source + more, target + more
    if length:
        merged.append(first if length == first.length else Run(first.source, first.target, length))
    return merged


def place_runs(regions: Sequence[Region], peer: Peer, runs: Sequence[Run]) -> tuple[list[Run], frozenset[Region]]:
    """Find each run inside ONE of `regions` here and ONE region of `peer`; return them merged, and the regions read.

    TransferError names the first run that is empty or lies outside, with its bounds and those of the regions.
    """
    merged: list[Run] = []
    sources: set[Region] = set()
    here = there = Region(0, 0)
    begun = 0
    for number, (source, target, length) in enumerate(runs):
        # Thousands of runs share a pair of regions, and this check is what a transfer waits for before it starts.
        inside = here.address <= source and source + length <= here.end
        if inside and there.address <= target and target + length <= there.end and length > 0:
            continue
        # Runs are merged within one pair of regions only: a write over a seam would need two memory keys.
        merged.extend(merge_runs(runs[begun:number]))
        begun = number
        here, there = _place(regions, peer, runs[number], f"run {number} of {len(runs)}")
        sources.add(here)
    merged.extend(merge_runs(runs[begun:]))
    return merged, frozenset(sources)


def _place(regions: Sequence[Region], peer: Peer, run: Run, name: str) -> tuple[Region, Region]:
    """The regions that hold a run's source here and its target at the peer."""
    if run.length < 1:
        raise TransferError(f"{name} has {run.length} bytes; leave empty runs out")
    source = _holder(regions, run.source, run.length)
    if source is None:
        raise TransferError(
            f"{name} reads {Region(run.source, run.length)}, which is not inside one region that is registered "
            f"here ({listed(regions)}); register that memory, or end the run with its region"
        )
    target = _holder(peer.regions, run.target, run.length)
    if target is None:
        raise TransferError(
            f"{name} writes {Region(run.target, run.length)}, which is not inside one region that peer "
            f"{peer.session_id} registered ({listed(peer.regions)}); take the target from its handshake, or end "
            "the run with its region"
        )
    return source, target


def _holder(regions: Sequence[Region], address: int, length: int) -> Region | None:
    return next((region for region in regions if region.holds(address, length)), None)


def listed(regions: Sequence[Region]) -> str:
    """The regions in words, for a message: the first few by their bounds, the rest counted."""
    named = ", ".join(str(region) for region in regions[:_REGIONS_NAMED]) or "none"
    rest = len(regions) - _REGIONS_NAMED
    return named if rest <= 0 else f"{named} and {rest} more"
