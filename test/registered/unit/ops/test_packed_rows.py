"""Packed fp8 latent rows against an implementation of e4m3 that looks at one value at a time."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv.layout.row_format import RowFormat
from cpkv.ops.reference.latent_rows import decode_latent_rows, encode_latent_rows, gather_rows, store_rows
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

RANKS = (5, 64, 130, 512)
ROPES = (1, 3, 16, 64)
FLT_MIN = np.float32(2.0**-126)
# From denormals of fp32 to where a bfloat16 still has room.
EXPONENTS = (-45, -40, -38, -30, -4, 0, 3, 30)

shapes = st.tuples(st.sampled_from(RANKS), st.sampled_from(ROPES))


def e4m3_value(code: int) -> float:
    """The value of a code by the definition: sign, 4 bits of exponent with bias 7, 3 bits of mantissa, no infinity."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


E4M3 = tuple(e4m3_value(code) for code in range(256))
MAGNITUDES = E4M3[:127]


def e4m3_code(value: float) -> int:
    """The nearest code; of two that are equally near the one with an even mantissa."""
    magnitude = abs(value)
    above = min(bisect_left(MAGNITUDES, magnitude), 126)
    near = min((max(above - 1, 0), above), key=lambda code: (abs(MAGNITUDES[code] - magnitude), code & 1))
    return near | (128 if math.copysign(1.0, value) < 0 else 0)


def half_step(quotient: float) -> float:
    """Half the distance of e4m3's values where `quotient` lies."""
    return 2.0**-10 if quotient < 2.0**-6 else 2.0 ** (math.floor(math.log2(quotient)) - 4)


def packed(rank: int, rope: int) -> RowFormat:
    return RowFormat("fp8", rank, rope, "fp8", 128)


