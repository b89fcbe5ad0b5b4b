"""Index keys converted, stored and unpacked by kernels, bit for bit as by the reference."""

from __future__ import annotations

import math
import random

import pytest
import torch
from guarded_bytes import GuardedRows, far_bytes, guarded_outputs, random_bytes

from cpkv.ops.reference import index_keys as reference
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci, register_cuda_ci

kernels = pytest.importorskip("cpkv.ops.triton.index_keys", reason="Triton is not installed")

register_cpu_ci(est_time=8, suite="kernels")
register_cuda_ci(est_time=60, suite="kernels", num_gpus=1)

# The interpreter computes with NaN and infinities too, and NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

FORMATS = [(128, 4), (64, 4), (256, 0), (7, 4), (12, 0), (1, 4)]
"""Bytes of a key and of its scale."""


def key_rows(tokens: int, dim: int) -> torch.Tensor:
    """Keys of all magnitudes, from subnormal ones to nearly the largest."""
    generator = torch.Generator().manual_seed(tokens + dim)
    keys = torch.randn(tokens, dim, generator=generator)
    keys *= 10.0 ** torch.randint(-42, 37, (tokens, 1), generator=generator)
    keys[:, ::5] *= 2.0 ** torch.randint(-12, 0, keys[:, ::5].shape, generator=generator)
    return keys


def encoded(keys: torch.Tensor, device: torch.device) -> torch.Tensor:
    with guarded_outputs():
        return kernels.encode_index_keys(keys.to(device), "fp8").cpu()


