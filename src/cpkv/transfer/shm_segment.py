"""Memory that other processes of this host write into: a sealed memory file, found again by its address.

Nothing keeps a list of what was allocated. The mapping holds the file's descriptor, and the system's own tables lead
from an address to the file: so an engine that is rebuilt finds the memory of the one before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cpkv.errors import ConfigError
from cpkv.pool.sealed_segment import F_SEAL_FUTURE_WRITE, RangeShape, create_segment
from cpkv.transfer.runs import Region

# The size is held, so that no access of whoever maps it can fault; writing stays allowed, unlike for unified pools.
NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NO_WRITING = fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE


class Segment(NamedTuple):
    """Where a region lies in a memory file: an open descriptor of the file, and the offset in bytes."""

    descriptor: int
    offset: int


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    device: int
    inode: int


def allocate_segment(num_bytes: int) -> memoryview:
    """Memory [num_bytes] of zeros on a sealed file of its own; unmapped with the last view over it.

    Raises:
        ConfigError: the memory is not there.
    """
    if num_bytes < 1:
        raise ConfigError(f"{num_bytes} bytes of shared memory were asked for; ask for 1 or more")
    descriptor = create_segment(RangeShape.of("transfer", num_bytes, 1), poison=False)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, NEEDED_SEALS)
        return memoryview(map_segment(descriptor))[:num_bytes]
    finally:
        os.close(descriptor)


def map_segment(descriptor: int) -> mmap.mmap:
    """All of a file, writable; the mapping has a descriptor of its own. Raises ConfigError if it cannot be mapped."""
    num_bytes = os.fstat(descriptor).st_size
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{num_bytes} bytes of shared memory cannot be mapped ({error}); raise the limits on addresses "
            "(ulimit -v) and vm.max_map_count"
        ) from error


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Where writable memory starts in this process."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def why_not_segment(descriptor: int, end: int) -> str | None:
    """Why a descriptor from another process must not be mapped and written up to `end`; None when it may be."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return "it is no memory file (memfd)"
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return "it is a file on a disk and no memory file (memfd)"
    if seals & NEEDED_SEALS != NEEDED_SEALS:
        return "its memory file is not sealed against shrinking"
    if seals & _NO_WRITING:
        return "its memory file is sealed against writing"
    # The seals hold the size, so what is read now stays true.
    status = os.fstat(descriptor)
    if status.st_size < end:
        return f"its memory file has {status.st_size} bytes and {end} are needed"
    if status.st_blocks * 512 < status.st_size:
        return f"only {status.st_blocks * 512} of its {status.st_size} bytes have memory behind them"
    return None


def find_segment(region: Region) -> Segment | None:
    """The memory file that `region` of this process lies in, all of it, if others can write to it; the descriptor is
    the caller's to close.
    """
    first: _Mapping | None = None
    end = region.address
    for mapping in _shared_mappings():
        # A lock or an advice on a part of a mapping splits it in two.
        if mapping.start <= end < mapping.end and (first is None or _continues(first, mapping)):
            first, end = first or mapping, mapping.end
    if first is None or end < region.end:
        return None
    offset = first.offset + region.address - first.start
    descriptor = _open_descriptor(first)
    if descriptor is None:
        return None
    if why_not_segment(descriptor, offset + region.length):
        os.close(descriptor)
        return None
    return Segment(descriptor, offset)


def _continues(first: _Mapping, mapping: _Mapping) -> bool:
    same_file = (first.device, first.inode) == (mapping.device, mapping.inode)
    return same_file and mapping.offset - first.offset == mapping.start - first.start


def _shared_mappings() -> Iterator[_Mapping]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, rights, offset, device, inode, *_ = line.split()
        if rights.startswith("rw") and rights[3] == "s":
            start, _, end = addresses.partition("-")
            major, _, minor = device.partition(":")
            number = os.makedev(int(major, 16), int(minor, 16))
            yield _Mapping(int(start, 16), int(end, 16), int(offset, 16), number, int(inode))


def _open_descriptor(mapping: _Mapping) -> int | None:
    """A new descriptor of the file behind a mapping; None when this process has none left."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = os.dup(int(name))
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) == (mapping.device, mapping.inode):
                return descriptor
            os.close(descriptor)
    return None


def why_not_shared() -> str | None:
    """Why this system cannot share memory files between processes, in words; None when it can. Tries it."""
    if sys.platform != "linux":
        return f"shm needs Linux (memfd), and this is {sys.platform}; use nixl"
    try:
        memory = allocate_segment(1)
        segment = find_segment(Region(address_of(memory), 1))
    except (ConfigError, OSError) as error:
        return f"this system gives no sealed memory files ({error}); use tcp"
    if segment is None:
        return "/proc/self/maps does not show this process's own memory files; mount /proc, or use tcp"
    os.close(segment.descriptor)
    return None
