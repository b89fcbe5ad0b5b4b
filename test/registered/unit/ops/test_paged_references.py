"""What decode kernels must equal: scores of index blocks and attention to packed pages, one value at a time."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch

from cpkv.ops.reference.indexer import fp8_paged_indexer_scores
from cpkv.ops.reference.sparse_mla import sparse_mla_pages, sparse_mla_rows
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

NEG_INF = float("-inf")
POISON = 0xFF
# Codes of e4m3 whose values are easily named: sign, exponent with bias 7, and no mantissa.
VALUES = {0x00: 0.0, 0x30: 0.5, 0x38: 1.0, 0xB8: -1.0, 0x40: 2.0, 0xC0: -2.0, 0x3C: 1.5}
CODES = list(VALUES)


def shuffled_pages(counts: list[int], spare: int, rng: random.Random) -> list[list[int]]:
    """Distinct page numbers for each request, from 1 on: page 0 is the trash page."""
    numbers = list(range(1, sum(counts) + 1 + spare))
    rng.shuffle(numbers)
    return [[numbers.pop() for _ in range(count)] for count in counts]


@pytest.mark.parametrize(("page_size", "dim", "heads"), [(1, 4, 1), (3, 8, 2), (16, 4, 3)])
@pytest.mark.parametrize("slots", [1, 3])
def test_paged_scores_are_those_of_a_loop_over_tokens(page_size: int, dim: int, heads: int, slots: int) -> None:
    """Every length about a page; all that no request owns, other slots and unwritten tokens too, is NaN."""
    rng = random.Random(page_size)
    lengths = [1, page_size, page_size + 1, 0, 3 * page_size + 2, max(1, page_size - 1)]
    counts = [-(-tokens // page_size) for tokens in lengths]
    pages = shuffled_pages(counts, 4, rng)
    pool = torch.full((sum(counts) + 5, slots, page_size * (dim + 4)), POISON, dtype=torch.uint8)
    query_codes = [[[rng.choice(CODES) for _ in range(dim)] for _ in range(heads)] for _ in lengths]
    weights = [[rng.uniform(-1, 1) for _ in range(heads)] for _ in lengths]
    table = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    wanted = torch.full((len(lengths), table.shape[1] * page_size), NEG_INF, dtype=torch.float64)
    for request, tokens in enumerate(lengths):
        table[request, : counts[request]] = torch.tensor(pages[request], dtype=torch.int32)
        for position in range(tokens):
            key = [rng.choice(CODES) for _ in range(dim)]
            scale = 2.0 ** rng.randint(-3, 3)
            block = pool[pages[request][position // page_size], -1]
            offset = position % page_size
            block[offset * dim : (offset + 1) * dim] = torch.tensor(key, dtype=torch.uint8)
            first = page_size * dim + 4 * offset
            block[first : first + 4] = torch.tensor(list(struct.pack("<f", scale)), dtype=torch.uint8)
            products = [
                sum(VALUES[a] * VALUES[b] for a, b in zip(head, key, strict=True)) for head in query_codes[request]
            ]
            wanted[request, position] = scale * sum(
                weight * max(product, 0.0) for weight, product in zip(weights[request], products, strict=True)
            )
    queries = torch.tensor(query_codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scores = fp8_paged_indexer_scores(queries, torch.tensor(weights), pool[:, -1], table, torch.tensor(lengths))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_nan_key_that_a_request_sees_reaches_its_score_and_no_other() -> None:
    """Kind 8: the ReLU does not hide the poison of a key that should not be read."""
    pool = torch.zeros(4, 2 * 8, dtype=torch.uint8)
    pool[2, 4:8] = POISON
    table = torch.tensor([[1, 2], [2, 3]], dtype=torch.int32)
    queries = torch.zeros(2, 1, 4).to(torch.float8_e4m3fn)
    scores = fp8_paged_indexer_scores(queries, torch.ones(2, 1), pool, table, torch.tensor([4, 1]))
    assert scores.isnan().nonzero().tolist() == [[0, 3]]


def packed_row(values: list[int], scales: list[float], rope: list[float]) -> torch.Tensor:
    """A packed row by its definition: codes, fp32 scales, bfloat16 rope keys, which are the upper halves of fp32."""
    halves = b"".join(struct.pack("<f", value)[2:] for value in rope)
    return torch.tensor(list(bytes(values) + struct.pack(f"<{len(scales)}f", *scales) + halves), dtype=torch.uint8)


def attend(query: list[float], rows: list[list[float]], rank: int, scale: float) -> tuple[list[float], float]:
    """Softmax over rows, one product at a time."""
    logits = [scale * sum(a * b for a, b in zip(query, row, strict=True)) for row in rows]
    total = sum(math.exp(logit) for logit in logits)
    out = [sum(math.exp(x) * row[d] for x, row in zip(logits, rows, strict=True)) / total for d in range(rank)]
    return out, math.log(total)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_to_packed_pages_is_that_of_a_loop_over_tokens(
    page_size: int, layers: int, dtype: torch.dtype
) -> None:
    """The last layer of a pool that is NaN elsewhere; -1 first, last, everywhere but once, and everywhere."""
    rng = random.Random(page_size)
    rank, rope, heads, tokens = 130, 2, 2, 7
    numbers = shuffled_pages([-(-tokens // page_size)], 5, rng)[0]
    pool = torch.full((len(numbers) + 6, layers, page_size, rank + 2 * 4 + 2 * rope), POISON, dtype=torch.uint8)
    values, places = [], []
    for position in range(tokens):
        codes = [rng.choice(CODES) for _ in range(rank)]
        scales = [2.0 ** rng.randint(-3, 1) for _ in range(2)]
        rope_key = [rng.choice([-1.5, 0.25, 3.0]) for _ in range(rope)]
        page, offset = numbers[position // page_size], position % page_size
        pool[page, -1, offset] = packed_row(codes, scales, rope_key)
        values.append([VALUES[code] * scales[at // 128] for at, code in enumerate(codes)] + rope_key)
        places.append(page * page_size + offset)
    chosen = [[-1, 4, 0, -1, 6, 6, -1], [-1, -1, -1, 3, -1, -1, -1], [-1] * 7, list(range(7))]
    rows = torch.tensor([[places[at] if at >= 0 else -1 for at in line] for line in chosen], dtype=torch.int32)
    queries = torch.randn(4, heads, rank + rope, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 8
    out, log_sums = sparse_mla_pages(queries.to(dtype), pool[:, -1], rows, scale=0.3, kv_lora_rank=rank)
    assert out.dtype == log_sums.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for query, line in enumerate(chosen):
        read = [values[at] for at in line if at >= 0]
        for head in range(heads):
            if not read:
                assert not bool(out[query, head].any()) and log_sums[query, head] == NEG_INF
                continue
            wanted, log_sum = attend(queries[query, head].tolist(), read, rank, 0.3)
            found = out[query, head].double()
            torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=tolerance, atol=tolerance)
            assert math.isclose(float(log_sums[query, head]), log_sum, rel_tol=tolerance, abs_tol=tolerance)


def test_packed_pages_attend_like_their_values() -> None:
    """Bit for bit: a packed row is read as the values that it stands for, wherever it lies."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (30, 512), dtype=torch.uint8, generator=generator) & 0xBF
    scales = torch.rand(30, 4, generator=generator) + 0.5
    rope = torch.randn(30, 64, generator=generator).to(torch.bfloat16)
    packed = torch.cat([codes, scales.view(torch.uint8), rope.view(torch.uint8)], dim=1)
    values = codes.view(torch.float8_e4m3fn).float().view(30, 4, 128) * scales.unsqueeze(2)
    queries = torch.randn(3, 4, 576, generator=generator)
    rows = torch.tensor([[29, 3, -1], [-1, 0, 7], [5, 5, 5]], dtype=torch.int32)
    shape = {"scale": 0.05, "kv_lora_rank": 512}
    wanted = sparse_mla_rows(queries, torch.cat([values.flatten(1), rope.float()], dim=1), rows, **shape)
    for page_size in (1, 5, 15, 30):
        found = sparse_mla_pages(queries, packed.view(-1, page_size, 656), rows, **shape)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_same_bits(ours, theirs, f"pages of {page_size}")
