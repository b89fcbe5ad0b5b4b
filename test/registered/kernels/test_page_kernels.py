"""Pages of one layer gathered by number, and rows of positions, by kernels against the reference."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from guarded_bytes import GuardedRows, far_bytes, guarded_outputs, random_bytes

from cpkv.errors import ConfigError
from cpkv.layout.pool_geometry import MAX_ROWS
from cpkv.ops.reference import pages as reference
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci, register_cuda_ci

kernels = pytest.importorskip("cpkv.ops.triton.pages", reason="Triton is not installed")

register_cpu_ci(est_time=6, suite="kernels")
register_cuda_ci(est_time=30, suite="kernels", num_gpus=1)


@pytest.mark.parametrize(
    ("page_bytes", "gap", "offset"),
    [
        (64 * 656, 2 * 64 * 656, 0),
        (16 * 1152, 1152, 16),
        (8192, 16, 0),
        (8208, 0, 0),
        (656, 24, 8),
        (132, 0, 0),
        (132, 132, 2),
        (8193, 3, 1),
        (18, 0, 0),
        (7, 5, 3),
        (1, 0, 0),
    ],
)
@pytest.mark.parametrize("out_offset", [0, 1])
def test_gathered_pages_are_those_of_the_reference(
    device: torch.device, page_bytes: int, gap: int, offset: int, out_offset: int
) -> None:
    pages = random_bytes(6, page_bytes, seed=page_bytes)
    numbers = torch.tensor([5, 0, 3, 3, 1])
    wanted = torch.empty(5, page_bytes, dtype=torch.uint8)
    reference.gather_pages(pages, numbers, wanted)
    pool = GuardedRows.of(pages, device, gap=gap, offset=offset)
    out = GuardedRows.make(device, 5, page_bytes, offset=out_offset)
    kernels.gather_pages(pool.rows, numbers.to(device), out.rows)
    out.check(wanted, "gathered")
    pool.check(pages, "pool")


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_any_number_of_pages(device: torch.device, count: int) -> None:
    pages = random_bytes(9, 48)
    numbers = torch.arange(count) * 5 % 9
    out = GuardedRows.make(device, count, 48)
    kernels.gather_pages(pages.to(device), numbers.to(device), out.rows)
    out.check(pages[numbers], f"{count} pages")


def test_no_page_is_zeros_and_is_not_read(device: torch.device) -> None:
    pages = random_bytes(4, 656)
    numbers = torch.tensor([-1, 3, -1])
    wanted = pages[numbers]
    wanted[numbers < 0] = 0
    # Read at -1, the guard band would come.
    out = GuardedRows.make(device, 3, 656)
    kernels.gather_pages(GuardedRows.of(pages, device).rows, numbers.to(device), out.rows)
    out.check(wanted, "gathered")


@pytest.mark.parametrize(("page_bytes", "span"), [(4096, 2**35), (4097, 2**32)])
def test_pages_beyond_two_to_the_31_words(device: torch.device, page_bytes: int, span: int) -> None:
    stride = (span // 64 // page_bytes + 1) * page_bytes
    pages = far_bytes(device, 64 * stride + page_bytes).as_strided((65, page_bytes), (stride, 1))
    content = random_bytes(3, page_bytes)
    for number, page in zip((64, 0, 33), content, strict=True):
        pages[number].copy_(page)
    out = GuardedRows.make(device, 3, page_bytes)
    kernels.gather_pages(pages, torch.tensor([64, 0, 33], device=device), out.rows)
    out.check(content, "gathered")


def rows_one_by_one(pages: list[int], tokens: int, page_size: int, cp_size: int, segment: int, page: int) -> list[int]:
    rows = []
    for pos in range(tokens):
        logical = pages[pos // page_size]
        row = logical % cp_size * segment + logical // cp_size * page + pos % page_size
        rows.append(row if logical >= 0 else -1)
    return rows


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("cp_size", [1, 3, 4])
@pytest.mark.parametrize("module", ["reference", "kernels"])
def test_rows_of_positions(device: torch.device, page_size: int, cp_size: int, module: str) -> None:
    rows_of = {"reference": reference, "kernels": kernels}[module].position_rows
    outputs = {"reference": nullcontext, "kernels": guarded_outputs}[module]
    pages = [17, 4, 5, -1, 6, 31, 9, 8]
    page_rows = 3 * page_size
    for tokens in (0, 1, page_size, page_size + 1, 8 * page_size - 1, 8 * page_size):
        segment_rows = 40 * page_rows + 7
        with outputs():
            rows = rows_of(
                torch.tensor(pages, device=device),
                tokens=tokens,
                page_size=page_size,
                cp_size=cp_size,
                segment_rows=segment_rows,
                page_rows=page_rows,
            )
        wanted = rows_one_by_one(pages, tokens, page_size, cp_size, segment_rows, page_rows)
        assert_same_bits(rows.cpu(), torch.tensor(wanted, dtype=torch.int32), f"{tokens} tokens")


def test_rows_over_several_programs(device: torch.device) -> None:
    pages = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    shape = {"tokens": 300 * 16 - 5, "page_size": 16, "cp_size": 4, "segment_rows": 5000, "page_rows": 32}
    with guarded_outputs():
        rows = kernels.position_rows(pages.to(device), **shape)
    assert_same_bits(rows.cpu(), reference.position_rows(pages, **shape), "rows")


@pytest.mark.parametrize("module", ["reference", "kernels"])
def test_the_largest_row_number_and_one_more(device: torch.device, module: str) -> None:
    rows_of = {"reference": reference, "kernels": kernels}[module].position_rows
    segment_rows = MAX_ROWS // 8
    shape = {"page_size": 16, "cp_size": 8, "page_rows": 78 * 16}
    local_page = (segment_rows - 16) // shape["page_rows"]
    pages = torch.tensor([local_page * 8 + 7], device=device)
    rows = rows_of(pages, tokens=16, segment_rows=segment_rows, **shape)
    assert rows.tolist() == [7 * segment_rows + local_page * 78 * 16 + offset for offset in range(16)]
    with pytest.raises(ConfigError, match=r"8 pools of 268435456 rows .* use at most 215092 local pages a rank"):
        rows_of(pages, tokens=16, segment_rows=segment_rows + 1, **shape)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("module", ["reference", "kernels"])
def test_rows_of_chosen_positions(device: torch.device, page_size: int, layers: int, module: str) -> None:
    """Each request through its own pages; -1 wherever it stands, as a position and as a page."""
    rows_of = {"reference": reference, "kernels": kernels}[module].chosen_rows
    outputs = {"reference": nullcontext, "kernels": guarded_outputs}[module]
    tables = [[7, 2, -1, 9, -1], [0, 5, 11, -1, -1], [3, -1, -1, -1, -1]]
    generator = torch.Generator().manual_seed(page_size)
    positions = torch.randint(-1, 5 * page_size, (3, 700), generator=generator)
    positions[0, 0], positions[0, -1], positions[1] = -1, -1, -1
    positions[2, :2] = torch.tensor([page_size - 1, 0])
    wanted = torch.full((3, 700), -1, dtype=torch.int32)
    for request, chosen in enumerate(positions.tolist()):
        for place, position in enumerate(chosen):
            page = tables[request][position // page_size] if position >= 0 else -1
            if page >= 0:
                wanted[request, place] = page * layers * page_size + position % page_size
    # Rows of the table lie apart, and between them a page that exists.
    table = torch.full((3, 8), 13, dtype=torch.int32)[:, :5].copy_(torch.tensor(tables)).to(device)
    with outputs():
        rows = rows_of(table, positions.to(device), page_size=page_size, page_rows=layers * page_size)
    assert_same_bits(rows.cpu(), wanted, "rows")
    for shape in ((0, 4), (3, 0)):
        none = torch.empty(*shape, dtype=torch.int64, device=device)
        rows = rows_of(table[: shape[0]], none, page_size=page_size, page_rows=page_size)
        assert rows.shape == shape and rows.dtype == torch.int32


@pytest.mark.parametrize("module", ["reference", "kernels"])
def test_the_largest_row_of_a_chosen_position(device: torch.device, module: str) -> None:
    """Row numbers fit in 32 bits, and what they are made of is added in 64."""
    rows_of = {"reference": reference, "kernels": kernels}[module].chosen_rows
    page_rows = 78 * 64
    page = (MAX_ROWS - 63) // page_rows
    table = torch.tensor([[5, page]], dtype=torch.int32, device=device)
    rows = rows_of(table, torch.tensor([[127, 63, 64]], device=device), page_size=64, page_rows=page_rows)
    assert rows.tolist() == [[page * page_rows + 63, 5 * page_rows + 63, page * page_rows]]