@pytest.mark.parametrize("dim", [128, 64, 96, 7, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keys_are_converted_as_by_the_reference(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    for tokens in (1, 15, 33):
        keys = key_rows(tokens, dim).to(dtype)
        assert_same_bits(encoded(keys, device), reference.encode_index_keys(keys, "fp8"), f"{tokens} tokens")


def test_keys_that_lie_apart_are_converted(device: torch.device) -> None:
    wide = key_rows(9, 300)
    for keys in (wide[:, 31:159], wide[::2, :128], wide.T[:128, :9].T, wide[:1].expand(5, -1)[:, :64]):
        assert_same_bits(encoded(keys, device), reference.encode_index_keys(keys, "fp8"), str(keys.stride()))


def test_every_tie_goes_to_the_even_code(device: torch.device) -> None:
    """All codes, the middle between each two and its neighbours in fp32, of either sign; the scale is 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    values = torch.cat([values, -values, torch.tensor([2.0**-10, 1e-40, -1e-45])])
    keys = torch.full((len(values), 8), 448.0)
    keys[:, 3] = values
    stored = encoded(keys, device)
    assert_same_bits(stored, reference.encode_index_keys(keys, "fp8"), "codes")
    assert stored[:, 8:].contiguous().view(torch.float32).unique().tolist() == [1.0]


def test_scales_around_powers_of_two_and_of_nothing(device: torch.device) -> None:
    exact = 448.0 * 2.0 ** torch.arange(-30.0, 100.0)
    inf = torch.tensor(math.inf)
    amax = torch.cat([exact, exact.nextafter(inf), exact.nextafter(-inf), torch.tensor([0.0, -0.0, 1e-4, 3.4e38])])
    keys = amax.unsqueeze(1) * torch.tensor([[0.5, -1.0, 0.0, -0.0, 1e-3]])
    assert_same_bits(encoded(keys, device), reference.encode_index_keys(keys, "fp8"), "rows")


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, 1e300])
def test_what_is_not_finite_makes_its_key_nan_and_no_other(device: torch.device, value: float) -> None:
    keys = torch.ones(3, 128, dtype=torch.float64)
    finite = reference.encode_index_keys(keys, "fp8")
    keys[1, 77] = value
    stored = encoded(keys, device)
    assert_same_bits(stored[::2], finite[::2], "others")
    assert bool(reference.decode_index_keys(stored[1:2], "fp8", torch.float32).isnan().all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_float_keys_are_those_of_the_reference(device: torch.device, dtype: reference.IndexDtype) -> None:
    keys = key_rows(5, 16)
    assert_same_bits(
        kernels.encode_index_keys(keys.to(device), dtype).cpu(), reference.encode_index_keys(keys, dtype), dtype
    )


@pytest.mark.parametrize(("key_bytes", "scale_bytes"), FORMATS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (16, 0), (3, 1)])
def test_stored_keys_lie_in_their_blocks_and_nowhere_else(
    device: torch.device, key_bytes: int, scale_bytes: int, page_size: int, gap: int, offset: int
) -> None:
    row_bytes = key_bytes + scale_bytes
    places = random.Random(page_size).sample([(block, at) for block in range(11) for at in range(page_size)], 9)
    numbers, offsets = (torch.tensor(part) for part in zip(*places, strict=True))
    stored = random_bytes(9, row_bytes)
    wanted = torch.full((11, page_size * row_bytes), 0xFF, dtype=torch.uint8)
    sizes = {"page_size": page_size, "key_bytes": key_bytes}
    named = torch.tensor([True] * 4 + [False] + [True] * 4)
    reference.store_index_keys(wanted, numbers[named], offsets[named], stored[named], **sizes)
    numbers[4] = -1
    blocks = GuardedRows.make(device, 11, page_size * row_bytes, gap=gap, offset=offset)
    rows = GuardedRows.of(stored, device, gap=gap).rows
    kernels.store_index_keys(blocks.rows, numbers.to(device), offsets.to(device), rows, **sizes)
    blocks.check(wanted, "blocks")


def lengths(page_size: int) -> list[int]:
    return sorted({1, page_size, page_size + 1, 3 * page_size - 1, 3 * page_size})


@pytest.mark.parametrize(("key_bytes", "scale_bytes"), FORMATS)
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (3, 1)])
def test_unpacked_keys_are_in_position_order(
    device: torch.device, key_bytes: int, scale_bytes: int, page_size: int, gap: int, offset: int
) -> None:
    row_bytes = key_bytes + scale_bytes
    content = random_bytes(7, page_size * row_bytes)
    blocks = GuardedRows.of(content, device, gap=gap, offset=offset).rows
    numbers = torch.tensor([6, 0, 6])
    for tokens in lengths(page_size):
        sizes = {"tokens": tokens, "page_size": page_size, "key_bytes": key_bytes}
        wanted = reference.unpack_index_keys(content, numbers, **sizes)
        out = GuardedRows.make(device, tokens, row_bytes, offset=offset)
        assert kernels.unpack_index_keys(blocks, numbers.to(device), out=out.rows, **sizes) is out.rows
        out.check(wanted, f"{tokens} tokens")
        with guarded_outputs():
            made = kernels.unpack_index_keys(blocks, numbers.to(device), **sizes)
        assert_same_bits(made.cpu(), wanted, f"{tokens} tokens, no out")


@pytest.mark.parametrize("key_bytes", [128, 64, 7])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (3, 1)])
def test_keys_and_scales_apart(device: torch.device, key_bytes: int, page_size: int, gap: int, offset: int) -> None:
    content = random_bytes(7, page_size * (key_bytes + 4))
    blocks = GuardedRows.of(content, device, gap=gap, offset=offset).rows
    for tokens in lengths(page_size):
        check_apart(content, blocks, tokens, page_size, key_bytes)


def check_apart(content: torch.Tensor, blocks: torch.Tensor, tokens: int, page_size: int, key_bytes: int) -> None:
    """By the kernels and by the reference, against rows of both."""
    numbers = torch.tensor([6, 0, 6])
    sizes = {"tokens": tokens, "page_size": page_size, "key_bytes": key_bytes}
    stored = reference.unpack_index_keys(content, numbers, **sizes)
    scales = stored[:, key_bytes:].clone(memory_format=torch.contiguous_format).view(torch.float32).flatten()
    for unpack, place in ((kernels.unpack_keys_and_scales, blocks), (reference.unpack_keys_and_scales, content)):
        with guarded_outputs():
            found = unpack(place, numbers.to(place.device), **sizes)
        assert all(part.is_contiguous() for part in found)
        assert_same_bits(found[0].cpu(), stored[:, :key_bytes], f"keys, {tokens} tokens")
        assert_same_bits(found[1].cpu(), scales, f"scales, {tokens} tokens")


@pytest.mark.parametrize("offset", [0, 1])
def test_scales_of_a_page_that_are_more_than_a_program_takes_at_once(device: torch.device, offset: int) -> None:
    content = random_bytes(7, 600 * 12)
    blocks = GuardedRows.of(content, device, gap=16, offset=offset).rows
    check_apart(content, blocks, 1700, 600, 8)


def test_no_block_is_zeros_and_is_not_read(device: torch.device) -> None:
    content = random_bytes(3, 16 * 132)
    numbers = torch.tensor([2, -1, 1])
    sizes = {"tokens": 40, "page_size": 16, "key_bytes": 128}
    wanted = reference.unpack_index_keys(content, numbers.clamp(min=0), **sizes)
    wanted[16:32] = 0
    blocks = GuardedRows.of(content, device).rows
    assert_same_bits(kernels.unpack_index_keys(blocks, numbers.to(device), **sizes).cpu(), wanted, "rows")
    keys, scales = kernels.unpack_keys_and_scales(blocks, numbers.to(device), **sizes)
    assert_same_bits(torch.cat([keys, scales.unsqueeze(1).view(torch.uint8)], dim=1).cpu(), wanted, "apart")


def test_no_tokens(device: torch.device) -> None:
    sizes = {"page_size": 16, "key_bytes": 128}
    blocks = GuardedRows.make(device, 2, 16 * 132)
    none = torch.empty(0, dtype=torch.int64, device=device)
    kernels.store_index_keys(blocks.rows, none, none, blocks.rows[:0, :132], **sizes)
    assert kernels.unpack_index_keys(blocks.rows, none, tokens=0, **sizes).shape == (0, 132)
    assert [len(part) for part in kernels.unpack_keys_and_scales(blocks.rows, none, tokens=0, **sizes)] == [0, 0]
    assert kernels.encode_index_keys(torch.empty(0, 128, device=device), "fp8").shape == (0, 132)


@pytest.mark.parametrize(("key_bytes", "span"), [(128, 2**35), (127, 2**32)])
def test_blocks_beyond_two_to_the_31_words(device: torch.device, key_bytes: int, span: int) -> None:
    page_size, row_bytes = 64, key_bytes + 4
    block_bytes = page_size * row_bytes
    stride = span // 64 + 16
    blocks = far_bytes(device, 64 * stride + block_bytes).as_strided((65, block_bytes), (stride, 1))
    stored = random_bytes(2 * page_size, row_bytes)
    numbers = torch.tensor([64, 31], device=device)
    sizes = {"page_size": page_size, "key_bytes": key_bytes}
    positions = torch.arange(2 * page_size, device=device)
    kernels.store_index_keys(blocks, numbers[positions // page_size], positions % page_size, stored.to(device), **sizes)
    wanted = torch.empty(2, block_bytes, dtype=torch.uint8)
    cpu = positions.cpu()
    reference.store_index_keys(wanted, cpu // page_size, cpu % page_size, stored, **sizes)
    assert_same_bits(blocks[[64, 31]].cpu(), wanted, "stored")
    keys, scales = kernels.unpack_keys_and_scales(blocks, numbers, tokens=2 * page_size, **sizes)
    assert_same_bits(keys.cpu(), stored[:, :key_bytes], "keys")
    assert_same_bits(scales.cpu().unsqueeze(1).view(torch.uint8), stored[:, key_bytes:], "scales")
