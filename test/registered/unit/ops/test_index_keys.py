"""Index keys: scales against exact fractions, e4m3 against its definition, blocks against a dict of tokens."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.config.names import IndexDtype
from cpkv.ops.reference.index_keys import (
    SMALLEST_AMAX,
    decode_index_keys,
    encode_index_keys,
    power_of_two_scale,
    store_index_keys,
    unpack_index_keys,
)
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

FLOATS: tuple[IndexDtype, ...] = ("float64", "float32", "bfloat16")
TORCH = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def naive_scale(amax: Fraction) -> Fraction:
    """The smallest power of two that is at least amax / 448, by doubling and halving."""
    wanted, scale = amax / 448, Fraction(1)
    while scale < wanted:
        scale *= 2
    while scale / 2 >= wanted:
        scale /= 2
    return scale


def e4m3_values() -> list[Fraction]:
    """Every finite value of e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are NaN."""
    values = []
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) == (15, 7):
                continue
            if exponent == 0:
                values.append(Fraction(mantissa, 8) * Fraction(1, 2**6))
            else:
                values.append((1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7))
    return [*values, *(-value for value in values)]


@given(st.floats(2.0**-13, 2.0**100, width=32))
def test_the_scale_is_the_smallest_power_of_two_that_is_large_enough(amax: float) -> None:
    scale = power_of_two_scale(torch.tensor([amax], dtype=torch.float32))
    assert scale.dtype == torch.float32
    assert Fraction(scale.item()) == naive_scale(Fraction(amax))


@pytest.mark.parametrize("exponent", range(-20, 60, 3))
def test_the_scale_is_exact_next_to_448_times_a_power_of_two(exponent: int) -> None:
    """Where rounding amax / 448 to fp32 could choose the neighbour."""
    exact = torch.tensor(448.0) * 2.0**exponent
    inf = torch.tensor(float("inf"))
    for amax in (exact, torch.nextafter(exact, inf), torch.nextafter(exact, -inf)):
        assert Fraction(power_of_two_scale(amax).item()) == naive_scale(Fraction(amax.item()))


@pytest.mark.parametrize("amax", [0.0, 1e-30, SMALLEST_AMAX / 2])
def test_a_key_of_nearly_zeros_gets_the_smallest_scale(amax: float) -> None:
    smallest = Fraction(torch.tensor(SMALLEST_AMAX, dtype=torch.float32).item())
    assert Fraction(power_of_two_scale(torch.tensor(amax)).item()) == naive_scale(smallest)


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.floats(-1e4, 1e4, width=32), min_size=4 * n, max_size=4 * n)))
def test_fp8_values_are_the_nearest_of_e4m3_times_the_scale(key: list[float]) -> None:
    stored = encode_index_keys(torch.tensor([key], dtype=torch.float32), "fp8")
    assert stored.shape == (1, len(key) + 4) and stored.dtype == torch.uint8
    amax = max(max(map(abs, map(Fraction, key))), Fraction(torch.tensor(SMALLEST_AMAX).item()))
    scale = naive_scale(amax)
    decoded = decode_index_keys(stored, "fp8", torch.float64)[0].tolist()
    grid = e4m3_values()
    for wanted, got in zip(map(Fraction, key), map(Fraction, decoded), strict=True):
        assert got / scale in grid
        assert abs(got - wanted) == min(abs(value * scale - wanted) for value in grid)


def test_every_byte_of_e4m3_times_any_scale_survives_a_round_trip() -> None:
    grid = torch.tensor([float(value) for value in e4m3_values()])
    grid = torch.cat([grid, torch.zeros(2)])
    for exponent in (-15, -3, 0, 7):
        keys = (grid * 2.0**exponent).unsqueeze(0)
        decoded = decode_index_keys(encode_index_keys(keys, "fp8"), "fp8", torch.float32)
        assert bool((decoded == keys).all())


def test_the_scale_is_behind_the_key_as_fp32_and_multiplies_it() -> None:
    keys = torch.tensor([[448.0 * 4, -8.0, 0.0], [1.0, 2.0, -3.0]])
    stored = encode_index_keys(keys, "fp8")
    assert stored[:, 3:].contiguous().view(torch.float32).flatten().tolist() == [4.0, 2.0**-7]
    raw = stored[:, :3].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    assert raw.tolist() == [[448.0, -2.0, 0.0], [128.0, 256.0, -384.0]]
    assert decode_index_keys(stored, "fp8", torch.float64).tolist() == keys.tolist()


def test_one_token_of_a_dimension_that_is_no_multiple_of_four_can_be_decoded() -> None:
    keys = torch.tensor([[1.0, 2.0, -3.0]])
    assert decode_index_keys(encode_index_keys(keys, "fp8"), "fp8", torch.float32).tolist() == keys.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_nan_key_stays_nan_in_fp8(dtype: torch.dtype) -> None:
    keys = torch.ones(3, 8, dtype=dtype)
    keys[1, 5] = float("nan")
    decoded = decode_index_keys(encode_index_keys(keys, "fp8"), "fp8", torch.float32)
    assert bool(decoded[1].isnan().any())
    assert decoded[[0, 2]].tolist() == [[1.0] * 8] * 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [1, 7, 32])
def test_float_keys_are_rounded_once_and_read_back_bit_for_bit(dtype: IndexDtype, dim: int) -> None:
    keys = torch.randn(9, dim, dtype=torch.float64)
    stored = encode_index_keys(keys, dtype)
    assert stored.shape == (9, dim * TORCH[dtype].itemsize)
    rounded = keys.to(TORCH[dtype])
    assert_same_bits(stored, rounded.contiguous().view(torch.uint8), "stored bytes")
    assert_same_bits(decode_index_keys(stored, dtype, torch.float64), rounded.to(torch.float64), "decoded")


@pytest.mark.parametrize("dtype", [*FLOATS, "fp8"])
def test_no_tokens_make_no_rows(dtype: IndexDtype) -> None:
    """Kind 21: a rank without a token."""
    stored = encode_index_keys(torch.zeros(0, 8), dtype)
    assert stored.shape[0] == 0 and stored.dtype == torch.uint8
    assert decode_index_keys(stored, dtype, torch.float32).shape == (0, 8)


def byte_places(offset: int, page_size: int, key_bytes: int, scale_bytes: int) -> list[int]:
    """The bytes of a block that hold a token: its key among the keys, then its scale behind all keys."""
    keys = [offset * key_bytes + at for at in range(key_bytes)]
    return keys + [page_size * key_bytes + offset * scale_bytes + at for at in range(scale_bytes)]


@pytest.mark.parametrize(("key_bytes", "scale_bytes"), [(7, 4), (128, 4), (12, 0), (1, 0)])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_stored_keys_lie_in_their_block_and_nowhere_else(page_size: int, key_bytes: int, scale_bytes: int) -> None:
    """Kind 6: token by token, across and inside pages; every other byte keeps its poison."""
    random_ = random.Random(page_size)
    places = random_.sample([(block, offset) for block in range(11) for offset in range(page_size)], 9)
    stored = torch.randint(0, 255, (9, key_bytes + scale_bytes), dtype=torch.uint8)
    blocks = torch.full((11, page_size * (key_bytes + scale_bytes)), 0xFF, dtype=torch.uint8)
    wanted = [[0xFF] * blocks.shape[1] for _ in range(11)]
    for (block, offset), row in zip(places, stored.tolist(), strict=True):
        for place, value in zip(byte_places(offset, page_size, key_bytes, scale_bytes), row, strict=True):
            wanted[block][place] = value
    numbers, offsets = (torch.tensor(part) for part in zip(*places, strict=True))
    store_index_keys(blocks, numbers, offsets, stored, page_size=page_size, key_bytes=key_bytes)
    assert_same_bits(blocks, torch.tensor(wanted, dtype=torch.uint8), "blocks")


@pytest.mark.parametrize(("key_bytes", "scale_bytes"), [(7, 4), (128, 4), (12, 0), (1, 0)])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_unpacked_keys_are_in_position_order_for_every_length(page_size: int, key_bytes: int, scale_bytes: int) -> None:
    """Kinds 6, 12 and 13: blocks in any order, and up to the last token only."""
    row_bytes = key_bytes + scale_bytes
    blocks = torch.randint(0, 256, (13, page_size * row_bytes), dtype=torch.uint8)
    numbers = [9, 2, 11, 3]
    for tokens in range(1, 3 * page_size + 2):
        used = numbers[: -(-tokens // page_size)]
        unpacked = unpack_index_keys(
            blocks, torch.tensor(used), tokens=tokens, page_size=page_size, key_bytes=key_bytes
        )
        wanted = [
            blocks[used[pos // page_size]][byte_places(pos % page_size, page_size, key_bytes, scale_bytes)]
            for pos in range(tokens)
        ]
        assert_same_bits(unpacked, torch.stack(wanted), f"{tokens} tokens")


@pytest.mark.parametrize("dtype", [*FLOATS, "fp8"])
def test_what_is_stored_is_unpacked_bit_for_bit(dtype: IndexDtype) -> None:
    page_size, tokens = 5, 23
    stored = encode_index_keys(torch.randn(tokens, 8, dtype=torch.float64), dtype)
    key_bytes = 8 if dtype == "fp8" else stored.shape[1]
    blocks = torch.full((12, page_size * stored.shape[1]), 0xFF, dtype=torch.uint8)
    numbers = torch.tensor([7, 1, 10, 4, 8])
    positions = torch.randperm(tokens)
    store_index_keys(
        blocks,
        numbers[positions // page_size],
        positions % page_size,
        stored[positions],
        page_size=page_size,
        key_bytes=key_bytes,
    )
    unpacked = unpack_index_keys(blocks, numbers, tokens=tokens, page_size=page_size, key_bytes=key_bytes)
    assert_same_bits(unpacked, stored, "stored and unpacked")