def draw_rows(tokens: int, rank: int, rope: int, exponents: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows whose groups of 128 have different magnitudes."""
    random = torch.Generator().manual_seed(seed)
    latent = torch.randn(tokens, rank, generator=random, dtype=torch.float64)
    for number in range(tokens):
        for group, first in enumerate(range(0, rank, 128)):
            latent[number, first : first + 128] *= 10.0 ** exponents[(number + group) % len(exponents)]
    return latent.to(torch.float32), torch.randn(tokens, rope, generator=random)


def packed_by_hand(latent: torch.Tensor, rope_key: torch.Tensor) -> bytes:
    """The row of one token, value by value, fp32 arithmetic by numpy."""
    codes, scales = bytearray(), bytearray()
    values = latent.numpy()
    for first in range(0, len(values), 128):
        group = values[first : first + 128]
        scale = max(np.float32(max(abs(value) for value in group)) / np.float32(448), FLT_MIN)
        codes += bytes(e4m3_code(float(value / scale)) for value in group)
        scales += scale.tobytes()
    # bfloat16: the upper half of fp32, rounded to nearest even.
    words = [int(bits) for bits in rope_key.numpy().view(np.uint32)]
    halves = [(bits + 0x7FFF + (bits >> 16 & 1)) >> 16 for bits in words]
    return bytes(codes + scales) + b"".join(half.to_bytes(2, "little") for half in halves)


def values_by_hand(row: bytes, rank: int, rope: int) -> list[float]:
    """Values of one packed row."""
    groups = math.ceil(rank / 128)
    scales = np.frombuffer(row[rank : rank + 4 * groups], np.float32)
    latents = [float(np.float32(E4M3[row[at]]) * scales[at // 128]) for at in range(rank)]
    halves = np.frombuffer(row[rank + 4 * groups :], np.uint16).astype(np.uint32) << 16
    assert len(halves) == rope
    return latents + [float(value) for value in halves.view(np.float32)]


def test_torch_and_the_table_of_this_file_mean_the_same_format() -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).to(torch.float64)
    torch.testing.assert_close(values, torch.tensor(E4M3, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)
    there = [code for code in range(256) if code & 127 != 127]
    assert [e4m3_code(E4M3[code]) for code in there] == there
    assert [e4m3_code(value) for value in (17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -17.0)] == [88, 90, 0, 2, 216]


@settings(max_examples=40)
@given(
    shape=shapes,
    tokens=st.integers(1, 3),
    exponents=st.lists(st.sampled_from(EXPONENTS), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_rows_are_those_of_the_value_by_value_implementation(
    shape: tuple[int, int], tokens: int, exponents: list[int], seed: int
) -> None:
    latent, rope_key = draw_rows(tokens, *shape, exponents, seed)
    stored = encode_latent_rows(latent, rope_key, "fp8")
    assert stored.dtype == torch.uint8 and stored.shape == (tokens, packed(*shape).latent_row_bytes)
    decoded = decode_latent_rows(stored, packed(*shape), torch.float32)
    assert decoded.shape == (tokens, sum(shape))
    for number in range(tokens):
        by_hand = packed_by_hand(latent[number], rope_key[number])
        assert bytes(stored[number].tolist()) == by_hand
        wanted = torch.tensor(values_by_hand(by_hand, *shape), dtype=torch.float32)
        assert_same_bits(decoded[number], wanted, f"row {number}")


@settings(max_examples=40)
@given(shape=shapes, exponents=st.lists(st.sampled_from(EXPONENTS), min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_a_value_is_off_by_half_a_step_of_e4m3_at_most(shape: tuple[int, int], exponents: list[int], seed: int) -> None:
    rank, rope = shape
    latent, rope_key = draw_rows(2, rank, rope, exponents, seed)
    decoded = decode_latent_rows(encode_latent_rows(latent, rope_key, "fp8"), packed(*shape), torch.float64)
    for row, back in zip(latent.tolist(), decoded[:, :rank].tolist(), strict=True):
        for first in range(0, rank, 128):
            group = row[first : first + 128]
            scale = max(max(map(abs, group)) / 448, 2.0**-126)
            for value, got in zip(group, back[first : first + 128], strict=True):
                # Scale, quotient and product are each rounded to fp32.
                slack = abs(value) * 2.0**-21 + 2.0**-148
                assert abs(got - value) <= scale * half_step(abs(value) / scale) + slack
    torch.testing.assert_close(decoded[:, rank:].float(), rope_key, rtol=2.0**-8, atol=0)


def test_the_parts_of_a_published_row_lie_at_their_offsets() -> None:
    """656 bytes: e4m3 at 0 to 511, four fp32 scales at 512 to 527, 64 bfloat16 at 528 to 655."""
    latent = torch.zeros(1, 512)
    for group, magnitude in enumerate((448.0, 896.0, 224.0, 44.8)):
        latent[0, 128 * group : 128 * group + 128] = magnitude / 2
        latent[0, 128 * group + group] = -magnitude
    stored = encode_latent_rows(latent, torch.arange(64.0)[None], "fp8")
    assert stored.shape == (1, 656)
    row = bytes(stored[0].tolist())
    for group in range(4):
        wanted = bytearray([e4m3_code(224.0)] * 128)
        wanted[group] = e4m3_code(-448.0)
        assert row[128 * group : 128 * group + 128] == bytes(wanted)
    assert np.frombuffer(row[512:528], "<f4").tolist() == [1.0, 2.0, 0.5, float(np.float32(44.8) / np.float32(448))]
    assert row[528:656] == b"".join((np.float32(n).view(np.uint32) >> 16).astype("<u2").tobytes() for n in range(64))


def test_a_quotient_halfway_between_two_values_goes_to_the_even_one() -> None:
    """With scales that are no power of two, so that the quotient must be a true division."""
    scales = torch.arange(3.0, 203.0, 2.0)
    halfway = [(low + high) / 2 for low, high in zip(MAGNITUDES[1:126], MAGNITUDES[2:127], strict=True)]
    latent = scales[:, None] * torch.tensor([448.0, *halfway])
    stored = encode_latent_rows(latent, torch.zeros(len(scales), 1), "fp8")
    codes = torch.tensor([126, *(code + (code & 1) for code in range(1, 126))], dtype=torch.uint8)
    assert_same_bits(stored[:, :126], codes.expand(len(scales), -1), "codes")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_strides_of_what_is_encoded_do_not_matter(dtype: torch.dtype, tokens: int) -> None:
    both = torch.randn(tokens, 133).to(dtype)
    wanted = encode_latent_rows(both[:, :130].contiguous(), both[:, 130:].contiguous(), "fp8")
    assert_same_bits(encode_latent_rows(both[:, :130], both[:, 130:], "fp8"), wanted, "out of one projection")
    columns = both.t().contiguous().t()
    assert_same_bits(encode_latent_rows(columns[:, :130], columns[:, 130:], "fp8"), wanted, "columns first")


@pytest.mark.parametrize("rank", RANKS)
def test_zeros_are_zeros(rank: int) -> None:
    latent = torch.zeros(2, rank)
    latent[1, 0] = 3.0
    decoded = decode_latent_rows(encode_latent_rows(latent, torch.zeros(2, 3), "fp8"), packed(rank, 3), torch.float32)
    torch.testing.assert_close(decoded[:, :rank], latent, rtol=1e-6, atol=0)
    assert not decoded[0].any() and not decoded[1, 1:].any()


@pytest.mark.parametrize("magnitude", [1e30, 3e38, 1e-30, 1e-38, 1e-41, 1e-45])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_huge_and_tiny_values_stay_finite_and_near(magnitude: float, dtype: torch.dtype) -> None:
    latent = torch.tensor([[magnitude, -magnitude, magnitude / 3, 0.0, magnitude / 400]], dtype=dtype)
    stored = encode_latent_rows(latent, torch.ones(1, 1), "fp8")
    decoded = decode_latent_rows(stored, packed(5, 1), torch.float64)[:, :5]
    # Below the smallest scale the steps no longer shrink with the values.
    torch.testing.assert_close(decoded, latent.double(), rtol=2.0**-4 + 1e-6, atol=2.0**-136)
    assert decoded.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 127, 128, 129])
def test_a_value_that_is_no_number_shows_in_its_128_and_in_no_others(bad: float, place: int) -> None:
    """Kind 8: poison is not hidden."""
    latent, rope_key = torch.randn(3, 130), torch.randn(3, 3)
    good = decode_latent_rows(encode_latent_rows(latent, rope_key, "fp8"), packed(130, 3), torch.float32)
    latent[1, place] = bad
    decoded = decode_latent_rows(encode_latent_rows(latent, rope_key, "fp8"), packed(130, 3), torch.float32)
    poisoned = torch.zeros(3, 133, dtype=torch.bool)
    poisoned[1, place // 128 * 128 : min(place // 128 * 128 + 128, 130)] = True
    assert_same_bits(decoded.isnan(), poisoned, "places of NaN")
    assert_same_bits(decoded[~poisoned], good[~poisoned], "the other values")


def test_a_rope_value_that_is_no_number_and_poisoned_bytes_show() -> None:
    rope_key = torch.tensor([[1.0, math.nan, math.inf]])
    decoded = decode_latent_rows(encode_latent_rows(torch.ones(1, 5), rope_key, "fp8"), packed(5, 3), torch.float32)
    assert decoded[0].isnan().tolist() == [False] * 5 + [False, True, False] and decoded[0, 7] == math.inf
    poison = torch.full((2, packed(130, 3).latent_row_bytes), 0xFF, dtype=torch.uint8)
    assert decode_latent_rows(poison, packed(130, 3), torch.bfloat16).isnan().all()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("rope", [0, 3, 64])
def test_no_tokens_make_no_rows(rank: int, rope: int) -> None:
    """Kind 21: a rank without a token."""
    stored = encode_latent_rows(torch.zeros(0, rank), torch.zeros(0, rope), "fp8")
    assert stored.shape == (0, packed(rank, rope).latent_row_bytes)
    assert decode_latent_rows(stored, packed(rank, rope), torch.float32).shape == (0, rank + rope)
    gathered = gather_rows(torch.zeros(4, stored.shape[1], dtype=torch.uint8), torch.zeros(0, 7, dtype=torch.int64))
    assert gathered.shape == (0, 7, stored.shape[1])
    assert decode_latent_rows(gathered, packed(rank, rope), torch.float32).shape == (0, 7, rank + rope)


@pytest.mark.parametrize("compute_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_is_made_in_fp32_and_rounded_to_the_compute_dtype(compute_dtype: torch.dtype) -> None:
    stored = encode_latent_rows(torch.randn(4, 130), torch.randn(4, 3), "fp8")
    fp32 = decode_latent_rows(stored, packed(130, 3), torch.float32)
    decoded = decode_latent_rows(stored, packed(130, 3), compute_dtype)
    assert_same_bits(decoded, fp32.to(compute_dtype), "decoded")


@settings(max_examples=60)
@given(
    shape=shapes,
    dtype=st.sampled_from(["fp8", "bfloat16", "float32", "float64"]),
    before=st.integers(0, 9),
    gap=st.integers(0, 9),
    leading=st.sampled_from([(1,), (6,), (2, 3), (3, 1, 2)]),
    seed=st.integers(0, 2**31),
)
def test_a_row_has_the_same_bits_wherever_it_lies_and_whatever_its_neighbours(
    shape: tuple[int, int], dtype: str, before: int, gap: int, leading: tuple[int, ...], seed: int
) -> None:
    """Encoded alone or in a batch, decoded alone, in a batch, or out of the middle of poisoned memory."""
    row_format = RowFormat(dtype, *shape, "fp8", 128)  # type: ignore[arg-type]
    tokens = math.prod(leading)
    latent, rope_key = draw_rows(tokens, *shape, [0, 3, -4], seed)
    stored = encode_latent_rows(latent, rope_key, row_format.latent_dtype)
    decoded = decode_latent_rows(stored, row_format, torch.float32)
    stride = row_format.latent_row_bytes + gap
    memory = torch.full((before + tokens * stride,), 0xFF, dtype=torch.uint8)
    view = memory[before:].view(*leading, stride)[..., : row_format.latent_row_bytes]
    view.copy_(stored.view(*leading, -1))
    assert_same_bits(decode_latent_rows(view, row_format, torch.float32).reshape(tokens, -1), decoded, "out of memory")
    for number in range(tokens):
        one = slice(number, number + 1)
        alone = encode_latent_rows(latent[one], rope_key[one], row_format.latent_dtype)
        assert_same_bits(alone, stored[one], "encoded alone")
        assert_same_bits(decode_latent_rows(stored[number], row_format, torch.float32), decoded[number], "one row")


@pytest.mark.parametrize(("rank", "rope"), [(5, 3), (5, 1), (64, 16), (130, 3), (512, 64)])
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_rows_that_were_stored_are_those_gathered(rank: int, rope: int, first: int, gap: int) -> None:
    """Into the base shifted by any number of rows, from rows that may lie apart, by numbers of any shape."""
    row_format = packed(rank, rope)
    row_bytes = row_format.latent_row_bytes
    stored = encode_latent_rows(torch.randn(4, rank), torch.randn(4, rope), "fp8")
    apart = torch.zeros(4, row_bytes + gap, dtype=torch.uint8)[:, :row_bytes].copy_(stored)
    pool = torch.full((30, row_bytes), 0xFF, dtype=torch.uint8)
    places = [20, 0, 13, 5]
    store_rows(pool[first:], torch.tensor(places), apart)
    wanted = torch.full((30, row_bytes), 0xFF, dtype=torch.uint8)
    for number, place in enumerate(places):
        wanted[first + place] = stored[number]
    assert_same_bits(pool, wanted, "pool")

    numbers = torch.tensor([[[20, 5, 0], [5, 5, 13]]])
    gathered = gather_rows(pool[first:], numbers)
    assert gathered.shape == (1, 2, 3, row_bytes) and gathered.dtype == torch.uint8 and gathered.is_contiguous()
    for query in range(2):
        for at in range(3):
            row = stored[places.index(int(numbers[0, query, at]))]
            assert_same_bits(gathered[0, query, at], row, "gathered row")
    assert_same_bits(gather_rows(apart, torch.tensor([3, 1])), stored[[3, 1]], "rows gathered out of rows apart")
