"""Latent rows converted, moved and read by kernels, bit for bit as by the reference; NaN equals NaN of any bits."""

from __future__ import annotations

import math

import pytest
import torch
from guarded_bytes import GuardedRows, far_bytes, guarded_outputs, random_bytes

from cpkv.config.names import LatentDtype
from cpkv.layout.row_format import RowFormat
from cpkv.ops.reference import latent_rows as reference
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci, register_cuda_ci

kernels = pytest.importorskip("cpkv.ops.triton.latent_rows", reason="Triton is not installed")

register_cpu_ci(est_time=8, suite="kernels")
register_cuda_ci(est_time=90, suite="kernels", num_gpus=1)

# The interpreter computes with NaN and infinities too, and NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

SHAPES = [(512, 64), (384, 32), (130, 3), (64, 16), (5, 1)]
FLOATS = [torch.float32, torch.bfloat16, torch.float64]


def latent_and_rope(tokens: int, rank: int, rope: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all magnitudes: subnormal ones, nearly the largest, zeros, and some NaN and infinities."""
    generator = torch.Generator().manual_seed(tokens + rank)
    values = torch.randn(tokens, rank + rope, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-44, 38, (tokens, 1), generator=generator)
    values[:, ::3] *= 2.0 ** torch.randint(-14, 0, values[:, ::3].shape, generator=generator)
    values[0] = torch.tensor([0.0, -0.0]).repeat(rank)[: rank + rope]
    for row, value in zip(range(1, tokens, 2), (math.nan, math.inf, -math.nan, -math.inf, 1e39), strict=False):
        values[row, row % rank] = value
        values[row, rank + row % rope] = value
    values = values.to(dtype)
    return values[:, :rank], values[:, rank:]


def plain_nan(values: torch.Tensor) -> torch.Tensor:
    return values.clone(memory_format=torch.contiguous_format).masked_fill_(values.isnan(), math.nan)


def assert_same_stored(ours: torch.Tensor, theirs: torch.Tensor, row_format: RowFormat, what: str) -> None:
    """Part by part of the row."""
    rank = row_format.kv_lora_rank
    if row_format.latent_dtype == "fp8":
        scales_end = rank + 4 * row_format.latent_scales
        parts = {
            "codes": (slice(0, rank), torch.float8_e4m3fn),
            "scales": (slice(rank, scales_end), torch.float32),
            "rope": (slice(scales_end, None), torch.bfloat16),
        }
    else:
        parts = {"values": (slice(None), reference.torch_dtype(row_format.latent_dtype))}
    assert ours.shape == theirs.shape == (len(theirs), row_format.latent_row_bytes)
    for name, (part, dtype) in parts.items():
        seen = [rows[:, part].clone(memory_format=torch.contiguous_format).view(dtype) for rows in (ours, theirs)]
        if name == "codes":
            same = [codes.view(torch.uint8).masked_fill(codes.float().isnan(), 0x7F) for codes in seen]
        else:
            same = [plain_nan(values) for values in seen]
        assert_same_bits(same[0], same[1], f"{what}, {name}")


def check_encode(
    latent: torch.Tensor, rope_key: torch.Tensor, dtype: LatentDtype, device: torch.device, what: str
) -> None:
    with guarded_outputs():
        ours = kernels.encode_latent_rows(latent.to(device), rope_key.to(device), dtype).cpu()
    row_format = RowFormat(dtype, latent.shape[1], rope_key.shape[1], "fp8", 128)
    assert_same_stored(ours, reference.encode_latent_rows(latent, rope_key, dtype), row_format, what)


@pytest.mark.parametrize(("rank", "rope"), SHAPES)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("dtype", ["fp8", "bfloat16", "float32", "float64"])
def test_rows_are_converted_as_by_the_reference(
    device: torch.device, rank: int, rope: int, source: torch.dtype, dtype: LatentDtype
) -> None:
    for tokens in (1, 4, 13):
        check_encode(*latent_and_rope(tokens, rank, rope, source), dtype, device, f"{tokens} tokens")


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
def test_rows_that_lie_apart_are_converted(device: torch.device, dtype: LatentDtype) -> None:
    latent, rope_key = latent_and_rope(7, 512, 64, torch.float32)
    tall = latent.T.contiguous().T
    for values, key in (
        (tall, rope_key.clone()),
        (latent[::2], rope_key[::2]),
        (latent[:1].expand(3, -1), rope_key[4:]),
        (latent.to(torch.bfloat16), rope_key),
    ):
        check_encode(values, key, dtype, device, str((values.stride(), key.stride())))


def test_every_tie_goes_to_the_even_code(device: torch.device) -> None:
    """The middle between each two codes and its neighbours in fp32, of either sign, in groups whose scale is 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    values = torch.cat([values, -values])
    values = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    latent = torch.nn.functional.pad(values, (1, 0), value=448.0).repeat(1, 2)
    check_encode(latent, latent[:, :8], "fp8", device, "ties")


def test_every_rounding_to_bfloat16(device: torch.device) -> None:
    """Ties to even, what rounds up to infinity, subnormals, NaN; in double too, where fp32 comes between."""
    upper = torch.tensor([*range(0, 65536, 37), 0x7F80, 0x7FFF, 0xFF80, 0xFFFF], dtype=torch.int32)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = ((upper.unsqueeze(1) << 16) | lower).view(torch.float32).view(4, -1)
    for dtype in (torch.float32, torch.float64):
        check_encode(values.to(dtype), values[:, :3].to(dtype), "bfloat16", device, "values")
        check_encode(torch.ones(4, 2), values.to(dtype), "fp8", device, "rope")


@pytest.mark.parametrize(("rank", "rope"), SHAPES)
@pytest.mark.parametrize("compute_dtype", FLOATS)
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (48, 16), (3, 1)])
def test_packed_rows_are_read_as_by_the_reference(
    device: torch.device, rank: int, rope: int, compute_dtype: torch.dtype, gap: int, offset: int
) -> None:
    """Rows of any bits: every code, scales and rope keys of all kinds."""
    row_format = RowFormat("fp8", rank, rope, "fp8", 128)
    stored = random_bytes(13, row_format.latent_row_bytes)
    stored[:, :256] = torch.arange(256, dtype=torch.uint8)[: min(256, stored.shape[1])]
    # Scales of which a multiple fits, beside those of any bits.
    scales = torch.randn(6, row_format.latent_scales).view(torch.uint8)
    stored[:6, rank : rank + scales.shape[1]] = scales
    rows = GuardedRows.of(stored, device, gap=gap, offset=offset).rows
    with guarded_outputs():
        ours = kernels.decode_latent_rows(rows, row_format, compute_dtype).cpu()
    wanted = reference.decode_latent_rows(stored, row_format, compute_dtype)
    assert_same_bits(plain_nan(ours), plain_nan(wanted), "values")


