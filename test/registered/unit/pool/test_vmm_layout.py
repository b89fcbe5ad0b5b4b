"""What can be known of GPU ranges without a GPU: sizes, reasons, and which calls the driver gets and in which order."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpkv.errors import ConfigError, HandshakeError
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.row_format import RowFormat
from cpkv.pool import vmm_memory
from cpkv.pool.sealed_segment import RangeShape, round_segment
from cpkv.pool.segment_hello import EXCHANGE_VERSION, SegmentDescription, why_not_hello
from cpkv.pool.unified_memory import SealedMemory, UnifiedRange, segment_memory
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.pool.vmm_memory import VmmMapping, VmmMemory, why_not_vmm
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

MIB = 1 << 20
GPU_PAGE = 2 * MIB


@pytest.mark.parametrize("unit_bytes", [1152, 656, 132 * 64, 576, 1, GPU_PAGE, 3 * GPU_PAGE])
@pytest.mark.parametrize("units", [1, 7, 40961])
def test_a_segment_is_the_smallest_of_whole_units_and_whole_gpu_pages(unit_bytes: int, units: int) -> None:
    shape = RangeShape.of("latent", units * unit_bytes, unit_bytes, 3 * unit_bytes, GPU_PAGE)
    shape.check()
    for size, used in ((shape.segment_bytes, shape.used_bytes), (shape.rounded_tail_bytes, 3 * unit_bytes)):
        assert size >= used and size % unit_bytes == 0 and size % GPU_PAGE == 0
        smaller = range(GPU_PAGE, size, GPU_PAGE)
        assert not any(number >= used and number % unit_bytes == 0 for number in smaller)
    assert shape.total_bytes(8) == 8 * shape.segment_bytes + shape.rounded_tail_bytes


def test_a_cpu_rounding_is_refused_on_a_gpu() -> None:
    size = round_segment(1152, 1152, mmap.PAGESIZE)
    with pytest.raises(ConfigError, match=f"set it to {9 * GPU_PAGE}"):
        RangeShape("latent", size, 1152, 1152, 0, GPU_PAGE).check()
    with pytest.raises(ConfigError, match="page_bytes must be at least 1"):
        RangeShape("latent", size, 1152, 1152, 0, 0).check()


def test_ranks_with_other_kinds_of_memory_refuse_each_other() -> None:
    def describe(rank: int, page_bytes: int) -> SegmentDescription:
        shape = RangeShape("latent", 9 * GPU_PAGE, 1152, 1152, 0, page_bytes)
        return SegmentDescription(EXCHANGE_VERSION, "secret", rank, 2, "host", (shape,), {})

    reason = why_not_hello(describe(1, 4096), describe(0, GPU_PAGE), [1], [])
    assert reason == "range 0 page_bytes is 4096 there and 2097152 here"
    assert why_not_hello(describe(1, GPU_PAGE), describe(0, GPU_PAGE), [1], []) is None


def test_the_module_needs_neither_a_gpu_nor_its_package() -> None:
    code = (
        "import sys, torch\n"
        # Some builds of torch load parts of that package themselves.
        "before = set(sys.modules)\n"
        "import cpkv.pool.unified_pool, cpkv.pool.vmm_memory\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not any(name.split('.')[0] == 'cuda' for name in set(sys.modules) - before)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Names:
    """An enumeration of the driver's whose values are their names."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeDriver:
    """The calls that cpkv makes, on memory of this process; addresses are real, handles and rights are notes."""

    CUresult = Status
    CUmemAllocationHandleType = Names()
    CUmemAllocationGranularity_flags = Names()
    CUmemAllocationType = Names()
    CUmemLocationType = Names()
    CUmemAccess_flags = Names()
    CUdevice_attribute = Names()

    def __init__(self) -> None:
        self.lacks: set[str] = set()
        self.fails: dict[str, Status] = {}
        self.spared = 0
        self.reserved: dict[int, ctypes.Array[Any]] = {}
        self.handles: dict[int, SimpleNamespace] = {}
        self.mapped: dict[int, SimpleNamespace] = {}
        self.log: list[str] = []

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace(), requestedHandleTypes="none")

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        work = getattr(self, f"_{name.removeprefix('cuMem')}", None) if name.startswith("cu") else None
        if work is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append(name)
            if name in self.fails:
                if not self.spared:
                    return self.fails[name], None
                self.spared -= 1
            return Status.CUDA_SUCCESS, work(*arguments)

        return call

    def _cuInit(self, flags: int) -> None: ...

    def _cuDeviceGetAttribute(self, attribute: str, device: int) -> int:
        return int(attribute.removeprefix("CU_DEVICE_ATTRIBUTE_") not in self.lacks)

    def _GetAllocationGranularity(self, properties: SimpleNamespace, minimum: str) -> int:
        return GPU_PAGE

    def _Create(self, size: int, properties: SimpleNamespace, flags: int) -> int:
        handle = len(self.log)
        self.handles[handle] = SimpleNamespace(size=size, shared=properties.requestedHandleTypes != "none")
        return handle

    def _Release(self, handle: int) -> None:
        del self.handles[handle]

    def _ExportToShareableHandle(self, handle: int, kind: str, flags: int) -> int:
        assert self.handles[handle].shared
        return os.open("/dev/null", os.O_RDONLY)

    def _ImportFromShareableHandle(self, descriptor: int, kind: str) -> int:
        handle = len(self.log)
        self.handles[handle] = SimpleNamespace(size=None, shared=True)
        return handle

    def _AddressReserve(self, size: int, *_: int) -> int:
        buffer = (ctypes.c_uint8 * size).from_buffer(bytearray(b"U") * size)
        base = ctypes.addressof(buffer)
        self.reserved[base] = buffer
        return base

    def _AddressFree(self, base: int, size: int) -> None:
        assert ctypes.sizeof(self.reserved[base]) == size and not self.mapped
        del self.reserved[base]

    def _Map(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert address not in self.mapped
        self.mapped[address] = SimpleNamespace(size=size, shared=self.handles[handle].shared, rights="")

    def _SetAccess(self, address: int, size: int, access: list[SimpleNamespace], count: int) -> None:
        assert self.mapped[address].size == size and count == len(access) == 1
        self.mapped[address].rights = access[0].flags.removeprefix("CU_MEM_ACCESS_FLAGS_PROT_")

    def _Unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address).size == size


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A machine with two GPUs, as far as torch is asked about them."""
    driver = FakeDriver()

    def tensor_over(addresses: Any, device: torch.device) -> torch.Tensor:
        base, _ = addresses.__cuda_array_interface__["data"]
        (size,) = addresses.__cuda_array_interface__["shape"]
        assert base in driver.mapped, "torch asks the driver about the first byte"
        buffer = (ctypes.c_uint8 * size).from_address(base)
        buffer.held = addresses
        return torch.frombuffer(buffer, dtype=torch.uint8)

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (100 * MIB, 200 * MIB))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: driver.log.append("synchronize"))
    monkeypatch.setattr("torch.as_tensor", tensor_over)
    return driver


SHAPE = RangeShape.of("latent", GPU_PAGE, 1024, 1024, GPU_PAGE)


def test_own_segment_and_tail_are_writable_and_the_rest_is_read(fake: FakeDriver) -> None:
    mapping, descriptor = VmmMemory("cuda").create(SHAPE, 1, 3, poison=True)
    assert not os.get_inheritable(descriptor)
    for owner in (0, 2):
        mapping.map_segment(owner, descriptor)
    os.close(descriptor)
    parts = sorted(fake.mapped.items())
    base = parts[0][0]
    assert [address - base for address, _ in parts] == [owner * GPU_PAGE for owner in range(4)]
    assert [part.rights for _, part in parts] == ["READ", "READWRITE", "READ", "READWRITE"]
    assert [part.shared for _, part in parts] == [True, True, True, False]
    assert fake.handles == {}, "a handle is held; its memory would never come back"
    seen = UnifiedRange(mapping)
    assert bool((seen.own == 0xFF).all()) and not bool(seen.tail.any())
    for owner in (0, 2):
        assert bool((seen.segment(owner) == ord("U")).all()), "another rank's memory was filled"


@pytest.mark.parametrize("last", ["memory", "own"])
def test_a_range_is_released_once_when_the_last_tensor_goes(fake: FakeDriver, last: str) -> None:
    mapping, descriptor = VmmMemory("cuda:0").create(SHAPE, 0, 2, poison=False)
    mapping.map_segment(1, descriptor)
    os.close(descriptor)
    seen = UnifiedRange(mapping)
    kept = getattr(seen, last)
    del seen
    gc.collect()
    assert len(fake.mapped) == 3
    fake.log.clear()
    with pytest.raises(ConfigError, match="has its tensor already"):
        mapping.tensor()
    del kept
    gc.collect()
    assert fake.log == ["synchronize", "cuMemUnmap", "cuMemUnmap", "cuMemUnmap", "cuMemAddressFree"]
    assert not fake.mapped and not fake.reserved
    mapping.close()
    assert len(fake.log) == 5


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_segment_that_the_driver_does_not_take_is_refused_by_rank_and_cause(fake: FakeDriver, call: str) -> None:
    mapping, descriptor = VmmMemory("cuda:0").create(SHAPE, 0, 2, poison=False)
    fake.fails = {call: Status.CUDA_ERROR_INVALID_VALUE}
    with pytest.raises(HandshakeError, match=rf"rank 1 is refused by rank 0: {GPU_PAGE} .*{call} says CUDA_ERROR_INV"):
        mapping.map_segment(1, descriptor)
    os.close(descriptor)
    mapping.close()
    assert not fake.mapped and not fake.reserved and not fake.handles


@pytest.mark.parametrize(
    ("call", "spared"),
    [
        ("cuMemCreate", 0),
        ("cuMemCreate", 1),
        ("cuMemExportToShareableHandle", 0),
        ("cuMemAddressReserve", 0),
        ("cuMemMap", 0),
        ("cuMemMap", 1),
        ("cuMemMap", 2),
        ("cuMemSetAccess", 0),
        ("cuMemSetAccess", 2),
    ],
)
def test_memory_that_fails_to_come_is_an_error_and_leaves_nothing(fake: FakeDriver, call: str, spared: int) -> None:
    """Also while the error, whose traceback holds the mapping, is kept."""
    memory, descriptors = VmmMemory("cuda"), len(os.listdir("/proc/self/fd"))
    fake.fails, fake.spared = {call: Status.CUDA_ERROR_OUT_OF_MEMORY}, spared
    words = rf"rank 0 needs {2 * GPU_PAGE} bytes of cuda:1 .*{call} says CUDA_ERROR_OUT.*lower --num-pages"
    with pytest.raises(ConfigError, match=words) as caught:
        memory.create(SHAPE, 0, 2, poison=False)
    assert caught.tb is not None
    assert not fake.mapped and not fake.reserved and not fake.handles
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_fill_that_fails_leaves_nothing(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(mapping: VmmMapping, poison: bool) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(VmmMapping, "fill", fail)
    memory, descriptors = VmmMemory("cuda"), len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="CUDA error") as caught:
        memory.create(SHAPE, 0, 2, poison=False)
    assert caught.tb is not None
    assert not fake.mapped and not fake.reserved and not fake.handles
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_more_than_is_free_is_refused_before_anything_is_taken(fake: FakeDriver) -> None:
    memory = VmmMemory("cuda:1")
    memory.check(0, 8, 100 * MIB)
    with pytest.raises(ConfigError, match=rf"rank 3 of 8 needs {100 * MIB + 1} bytes and {100 * MIB} bytes of cuda:1"):
        memory.check(3, 8, 100 * MIB + 1)
    with pytest.raises(ConfigError, match=f"page_bytes must be a multiple of {GPU_PAGE}"):
        memory.create(RangeShape.of("latent", 4096, 1024), 0, 2, poison=False)


def test_the_device_says_which_kind_of_memory(fake: FakeDriver) -> None:
    assert isinstance(segment_memory("cpu"), SealedMemory)
    assert segment_memory("cpu").page_bytes == mmap.PAGESIZE
    assert isinstance(segment_memory("cuda"), VmmMemory)
    assert segment_memory("cuda:0").page_bytes == GPU_PAGE


def test_a_gpu_that_can_share_has_no_reason_against_it(fake: FakeDriver) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    assert why_not_vmm("cuda") is None and why_not_vmm("cuda:0") is None
    assert not fake.handles and len(os.listdir("/proc/self/fd")) == descriptors


def no_package(driver: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "cuda.bindings.driver", None)


def no_driver(driver: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    def fail(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    patch.setattr(driver, "_cuInit", fail)


@pytest.mark.parametrize(
    ("device", "change", "words"),
    [
        ("cpu", None, "needs an NVIDIA GPU and PyTorch for CUDA; this is cpu with PyTorch"),
        ("cuda", lambda driver, patch: patch.setattr("torch.version.cuda", None), "this is cuda with PyTorch"),
        ("cuda", lambda driver, patch: patch.setattr("torch.cuda.is_available", lambda: False), "finds no GPU"),
        ("cuda:2", None, "there is no cuda:2: this process sees 2 GPUs"),
        (
            "cuda",
            lambda driver, patch: patch.setattr(vmm_memory, "sys", SimpleNamespace(platform="win32")),
            "on Linux alone, and this is win32",
        ),
        ("cuda", no_package, "pip install cuda-bindings"),
        ("cuda", no_driver, "a trial with cuda failed: cuInit is missing: Failed to dlopen libcuda.so.1"),
        (
            "cuda",
            lambda driver, patch: driver.lacks.add("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
            "cuda or its driver lacks HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        ),
        (
            "cuda:0",
            lambda driver, patch: driver.fails.update(cuMemCreate=Status.CUDA_ERROR_OUT_OF_MEMORY),
            "a trial with cuda:0 failed: cuMemCreate says CUDA_ERROR_OUT_OF_MEMORY",
        ),
    ],
    ids=["cpu", "no CUDA", "no GPU", "no such GPU", "not Linux", "no package", "no driver", "lacks", "fails"],
)
def test_a_machine_that_cannot_share_says_why(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, change: Any, words: str
) -> None:
    if change is not None:
        change(fake, monkeypatch)
    assert words in str(why_not_vmm(device))
    with pytest.raises(ConfigError, match="cannot be shared: .*; take --kv-view mixed"):
        VmmMemory(device)
    if device != "cpu":
        geometry = PoolGeometry(RowFormat("bfloat16", 512, 64, "fp8", 128), 64, (0,))
        with pytest.raises(ConfigError, match=f"pools on {device} cannot be shared"):
            UnifiedPool.open(
                geometry,
                2,
                rank=0,
                cp_size=1,
                chunk_tokens=1,
                secret="",
                folder=tmp_path,
                fence=lambda label: pytest.fail(label),
                device=device,
            )
