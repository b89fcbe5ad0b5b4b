"""One rank's segment of shared memory: an anonymous file that nobody can shrink, grow or write a second time.

create_segment      all pages are taken now, so that a lack of memory is an error here and never SIGBUS later
(the owner maps its segment writable)
seal_segment        from here on the size is fixed and every new mapping, of whomever, is read-only
why_not_segment     a receiver looks at size, seals and pages of what it was sent before it maps it
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpkv.errors import ConfigError
from cpkv.pool.page_pool import POISON_BYTE

# From linux/fcntl.h, since Linux 5.1; Python names it from 3.13 on.
F_SEAL_FUTURE_WRITE = 0x10
NEEDED_SEALS = {
    "F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK,
    "F_SEAL_GROW": fcntl.F_SEAL_GROW,
    "F_SEAL_FUTURE_WRITE": F_SEAL_FUTURE_WRITE,
    "F_SEAL_SEAL": fcntl.F_SEAL_SEAL,
}
FILL_CHUNK_BYTES = 1 << 20


def round_segment(num_bytes: int, unit_bytes: int, page_bytes: int = mmap.PAGESIZE) -> int:
    """Bytes rounded up so that what follows starts at a whole unit (row or index block) and at a whole memory page."""
    step = math.lcm(page_bytes, unit_bytes)
    return -(-num_bytes // step) * step


@dataclass(frozen=True)
class RangeShape:
    """Sizes of one range, equal on all ranks; `cpkv.pool.unified_memory` has the drawing.

    Args:
        name: what lies there, as in the name of its segments (`memfd:cpkv-<name>`).
        segment_bytes: of every rank, rounded by `round_segment`.
        used_bytes: of a segment, from its start: the pool.
        unit_bytes: a row or an index block.
        tail_bytes: private bytes behind the last segment, before rounding; 0 for none.
        page_bytes: of the memory: what can be mapped at once.
    """

    name: str
    segment_bytes: int
    used_bytes: int
    unit_bytes: int
    tail_bytes: int
    page_bytes: int = mmap.PAGESIZE

    @classmethod
    def of(
        cls, name: str, used_bytes: int, unit_bytes: int, tail_bytes: int = 0, page_bytes: int = mmap.PAGESIZE
    ) -> RangeShape:
        """The shape for pools of `used_bytes` bytes."""
        segment_bytes = round_segment(used_bytes, unit_bytes, page_bytes)
        return cls(name, segment_bytes, used_bytes, unit_bytes, tail_bytes, page_bytes)

    @property
    def rounded_tail_bytes(self) -> int:
        """The tail as mapped: whole memory pages and whole units."""
        return round_segment(self.tail_bytes, self.unit_bytes, self.page_bytes)

    def total_bytes(self, cp_size: int) -> int:
        """Length of the range: every rank's segment and the tail."""
        return cp_size * self.segment_bytes + self.rounded_tail_bytes

    def check(self) -> None:
        """Raise ConfigError unless every segment starts at a whole unit and holds what is used."""
        if min(self.unit_bytes, self.used_bytes, self.page_bytes) < 1 or self.tail_bytes < 0:
            raise ConfigError(f"{self}: unit, used and page_bytes must be at least 1, tail_bytes at least 0")
        rounded = round_segment(self.segment_bytes, self.unit_bytes, self.page_bytes)
        if self.segment_bytes != rounded or self.segment_bytes < self.used_bytes:
            wanted = round_segment(max(self.segment_bytes, self.used_bytes), self.unit_bytes, self.page_bytes)
            raise ConfigError(f"{self}: segment_bytes must be rounded and hold used_bytes; set it to {wanted}")


def host_identity() -> str:
    """A word that is the same for all processes of one running system and differs between systems."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def available_bytes() -> int:
    """Memory that this system gives without swapping, by the kernel's estimate and the container's limit."""
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(words["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    # No such file, or the word "max": no limit.
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        taken = int((group / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        # What is only a cache of files is given up before anything fails.
        available = min(available, limit - taken + int(counts.get("inactive_file", 0)))
    return max(0, available)


def check_memory(num_bytes: int, what: str) -> None:
    """Refuse what the system cannot give; taking it all the same would let the kernel kill a process.

    Raises:
        ConfigError: with the bytes needed and the bytes there.
    """
    available = available_bytes()
    if num_bytes > available:
        raise ConfigError(
            f"{what} needs {num_bytes} bytes of shared memory and {available} bytes are available; lower --num-pages"
        )


def create_segment(shape: RangeShape, *, poison: bool) -> int:
    """Take a segment's memory; the caller maps it writable, calls `seal_segment`, and closes the descriptor.

    Args:
        shape: of the range.
        poison: fill all of it with 0xFF (NaN in every float format); zeros otherwise.

    Returns:
        A descriptor of the file, closed on exec.

    Raises:
        ConfigError: the memory is not there.
    """
    check_memory(shape.segment_bytes, f"the {shape.name} pool of one rank")
    descriptor = os.memfd_create(f"cpkv-{shape.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, shape.segment_bytes)
        os.posix_fallocate(descriptor, 0, shape.segment_bytes)
        if poison:
            chunk = bytes([POISON_BYTE]) * min(FILL_CHUNK_BYTES, shape.segment_bytes)
            filled = 0
            while filled < shape.segment_bytes:
                filled += os.pwrite(descriptor, chunk[: shape.segment_bytes - filled], filled)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"the {shape.name} pool of one rank needs {shape.segment_bytes} bytes of shared memory and the system does "
            f"not give them ({error}; {available_bytes()} bytes are available); lower --num-pages"
        ) from error
    return descriptor


def seal_segment(descriptor: int) -> None:
    """Fix the size, and make every mapping from now on read-only; mappings that exist keep their rights."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(NEEDED_SEALS.values()))


def why_not_segment(descriptor: int, shape: RangeShape) -> str | None:
    """Why a descriptor from another process must not be mapped as a segment of this shape; None when it may be."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "it is no memory file (memfd)"
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return "it is a file on a disk and no memory file (memfd)"
    if missing := [name for name, seal in NEEDED_SEALS.items() if not seals & seal]:
        return f"its memory file is not sealed: {', '.join(missing)} missing"
    # The seals above hold the size, so what is read now stays true.
    status = os.fstat(descriptor)
    if status.st_size != shape.segment_bytes:
        return f"its memory file has {status.st_size} bytes instead of {shape.segment_bytes}"
    if status.st_blocks * 512 < shape.segment_bytes:
        return f"only {status.st_blocks * 512} of its {shape.segment_bytes} bytes have memory behind them"
    return None


def why_not_unified() -> str | None:
    """Why this system cannot share sealed memory between processes, in words; None when it can. Tries it."""
    if sys.platform != "linux":
        return f"unified memory needs Linux, and this is {sys.platform}"
    try:
        descriptor = os.memfd_create("cpkv-trial", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        return f"this system gives no memory files: memfd_create fails ({error})"
    try:
        return _why_not_sealed(descriptor)
    finally:
        os.close(descriptor)


def _why_not_sealed(descriptor: int) -> str | None:
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE):
            seal_segment(descriptor)
        mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ).close()
    except OSError as error:
        return f"this kernel cannot seal a memory file against writing (F_SEAL_FUTURE_WRITE, Linux 5.1): {error}"
    try:
        mmap.mmap(descriptor, mmap.PAGESIZE).close()
    except OSError as error:
        return None if error.errno in (errno.EPERM, errno.EACCES) else f"mapping a sealed memory file fails: {error}"
    return "this kernel lets a sealed memory file be written"


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