def test_rows_of_any_shape_are_read(device: torch.device) -> None:
    row_format = RowFormat("fp8", 512, 64, "fp8", 128)
    latent, rope_key = latent_and_rope(1, 512, 64, torch.float32)
    row = reference.encode_latent_rows(latent + 1, rope_key, "fp8")
    stored = row.expand(6, -1).reshape(2, 3, 656)
    ours = kernels.decode_latent_rows(stored.to(device), row_format, torch.bfloat16)
    assert_same_bits(ours.cpu(), reference.decode_latent_rows(stored, row_format, torch.bfloat16), "values")
    empty = torch.empty(0, 5, 656, dtype=torch.uint8, device=device)
    assert kernels.decode_latent_rows(empty, row_format, torch.float32).shape == (0, 5, 576)


def test_aligned_float_rows_are_read_where_they_lie(device: torch.device) -> None:
    stored = random_bytes(4, 1152).to(device)
    values = kernels.decode_latent_rows(stored, RowFormat("bfloat16", 512, 64, "fp8", 128), torch.bfloat16)
    assert values.data_ptr() == stored.data_ptr() and values.shape == (4, 576)


ROWS = [
    (656, 0, 0),
    (1152, 0, 0),
    (1152, 16, 8),
    (656, 4, 0),
    (132, 0, 0),
    (24, 8, 8),
    (18, 0, 2),
    (7, 0, 3),
    (1, 2, 0),
]
"""Bytes of a row, of a gap behind each, and of an offset before the first."""


