"""The calls of the CUDA driver that share memory between processes; a failure is an exception that says what it was.

cuda-bindings is imported when the first driver is made, and never before.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CudaDriverError(Exception):
    """A call failed; the text names the call and what the driver says of it."""


class CudaDriver:
    """The driver, for memory of one GPU.

    Args:
        device_number: of the GPU, as PyTorch counts in this process.

    Raises:
        ImportError: cuda-bindings is missing.
    """

    def __init__(self, device_number: int) -> None:
        self._api: Any = importlib.import_module("cuda.bindings.driver")
        self._device_number = device_number
        self._by_descriptor = self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def call(self, name: str, *arguments: Any) -> Any:
        """What a call returns beside its status; raises CudaDriverError with the name of the status."""
        try:
            status, *values = getattr(self._api, name)(*arguments)
        except RuntimeError as error:
            # Without a driver the package is there and cannot find the function.
            raise CudaDriverError(f"{name} is missing: {error}") from error
        if status != self._api.CUresult.CUDA_SUCCESS:
            raise CudaDriverError(f"{name} says {status.name}")
        return values[0] if values else None

    def has(self, attribute: str) -> bool:
        """Whether the GPU has a property, by the end of its name in the driver (CU_DEVICE_ATTRIBUTE_...)."""
        number = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return bool(self.call("cuDeviceGetAttribute", number, self._device_number))

    def granularity(self) -> int:
        """Bytes of which every allocation and mapping is a multiple."""
        minimum = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._properties(shared=True), minimum))

    @contextmanager
    def allocation(self, num_bytes: int, *, shared: bool) -> Iterator[Any]:
        """Memory of the GPU; what is mapped when the block ends lives until it is unmapped."""
        yield from self._held(self.call("cuMemCreate", num_bytes, self._properties(shared=shared), 0))

    @contextmanager
    def imported(self, descriptor: int) -> Iterator[Any]:
        """Memory of any process and GPU, by a descriptor that `export` made; the descriptor may be closed after."""
        yield from self._held(self.call("cuMemImportFromShareableHandle", descriptor, self._by_descriptor))

    def export(self, handle: Any) -> int:
        """A descriptor of an allocation that is shared, closed on exec."""
        descriptor = int(self.call("cuMemExportToShareableHandle", handle, self._by_descriptor, 0))
        os.set_inheritable(descriptor, False)
        return descriptor

    def map(self, address: int, num_bytes: int, handle: Any, *, writable: bool) -> None:
        """Map memory at an address that is reserved; nothing stays mapped when it fails."""
        self.call("cuMemMap", address, num_bytes, 0, handle, 0)
        rights = self._api.CUmemAccess_flags
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device_number
        access.flags = rights.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else rights.CU_MEM_ACCESS_FLAGS_PROT_READ
        try:
            self.call("cuMemSetAccess", address, num_bytes, [access], 1)
        except CudaDriverError:
            self.call("cuMemUnmap", address, num_bytes)
            raise

    def _held(self, handle: Any) -> Iterator[Any]:
        try:
            yield handle
        finally:
            self.call("cuMemRelease", handle)

    def _properties(self, *, shared: bool) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._device_number
        if shared:
            properties.requestedHandleTypes = self._by_descriptor
            # Transfer engines register the pool with network cards, and can only when this was asked for here.
            properties.allocFlags.gpuDirectRDMACapable = int(self.has("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"))
        return properties
