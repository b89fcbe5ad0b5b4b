"""The range of `cpkv.pool.unified_memory` on GPUs: CUDA allocations of all ranks, mapped side by side.

    | rank 0 (ro) | rank 1 (rw) | rank 2 (ro) | rank 3 (ro) | private tail (rw) |     as rank 1 sees it
      memory of     memory of     memory of     memory of     memory of
      rank 0's GPU  rank 1's GPU  rank 2's GPU  rank 3's GPU  rank 1's GPU

The same as on the CPU: the interface, the exchange of descriptors, the rule that segments start at whole rows, and that
the range lives as long as a tensor over it. Different:

what a page is      2 MiB, as the driver says, so segments are multiples of lcm(2 MiB, row bytes)
what is exchanged   descriptors of the driver's; they have no seals and tell no size. The size is that of the hello,
                    and the driver refuses to map more than there is
a foreign write     ends with an error of CUDA (illegal address), after which the process can do no more on its GPU
"""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import ExitStack
from typing import Any

import torch

from cpkv.errors import ConfigError, HandshakeError
from cpkv.pool.cuda_driver import CudaDriver, CudaDriverError
from cpkv.pool.page_pool import POISON_BYTE
from cpkv.pool.sealed_segment import RangeShape


def why_not_vmm(device: torch.device | str) -> str | None:
    """Why memory of a device cannot be shared between processes, in words; None when it can. Tries it."""
    wanted = torch.device(device)
    if wanted.type != "cuda" or torch.version.cuda is None:
        return f"CUDA VMM needs an NVIDIA GPU and PyTorch for CUDA; this is {wanted} with PyTorch {torch.__version__}"
    if sys.platform != "linux":
        return f"descriptors are passed between processes on Linux alone, and this is {sys.platform}"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU or no driver that it can use"
    number = _device_number(wanted)
    if number >= torch.cuda.device_count():
        return f"there is no {wanted}: this process sees {torch.cuda.device_count()} GPUs"
    try:
        return _why_not_shared(CudaDriver(number), wanted)
    except ImportError as error:
        return f"the package cuda-bindings cannot be imported ({error}); pip install cuda-bindings"
    except (CudaDriverError, OSError) as error:
        return f"a trial with {wanted} failed: {error}"


def _device_number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _why_not_shared(driver: CudaDriver, device: torch.device) -> str | None:
    driver.call("cuInit", 0)
    for attribute in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        if not driver.has(attribute):
            return f"{device} or its driver lacks {attribute}"
    with driver.allocation(driver.granularity(), shared=True) as handle:
        descriptor = driver.export(handle)
        try:
            with driver.imported(descriptor):
                return None
        finally:
            os.close(descriptor)


class _Addresses:
    """What torch makes a tensor of, and what the tensor keeps alive."""

    def __init__(self, base: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (base, False),
            "strides": None,
        }


def _unmap(driver: CudaDriver, device: torch.device, base: int, num_bytes: int, parts: dict[int, int]) -> None:
    # Unmapping does not wait for kernels that still read.
    torch.cuda.synchronize(device)
    for address, length in parts.items():
        driver.call("cuMemUnmap", address, length)
    driver.call("cuMemAddressFree", base, num_bytes)


