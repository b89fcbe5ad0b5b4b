"""Bytes of a token's rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.layout.row_format import RowFormat
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")


@pytest.mark.parametrize(
    ("rank", "rope", "scales", "row_bytes"),
    [(512, 64, 4, 656), (512, 0, 4, 528), (5, 3, 1, 15), (128, 1, 1, 134), (129, 1, 2, 139), (130, 16, 2, 170)],
)
def test_a_packed_row_is_its_values_its_scales_and_a_bfloat16_rope_key(
    rank: int, rope: int, scales: int, row_bytes: int
) -> None:
    rows = RowFormat("fp8", rank, rope, "fp8", 128)
    assert (rows.latent_scales, rows.latent_row_bytes, rows.latent_width) == (scales, row_bytes, rank + rope)


@given(rank=st.integers(1, 600), rope=st.integers(0, 80))
def test_each_128_values_begun_take_one_scale(rank: int, rope: int) -> None:
    rows = RowFormat("fp8", rank, rope, "fp8", 128)
    assert rows.latent_row_bytes == rank + 4 * len(range(0, rank, 128)) + 2 * rope


@pytest.mark.parametrize(("dtype", "item"), [("float64", 8), ("float32", 4), ("bfloat16", 2)])
def test_a_float_row_has_no_scales_whatever_the_index_keys_are(dtype: str, item: int) -> None:
    rows = RowFormat(dtype, 130, 16, "fp8", 128)  # type: ignore[arg-type]
    assert (rows.latent_scales, rows.latent_row_bytes) == (0, 146 * item)


@pytest.mark.parametrize(("index", "key_bytes", "row_bytes"), [("fp8", 128, 132), ("bfloat16", 256, 256)])
def test_packed_latents_leave_the_index_keys_as_they_were(index: str, key_bytes: int, row_bytes: int) -> None:
    rows = RowFormat("fp8", 512, 64, index, 128)  # type: ignore[arg-type]
    assert (rows.index_key_bytes, rows.index_row_bytes) == (key_bytes, row_bytes)
