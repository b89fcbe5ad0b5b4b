"""Every rank's pool side by side in one range of addresses, so that kernels read all of them and nothing is copied.

The range of latent rows of 4 ranks, as rank 1 sees it:

    | rank 0 (ro) | rank 1 (rw) | rank 2 (ro) | rank 3 (ro) | private tail (rw) |
    0             S            2S            3S            4S                 total

S is `segment_bytes`: a multiple of the memory page and of the row, so that every segment and the tail start at a whole
row, and `memory.view(-1, row bytes)` numbers all rows through. A second range of the same form holds the index blocks.

On the CPU, each segment is a sealed memory file of its owner, mapped by all, and a write into another rank's segment
ends the process (SIGSEGV): there is no copy of it that could be spoiled. `cpkv.pool.vmm_memory` has the GPU's form of
the same. The tail belongs to this rank alone; the current rows of a
batch lie there, since a kernel takes one base pointer. A range stays mapped as long as any tensor over it lives.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from cpkv.errors import ConfigError
from cpkv.pool.descriptor_exchange import exchange_descriptors
from cpkv.pool.page_pool import POISON_BYTE
from cpkv.pool.sealed_segment import (
    RangeShape,
    check_memory,
    close_all,
    create_segment,
    host_identity,
    seal_segment,
    why_not_segment,
    why_not_unified,
)
from cpkv.pool.segment_hello import EXCHANGE_VERSION, SegmentDescription
from cpkv.pool.segment_memory import SegmentMapping, SegmentMemory
from cpkv.pool.vmm_memory import VmmMemory

# From Linux's mman.h, equal on all machines that torch runs on; Python's mmap does not name them.
PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value


def _load_libc() -> ctypes.CDLL:
    """Python's mmap chooses the address itself, so the C function is called."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.restype = ctypes.c_int
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class RangeMapping:
    """Addresses reserved for a whole range, and what has been mapped into them so far.

    Args:
        shape: of the range.
        rank: whose segment is mapped writable.
        cp_size: segments.

    Raises:
        ConfigError: the addresses are not there.
    """

    def __init__(self, shape: RangeShape, rank: int, cp_size: int) -> None:
        self.shape, self.rank, self.cp_size = shape, rank, cp_size
        self.num_bytes = shape.total_bytes(cp_size)
        self._libc = _load_libc()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._base = self._map(None, self.num_bytes, PROT_NONE, flags, -1)
        buffer = (ctypes.c_uint8 * self.num_bytes).from_address(self._base)
        # Tensors hold the buffer and not this object: the last one that goes takes the mapping along.
        self._unmap = weakref.finalize(buffer, self._libc.munmap, self._base, self.num_bytes)
        # Tensors may outlive the interpreter's shutdown; the system unmaps then.
        self._unmap.atexit = False
        self._buffer: ctypes.Array[ctypes.c_uint8] | None = buffer
        if shape.rounded_tail_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
            address = self._base + cp_size * shape.segment_bytes
            try:
                self._map(address, shape.rounded_tail_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)
            except ConfigError:
                self.close()
                raise

    def _map(self, address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
        found = self._libc.mmap(address, length, protection, flags, descriptor, 0)
        if found in (None, MAP_FAILED):
            cause = os.strerror(ctypes.get_errno())
            raise ConfigError(
                f"rank {self.rank} cannot map {length} of the {self.num_bytes} bytes of the {self.shape.name} range "
                f"({cause}); lower --num-pages, or raise the limits on addresses (ulimit -v) and vm.max_map_count"
            )
        return int(found)

    def map_segment(self, owner: int, descriptor: int) -> None:
        """Map the segment of `owner`: writable when it is ours, else read-only."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if owner == self.rank else 0)
        address = self._base + owner * self.shape.segment_bytes
        self._map(address, self.shape.segment_bytes, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor)

    def close(self) -> None:
        """Unmap everything now. Only as long as there is no tensor over it."""
        self._buffer = None
        self._unmap()

    def tensor(self) -> torch.Tensor:
        """A tensor uint8 [num_bytes] over the whole range; it and its views now own the mapping. Once."""
        if self._buffer is None:
            raise ConfigError(f"the {self.shape.name} range of rank {self.rank} is unmapped or has its tensor already")
        buffer, self._buffer = self._buffer, None
        return torch.frombuffer(buffer, dtype=torch.uint8)


class SealedMemory:
    """Memory of the host, in sealed memory files; see `SegmentMemory`."""

    page_bytes = mmap.PAGESIZE

    def check(self, rank: int, cp_size: int, num_bytes: int) -> None:
        """Refuse a system that cannot share, and pools of all ranks that it cannot hold."""
        if reason := why_not_unified():
            raise ConfigError(f"rank {rank} cannot use --kv-view unified: {reason}; take --kv-view mixed")
        check_memory(cp_size * num_bytes, f"--kv-view unified on {cp_size} ranks of this host")

    def create(self, shape: RangeShape, rank: int, cp_size: int, *, poison: bool) -> tuple[RangeMapping, int]:
        """Our segment, mapped by us and sealed against everybody else's writing."""
        with ExitStack() as undo:
            descriptor = create_segment(shape, poison=poison)
            undo.callback(os.close, descriptor)
            mapping = RangeMapping(shape, rank, cp_size)
            undo.callback(mapping.close)
            mapping.map_segment(rank, descriptor)
            seal_segment(descriptor)
            undo.pop_all()
        return mapping, descriptor

    def why_not_segment(self, descriptor: int, shape: RangeShape) -> str | None:
        """By size, seals and pages of the file."""
        return why_not_segment(descriptor, shape)


def segment_memory(device: torch.device | str) -> SegmentMemory:
    """The kind of memory that ranks share on a device. Raises ConfigError when that cannot be shared here."""
    wanted = torch.device(device)
    return SealedMemory() if wanted.type == "cpu" else VmmMemory(wanted)


class UnifiedRange:
    """All ranks' segments as one tensor, as this rank sees them.

    Args:
        mapping: with every segment mapped; its tensor is taken.

    Attributes:
        shape: sizes, equal on all ranks.
        memory: uint8 [cp_size * segment_bytes + rounded tail], the whole range; readable everywhere, writable only
            where `own` and `tail` are.
        own: uint8 [used_bytes], this rank's segment.
        tail: uint8 [rounded tail], private; empty without a tail.
    """

    def __init__(self, mapping: SegmentMapping) -> None:
        self.shape, self.rank, self.cp_size = mapping.shape, mapping.rank, mapping.cp_size
        self.memory = mapping.tensor()
        self.own = self.segment(self.rank)
        self.tail = self.memory[self.cp_size * self.shape.segment_bytes :]

    def __repr__(self) -> str:
        """Name, place and bytes."""
        return f"UnifiedRange({self.shape.name}, rank {self.rank} of {self.cp_size}, {self.memory.numel()} bytes)"

    def segment(self, owner: int) -> torch.Tensor:
        """The pool of one rank: uint8 [used_bytes]; a write into another's ends the process, or its use of the GPU."""
        start = owner * self.shape.segment_bytes
        return self.memory[start : start + self.shape.used_bytes]


def open_unified_pools(
    rank: int,
    cp_size: int,
    shapes: tuple[RangeShape, RangeShape],
    geometry_text: dict[str, str],
    secret: str,
    folder: Path,
    fence: Callable[[str], None],
    poison: bool,
    timeout_s: float = 30.0,
    memory: SegmentMemory | None = None,
) -> tuple[UnifiedRange, UnifiedRange]:
    """Make this rank's pools, share them with all ranks of the host, and map all. Every rank calls it.

    Args:
        rank: ours.
        cp_size: ranks of the group, all on one host.
        shapes: of the latent and of the index range.
        geometry_text: what else must be equal on all ranks, field by field.
        secret: of this run.
        folder: of this run, the same for all ranks, closed to other users; sockets lie there for a moment.
        fence: waits until every rank has called it with this label, and raises when one cannot.
        poison: fill our segments and the tails with 0xFF; zeros otherwise.
        timeout_s: for the exchange of descriptors.
        memory: the kind of memory, by which the shapes are rounded; that of the CPU when left out.

    Returns:
        The latent and the index range, mapped by all ranks. No descriptor stays open.

    Raises:
        ConfigError: the memory is not there, or the system cannot share it.
        HandshakeError, ProtocolError, TransferError, WorkerDiedError: see `exchange_descriptors`. Nothing is left
            mapped or open then.
    """
    memory = memory or SealedMemory()
    for shape in shapes:
        shape.check()
    memory.check(rank, cp_size, sum(shape.segment_bytes + shape.rounded_tail_bytes for shape in shapes))
    # Whoever is late would take what the others have already for memory that lacks.
    fence("pool memory is there")
    hello = SegmentDescription(EXCHANGE_VERSION, secret, rank, cp_size, host_identity(), shapes, geometry_text)
    latent, index = (UnifiedRange(mapping) for mapping in _map_all(hello, memory, folder, fence, poison, timeout_s))
    if poison:
        latent.tail.fill_(POISON_BYTE)
        index.tail.fill_(POISON_BYTE)
    return latent, index


def _map_all(
    ours: SegmentDescription,
    memory: SegmentMemory,
    folder: Path,
    fence: Callable[[str], None],
    poison: bool,
    timeout_s: float,
) -> list[SegmentMapping]:
    """One mapping per shape, complete on every rank; every descriptor is closed again."""
    rank, cp_size = ours.rank, ours.cp_size
    with ExitStack() as mapped, ExitStack() as opened:
        mappings: list[SegmentMapping] = []
        descriptors = []
        for shape in ours.shapes:
            mapping, descriptor = memory.create(shape, rank, cp_size, poison=poison)
            opened.callback(os.close, descriptor)
            mapped.callback(mapping.close)
            mappings.append(mapping)
            descriptors.append(descriptor)
        by_rank = exchange_descriptors(
            rank, cp_size, folder, ours, descriptors, fence, timeout_s, memory.why_not_segment
        )
        others = [owner for owner in range(cp_size) if owner != rank]
        for owner in others:
            opened.callback(close_all, by_rank[owner])
        for owner in others:
            for mapping, descriptor in zip(mappings, by_rank[owner], strict=True):
                mapping.map_segment(owner, descriptor)
        fence("pools are mapped")
        mapped.pop_all()
    return mappings
