"""Runs of bytes and the registered regions that they must lie in: pure arithmetic on addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

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

# The last address that a column can hold.
_LAST = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class Runs:
    """Many runs as columns, checked and merged at once: thousands of pages leave together, and a loop over them shows.

    Attributes:
        sources: int64 [n] addresses here.
        targets: int64 [n] addresses at the peer.
        lengths: int64 [n] bytes.
    """

    sources: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, runs: Runs | Sequence[Run]) -> Runs:
        """The same runs as columns.

        Raises:
            TransferError: a number does not fit in 64 bits.
        """
        if isinstance(runs, Runs):
            return runs
        return cls(*_int64(runs).reshape(-1, 3).T)

    @classmethod
    def of_pages(cls, here: Sequence[int], there: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> Runs:
        """Each page's run in the first span, then each page's in the next, and so on.

        Args:
            here: place of each page in the memory here; page p lies p lengths behind the start of a span.
            there: its place at the peer.
            spans: (start here, start at the peer, bytes of a page) each.

        Raises:
            TransferError: a page lies where no address is.
            ValueError: more pages are read than written, or fewer.
        """
        if len(here) != len(there):
            raise ValueError(f"{len(here)} pages are read and {len(there)} are written")
        places, table = _int64([here, there]), _int64(spans).reshape(-1, 3)
        starts, lengths = table[:, :2].T, table[:, 2]
        # A product or sum beyond 64 bits would begin anew, perhaps inside a region.
        most = (_LAST - starts) // np.maximum(lengths, 1) - 1
        if (starts < 0).any() or (places.max(axis=1, initial=0)[:, None] > most).any() or (places < 0).any():
            raise TransferError(
                f"pages {places.min()} to {places.max()} of {list(spans)} (start here, start at the peer, bytes of a "
                "page) lie beyond the last address or before the first; take pages and starts from the peer's handshake"
            )
        # [2, spans, pages]
        addresses = starts[:, :, None] + places[:, None, :] * lengths[:, None]
        sources, targets = addresses.reshape(2, len(spans) * len(here))
        return cls(sources, targets, np.repeat(lengths, len(here)))

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        """The runs of all parts, in order."""
        columns = ([part.sources for part in parts], [part.targets for part in parts], [part.lengths for part in parts])
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Run:
        return _run_of((int(self.sources[number]), int(self.targets[number]), int(self.lengths[number])))

    def as_list(self) -> list[Run]:
        """Each as a run."""
        columns = (self.sources.tolist(), self.targets.tolist(), self.lengths.tolist())
        return list(map(_run_of, zip(*columns, strict=True)))


def _int64(numbers: Any) -> np.ndarray:
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError as error:
        raise TransferError(
            f"an address or a length of a run does not fit in 64 bits ({error}); take the peer's from its handshake"
        ) from error


def merge_runs(runs: Runs, limit_bytes: int = 1 << 20, *, apart: np.ndarray | None = None) -> Runs:
    """Join neighbours that touch in source AND target, into runs of at most `limit_bytes`.

    Order and bytes are conserved; a run that is longer than the limit to begin with stays whole. A write costs about
    30 us over TCP whatever its size up to 64 KiB, which is why runs of 8 pages move four times as fast as single ones.

    Args:
        runs: none of them empty.
        limit_bytes: of a merged run.
        apart: bool [n - 1] neighbours that must not be merged, though they touch; None for none.
    """
    if limit_bytes < 1:
        raise ConfigError(f"limit_bytes is {limit_bytes}: a merged run needs room for 1 byte or more")
    if len(runs) < 2:
        return runs
    gap = runs.sources[1:] != runs.sources[:-1] + runs.lengths[:-1]
    gap |= runs.targets[1:] != runs.targets[:-1] + runs.lengths[:-1]
    if apart is not None:
        gap |= apart
    if gap.all():
        return runs
    ends = np.cumsum(runs.lengths)
    first = np.concatenate([[True], gap])
    firsts = np.flatnonzero(first)
    lasts = np.append(firsts[1:], len(runs)) - 1
    too_long = ends[lasts] - ends[firsts] + runs.lengths[firsts] > limit_bytes
    for begin, last in zip(firsts[too_long].tolist(), lasts[too_long].tolist(), strict=True):
        # From each first run on as many as fit; one that is too long by itself is alone.
        while begin <= last:
            first[begin] = True
            fit = int(np.searchsorted(ends, ends[begin] - runs.lengths[begin] + limit_bytes, "right"))
            begin = max(fit, begin + 1)
    begins = np.flatnonzero(first)
    return Runs(runs.sources[begins], runs.targets[begins], np.add.reduceat(runs.lengths, begins))


def place_runs(regions: Sequence[Region], peer: Peer, runs: Runs) -> tuple[Runs, frozenset[Region]]:
    """Find each run inside ONE of `regions` here and ONE region of `peer`; return them merged, and the regions read.

    TransferError names the first run that is empty or lies outside, with its bounds and those of the regions.
    """
    here = _holders(regions, runs.sources, runs.lengths)
    there = _holders(peer.regions, runs.targets, runs.lengths)
    wrong = (here < 0) | (there < 0) | (runs.lengths < 1)
    if wrong.any():
        number = int(wrong.argmax())
        raise _misplaced(regions, peer, runs[number], f"run {number} of {len(runs)}")
    # Runs are merged within one pair of regions only: a write over a seam would need two memory keys.
    seam = (here[1:] != here[:-1]) | (there[1:] != there[:-1])
    return merge_runs(runs, apart=seam), frozenset(regions[number] for number in np.unique(here).tolist())


def _holders(regions: Sequence[Region], addresses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The first region that holds each run, by number; -1 where none does."""
    found = np.full(len(addresses), -1)
    for number, region in reversed(list(enumerate(regions))):
        if region.address <= _LAST:
            # From the region's end, since the end of a run that is none may not fit in 64 bits.
            found[(addresses >= region.address) & (addresses <= min(region.end, _LAST) - lengths)] = number
    return found


def _misplaced(regions: Sequence[Region], peer: Peer, run: Run, name: str) -> TransferError:
    """Why a run cannot be written."""
    if run.length < 1:
        return TransferError(f"{name} has {run.length} bytes; leave empty runs out")
    if not any(region.holds(run.source, run.length) for region in regions):
        return TransferError(
            f"{name} reads {Region(run.source, run.length)}, which is not inside one region that is registered "
            f"here ({listed(regions)}); register that memory, or end the run with its region"
        )
    return TransferError(
        f"{name} writes {Region(run.target, run.length)}, which is not inside one region that peer "
        f"{peer.session_id} registered ({listed(peer.regions)}); take the target from its handshake, or end "
        "the run with its region"
    )


def listed(regions: Sequence[Region]) -> str:
    """The regions in words, for a message: the first few by their bounds, the rest counted."""
    named = ", ".join(str(region) for region in regions[:_REGIONS_NAMED]) or "none"
    rest = len(regions) - _REGIONS_NAMED
    return named if rest <= 0 else f"{named} and {rest} more"