class VmmMapping:
    """Addresses of a whole range on a GPU; see `SegmentMapping`.

    Args:
        driver: of our GPU.
        device: our GPU.
        shape: of the range.
        rank: ours.
        cp_size: segments.
        own: the allocation of our segment; it is mapped here.

    Raises:
        CudaDriverError: the addresses are not there, or the memory cannot be mapped. Nothing is left mapped then.
    """

    def __init__(
        self, driver: CudaDriver, device: torch.device, shape: RangeShape, rank: int, cp_size: int, own: Any
    ) -> None:
        self.shape, self.rank, self.cp_size = shape, rank, cp_size
        self._driver = driver
        self._parts: dict[int, int] = {}
        num_bytes = shape.total_bytes(cp_size)
        self._base = int(driver.call("cuMemAddressReserve", num_bytes, 0, 0, 0))
        addresses = _Addresses(self._base, num_bytes)
        # Tensors hold the addresses and not this object: the last one that goes takes the mapping along.
        self._release = weakref.finalize(addresses, _unmap, driver, device, self._base, num_bytes, self._parts)
        # Tensors may outlive the interpreter's shutdown; the driver unmaps when the process ends.
        self._release.atexit = False
        self._tensor: torch.Tensor | None = None
        with ExitStack() as undo:
            undo.callback(self.close)
            self._tensor = self._tensor_over(addresses, device, own)
            self._map(rank * shape.segment_bytes, shape.segment_bytes, own, writable=True)
            if shape.rounded_tail_bytes:
                with driver.allocation(shape.rounded_tail_bytes, shared=False) as tail:
                    self._map(cp_size * shape.segment_bytes, shape.rounded_tail_bytes, tail, writable=True)
            undo.pop_all()

    def _tensor_over(self, addresses: _Addresses, device: torch.device, own: Any) -> torch.Tensor:
        """The whole range as a tensor of our GPU.

        Torch asks the driver whose memory the first byte is. That may be another GPU's in the end, so our own memory is
        mapped there while it asks.
        """
        self._driver.map(self._base, self.shape.segment_bytes, own, writable=True)
        try:
            found = torch.as_tensor(addresses, device=device)
        finally:
            self._driver.call("cuMemUnmap", self._base, self.shape.segment_bytes)
        if found.data_ptr() != self._base:
            raise CudaDriverError(
                f"PyTorch {torch.__version__} copies memory of {device} instead of taking it as it is"
            )
        return found

    def _map(self, offset: int, num_bytes: int, handle: Any, *, writable: bool) -> None:
        address = self._base + offset
        self._driver.map(address, num_bytes, handle, writable=writable)
        self._parts[address] = num_bytes

    def map_segment(self, owner: int, descriptor: int) -> None:
        """Map the segment of another rank, read-only.

        Raises:
            HandshakeError: the driver does not take it: it is no memory, is too short, or lies on a GPU that ours
                cannot reach.
        """
        size = self.shape.segment_bytes
        try:
            with self._driver.imported(descriptor) as handle:
                self._map(owner * size, size, handle, writable=False)
        except CudaDriverError as error:
            raise HandshakeError(
                f"rank {owner} is refused by rank {self.rank}: {size} bytes of its {self.shape.name} segment cannot be "
                f"mapped ({error})"
            ) from error

    def fill(self, poison: bool) -> None:
        """Give our segment and the tail their first bytes, since memory comes with those that it had before."""
        memory, start = self._whole(), self.rank * self.shape.segment_bytes
        memory[start : start + self.shape.segment_bytes].fill_(POISON_BYTE if poison else 0)
        memory[self.cp_size * self.shape.segment_bytes :].zero_()
        # Other ranks read it in streams of their own.
        torch.cuda.synchronize(memory.device)

    def close(self) -> None:
        """Unmap everything now. Only as long as there is no tensor over it."""
        self._tensor = None
        self._release()

    def tensor(self) -> torch.Tensor:
        """A tensor uint8 over the whole range; it and its views now own the mapping. Once."""
        found, self._tensor = self._whole(), None
        return found

    def _whole(self) -> torch.Tensor:
        if self._tensor is None:
            raise ConfigError(f"the {self.shape.name} range of rank {self.rank} is unmapped or has its tensor already")
        return self._tensor


class VmmMemory:
    """Memory of a GPU; see `SegmentMemory`.

    Args:
        device: ours; other ranks of the host may have the same or another.

    Attributes:
        page_bytes: what the driver maps at once.

    Raises:
        ConfigError: it cannot be shared, with the reason.
    """

    def __init__(self, device: torch.device | str) -> None:
        if reason := why_not_vmm(device):
            raise ConfigError(f"pools on {device} cannot be shared: {reason}; take --kv-view mixed")
        number = _device_number(torch.device(device))
        self.device = torch.device("cuda", number)
        self._driver = CudaDriver(number)
        self.page_bytes = self._driver.granularity()

    def check(self, rank: int, cp_size: int, num_bytes: int) -> None:
        """Refuse what this GPU has not free; whether ranks share it does not show yet."""
        free, _ = torch.cuda.mem_get_info(self.device)
        if num_bytes > free:
            raise ConfigError(
                f"the pool of rank {rank} of {cp_size} needs {num_bytes} bytes and {free} bytes of {self.device} are "
                "free; lower --num-pages"
            )

    def create(self, shape: RangeShape, rank: int, cp_size: int, *, poison: bool) -> tuple[VmmMapping, int]:
        """Our segment and tail on our GPU, filled."""
        if shape.page_bytes % self.page_bytes:
            raise ConfigError(f"{shape}: page_bytes must be a multiple of {self.page_bytes} on {self.device}")
        try:
            with ExitStack() as undo, self._driver.allocation(shape.segment_bytes, shared=True) as own:
                descriptor = self._driver.export(own)
                undo.callback(os.close, descriptor)
                mapping = VmmMapping(self._driver, self.device, shape, rank, cp_size, own)
                undo.callback(mapping.close)
                mapping.fill(poison)
                undo.pop_all()
        except CudaDriverError as error:
            needed = shape.segment_bytes + shape.rounded_tail_bytes
            raise ConfigError(
                f"the {shape.name} pool of rank {rank} needs {needed} bytes of {self.device} and does not get them "
                f"({error}; {torch.cuda.mem_get_info(self.device)[0]} bytes are free); lower --num-pages"
            ) from error
        return mapping, descriptor

    def why_not_segment(self, descriptor: int, shape: RangeShape) -> str | None:
        """Nothing shows before the driver is asked to map it."""
        return None
