"""Rows of bytes: words, latent rows, and sparse attention over chosen rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.config.names import LatentDtype
from cpkv.layout.row_format import RowFormat
from cpkv.ops.reference.latent_rows import decode_latent_rows, encode_latent_rows, gather_rows, store_rows, torch_dtype
from cpkv.ops.reference.sparse_mla import sparse_mla
from cpkv.ops.words import as_words
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

DTYPES: dict[LatentDtype, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@given(
    row_bytes=st.integers(1, 40),
    gap=st.integers(0, 9),
    offset=st.integers(0, 17),
    divides=st.integers(0, 24),
    rows=st.integers(1, 4),
)
def test_words_are_the_same_memory_in_the_widest_integer_that_fits(
    row_bytes: int, gap: int, offset: int, divides: int, rows: int
) -> None:
    memory = torch.arange(offset + rows * (row_bytes + gap)).to(torch.uint8)
    view = memory.as_strided((rows, row_bytes), (row_bytes + gap, 1), offset)
    words = as_words(view, divides=divides)
    item = words.element_size()
    fits = [size for size in (1, 2, 4, 8) if not any(n % size for n in (row_bytes, row_bytes + gap, offset, divides))]
    assert item == max(fits)
    assert words.data_ptr() == view.data_ptr()
    assert_same_bits(words.contiguous().view(torch.uint8), view.contiguous(), "bytes")


@pytest.mark.parametrize("row_bytes", [1, 2, 6, 8, 12, 33, 1152])
def test_rows_written_as_words_land_where_rows_written_as_bytes_do(row_bytes: int) -> None:
    memory = torch.full((20, 3, row_bytes), 0xFF, dtype=torch.uint8)
    layer = memory[:, 1]
    rows = torch.randint(0, 256, (4, row_bytes), dtype=torch.uint8)
    words = as_words(layer)
    words[torch.tensor([17, 0, 3, 9])] = rows.view(words.dtype)
    wanted = torch.full((20, 3, row_bytes), 0xFF, dtype=torch.uint8)
    for place, row in zip([17, 0, 3, 9], rows, strict=True):
        wanted[place, 1] = row
    assert_same_bits(memory, wanted, "memory")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "rope"), [(1, 1), (5, 3), (64, 16)])
def test_a_latent_row_is_the_latent_then_the_rope_key_rounded_once(dtype: LatentDtype, rank: int, rope: int) -> None:
    latent, rope_key = torch.randn(6, rank, dtype=torch.float64), torch.randn(6, rope, dtype=torch.float64)
    stored = encode_latent_rows(latent, rope_key, dtype)
    item = DTYPES[dtype].itemsize
    assert torch_dtype(dtype) is DTYPES[dtype]
    assert stored.dtype == torch.uint8 and stored.shape == (6, (rank + rope) * item)
    for part, values in ((stored[:, : rank * item], latent), (stored[:, rank * item :], rope_key)):
        rounded = values.to(DTYPES[dtype])
        assert_same_bits(part.contiguous(), rounded.contiguous().view(torch.uint8), "bytes of a part")
    decoded = decode_latent_rows(stored, RowFormat(dtype, rank, rope, "float32", 8), DTYPES[dtype])
    assert decoded.shape == (6, rank + rope)
    assert_same_bits(decoded, torch.cat([latent, rope_key], dim=1).to(DTYPES[dtype]), "decoded")
    assert decoded.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens_make_no_rows(dtype: LatentDtype) -> None:
    """Kind 21: a rank without a token."""
    stored = encode_latent_rows(torch.zeros(0, 5), torch.zeros(0, 3), dtype)
    assert stored.shape == (0, 8 * DTYPES[dtype].itemsize)


@pytest.mark.parametrize("row_bytes", [1, 6, 10, 12, 24, 2304])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_stored_rows_lie_in_their_places_and_nowhere_else(row_bytes: int, first: int) -> None:
    """Any row size, into the base shifted by any number of rows, from a slice of a larger buffer."""
    pool = torch.full((30, row_bytes), 0xFF, dtype=torch.uint8)
    buffer = torch.randint(0, 255, (9, row_bytes), dtype=torch.uint8)
    places = [20, 0, 13, 5]
    store_rows(pool[first:], torch.tensor(places), buffer[first : first + 4])
    wanted = torch.full((30, row_bytes), 0xFF, dtype=torch.uint8)
    for number, place in enumerate(places):
        wanted[first + place] = buffer[first + number]
    assert_same_bits(pool, wanted, "pool")


def test_gathered_rows_are_those_named_for_numbers_of_any_shape() -> None:
    rows = torch.randn(40, 3, dtype=torch.float64)
    numbers = torch.tensor([[3, 39, 0], [3, 3, 17]])
    gathered = gather_rows(rows, numbers)
    assert gathered.shape == (2, 3, 3)
    for query in range(2):
        for place in range(3):
            assert_same_bits(gathered[query, place], rows[numbers[query, place]], "row")


def naive_attention(
    query: list[list[float]], rows: list[list[float]], chosen: list[int], scale: float, rank: int
) -> list[list[float]]:
    """Softmax over the rows that are there, one head and one value at a time."""
    out = []
    for head in query:
        there = [row for row, pos in zip(rows, chosen, strict=True) if pos >= 0]
        logits = [scale * sum(a * b for a, b in zip(head, row, strict=True)) for row in there]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        values = [sum(w * row[at] for w, row in zip(weights, there, strict=True)) for at in range(rank)]
        out.append([value / sum(weights) for value in values])
    return out


CHOSEN = [[0, 4, 9, 11], [2, 3, -1, -1], [7, -1, -1, -1], [-1, 5, -1, 6]]


@pytest.mark.parametrize("filler", [0.0, -7.0, 1e300], ids=["zero", "small", "huge"])
def test_attention_is_that_of_a_naive_loop_whatever_finite_row_fills_the_gaps(filler: float) -> None:
    """Kind 9: a place without a token has no weight, also where its row would win the softmax."""
    chosen = torch.tensor(CHOSEN)
    queries = torch.randn(4, 3, 8, dtype=torch.float64)
    rows = torch.randn(4, 4, 8, dtype=torch.float64)
    rows[chosen < 0] = filler
    out = sparse_mla(queries, rows, chosen, scale=0.37, kv_lora_rank=5)
    assert out.shape == (4, 3, 5)
    for number in range(4):
        naive = naive_attention(queries[number].tolist(), rows[number].tolist(), CHOSEN[number], 0.37, 5)
        torch.testing.assert_close(out[number], torch.tensor(naive, dtype=torch.float64), rtol=0, atol=1e-13)


def test_the_rows_that_fill_the_gaps_change_no_bit() -> None:
    chosen = torch.tensor(CHOSEN)
    queries, rows = torch.randn(4, 3, 8), torch.randn(4, 4, 8)
    outs = []
    for filler in (0.0, 3e38, -3e38):
        rows[chosen < 0] = filler
        outs.append(sparse_mla(queries, rows, chosen, scale=0.5, kv_lora_rank=5))
    for out in outs[1:]:
        assert_same_bits(out, outs[0], "with another filler")


def test_a_nan_row_that_was_chosen_shows_in_its_query_and_no_other() -> None:
    """Kind 8: poison is not hidden."""
    queries, rows = torch.randn(3, 2, 6), torch.randn(3, 4, 6)
    rows[1, 2] = float("nan")
    out = sparse_mla(queries, rows, torch.arange(4).expand(3, -1), scale=1.0, kv_lora_rank=4)
    assert [bool(part.isnan().any()) for part in out] == [False, True, False]