@pytest.mark.parametrize(("row_bytes", "gap", "offset"), ROWS)
@pytest.mark.parametrize("pool_gap", [0, 5])
def test_stored_rows_lie_where_they_should_and_nowhere_else(
    device: torch.device, row_bytes: int, gap: int, offset: int, pool_gap: int
) -> None:
    numbers = torch.tensor([12, 0, 29, 4, 7, -1, 28, 3])
    stored = random_bytes(len(numbers), row_bytes, seed=row_bytes)
    wanted = torch.full((30, row_bytes), 0xFF, dtype=torch.uint8)
    wanted[numbers[numbers >= 0]] = stored[numbers >= 0]
    pool = GuardedRows.make(device, 30, row_bytes, gap=pool_gap)
    kernels.store_rows(pool.rows, numbers.to(device), GuardedRows.of(stored, device, gap=gap, offset=offset).rows)
    pool.check(wanted, "pool")


@pytest.mark.parametrize(("row_bytes", "gap", "offset"), ROWS)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_gathered_rows_are_those_of_the_reference(
    device: torch.device, row_bytes: int, gap: int, offset: int, integers: torch.dtype
) -> None:
    content = random_bytes(30, row_bytes, seed=row_bytes)
    rows = GuardedRows.of(content, device, gap=gap, offset=offset)
    numbers = torch.tensor([[29, 0, 3], [3, 3, -1], [11, 28, 29]], dtype=integers)
    wanted = reference.gather_rows(content, numbers.clamp(min=0))
    wanted[numbers < 0] = 0
    with guarded_outputs():
        ours = kernels.gather_rows(rows.rows, numbers.to(device))
    assert_same_bits(ours.cpu(), wanted, "gathered")
    rows.check(content, "rows")


@pytest.mark.parametrize("count", [0, 1, 13, 500])
def test_any_number_of_rows(device: torch.device, count: int) -> None:
    content = random_bytes(500, 656)
    numbers = torch.randperm(500, generator=torch.Generator().manual_seed(count))[:count]
    gathered = kernels.gather_rows(content.to(device), numbers.to(device))
    assert_same_bits(gathered.cpu(), content[numbers], "gathered")
    pool = GuardedRows.make(device, 500, 656)
    kernels.store_rows(pool.rows, numbers.to(device), gathered)
    wanted = torch.full((500, 656), 0xFF, dtype=torch.uint8)
    wanted[numbers] = content[numbers]
    pool.check(wanted, "pool")


@pytest.mark.parametrize(("row_bytes", "span"), [(656, 2**35), (657, 2**32)])
def test_rows_beyond_two_to_the_31_words(device: torch.device, row_bytes: int, span: int) -> None:
    count = span // row_bytes + 2
    pool = far_bytes(device, count * row_bytes).view(count, row_bytes)
    stored = random_bytes(3, row_bytes)
    numbers = torch.tensor([count - 1, 5, count // 2 + 1], device=device)
    kernels.store_rows(pool, numbers, stored.to(device))
    for number, row in zip(numbers.tolist(), stored, strict=True):
        assert_same_bits(pool[number].cpu(), row, f"row {number}")
    for integers in (torch.int32, torch.int64):
        assert_same_bits(kernels.gather_rows(pool, numbers.to(integers)).cpu(), stored, "gathered")


def test_packed_rows_beyond_two_to_the_31_bytes_are_read(device: torch.device) -> None:
    row_format = RowFormat("fp8", 512, 64, "fp8", 128)
    latent, rope_key = latent_and_rope(2, 512, 64, torch.float32)
    stored = reference.encode_latent_rows(latent, rope_key, "fp8")
    # A stride that fits in 32 bits, so that nothing but the kernel's own care makes offsets that do not.
    stride = 2**31 - 16
    rows = far_bytes(device, 2 * stride + 656).as_strided((3, 656), (stride, 1))
    rows[::2] = stored.to(device)
    ours = kernels.decode_latent_rows(rows, row_format, torch.float32)[::2].cpu()
    wanted = reference.decode_latent_rows(stored, row_format, torch.float32)
    assert_same_bits(plain_nan(ours), plain_nan(wanted), "values")
