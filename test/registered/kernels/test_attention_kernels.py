"""Sparse attention over rows of a view, by the kernel and by the reference, against a softmax in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton.language as tl
from guarded_bytes import far_bytes
from poison import guarded, poisoned_outputs
from triton.runtime.interpreter import InterpreterBuilder

from cpkv.ops.reference import sparse_mla as reference
from cpkv.ops.triton import sparse_mla
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="kernels")
register_cuda_ci(est_time=60, suite="kernels", num_gpus=1)

RANK, ROPE = 32, 16
NEG_INF = float("-inf")
# In bf16 weights and outputs are rounded to 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def bf16_products(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bf16 as uint16, and would multiply these integers."""
    if device.type == "cuda":
        return
    plain = InterpreterBuilder.create_dot

    def create_dot(builder: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
        decoded = [builder.cast_impl(part, tl.float32) if part.dtype.scalar == tl.bfloat16 else part for part in (a, b)]
        return plain(builder, *decoded, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@dataclass(frozen=True)
class Attention:
    """What is attended, on the CPU."""

    queries: torch.Tensor
    latent: torch.Tensor
    view_rows: torch.Tensor
    rank: int = RANK
    scale: float = 0.21

    def of(self, module: object, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and logarithm of the sum by the kernel or by the reference."""
        latent = self.latent if self.latent.device == device else self.latent.to(device)
        with poisoned_outputs():
            out, log_sums = module.sparse_mla_rows(  # type: ignore[attr-defined]
                self.queries.to(device), latent, self.view_rows.to(device), scale=self.scale, kv_lora_rank=self.rank
            )
        return out.cpu(), log_sums.cpu()

    def in_float64(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One query at a time, over the rows that it has, each as often as it was chosen."""
        outs, log_sums = [], []
        for query, chosen in zip(self.queries.double(), self.view_rows.tolist(), strict=True):
            rows = self.latent[[row for row in chosen if row >= 0]].double()
            logits = self.scale * query @ rows.T
            outs.append(torch.softmax(logits, dim=-1) @ rows[:, : self.rank])
            log_sums.append(torch.logsumexp(logits, dim=-1))
        return torch.stack(outs), torch.stack(log_sums)

    def check(self, device: torch.device) -> None:
        wanted, wanted_sums = self.in_float64()
        tolerance = TOLERANCE[self.queries.dtype]
        for module, where in ((sparse_mla, device), (reference, torch.device("cpu"))):
            out, log_sums = self.of(module, where)
            assert out.dtype == self.queries.dtype and log_sums.dtype == torch.float32
            torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(log_sums.double(), wanted_sums, rtol=2e-5, atol=2e-5)


def make(
    dtype: torch.dtype, heads: int = 16, *, queries: int = 4, rows: int = 300, chosen: int = 150, rank: int = RANK
) -> Attention:
    """Distinct rows for each query, and no gaps."""
    generator = torch.Generator().manual_seed(heads + chosen)
    width = rank + (ROPE if rank == RANK else 64)
    order = torch.stack([torch.randperm(rows, generator=generator)[:chosen] for _ in range(queries)])
    return Attention(
        torch.randn(queries, heads, width, generator=generator).to(dtype),
        torch.randn(rows, width, generator=generator).to(dtype),
        order.to(torch.int32),
        rank,
    )


def with_gaps(attention: Attention) -> Attention:
    """-1 anywhere: first, last, a whole tile and more, everything but one, and everything."""
    view_rows = attention.view_rows.clone()
    view_rows[0, ::3] = -1
    view_rows[0, -1] = -1
    view_rows[1, : 2 * sparse_mla.BLOCK_ROWS + 1] = -1
    view_rows[2, 1:] = -1
    view_rows[3] = -1
    return replace(attention, view_rows=view_rows)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(8, torch.float32), (16, torch.bfloat16), (17, torch.float32), (64, torch.bfloat16), (128, torch.bfloat16)],
)
def test_attention_is_that_of_float64(device: torch.device, dtype: torch.dtype, heads: int) -> None:
    """-1 wherever it stands; a query without a token has zeros, and -inf."""
    make(dtype, heads).check(device)
    attention = with_gaps(make(dtype, heads))
    attention.check(device)
    for module, where in ((sparse_mla, device), (reference, torch.device("cpu"))):
        out, log_sums = attention.of(module, where)
        assert not bool(out[3].any()) and bool((log_sums[3] == NEG_INF).all())


@pytest.mark.parametrize("chosen", [1, sparse_mla.BLOCK_ROWS - 1, sparse_mla.BLOCK_ROWS, sparse_mla.BLOCK_ROWS + 1])
def test_any_number_of_chosen_rows(device: torch.device, chosen: int) -> None:
    make(torch.float32, chosen=chosen).check(device)
    make(torch.bfloat16, chosen=chosen, queries=1).check(device)


def test_rows_of_the_size_of_real_models(device: torch.device) -> None:
    make(torch.bfloat16, 64, rank=512, queries=2).check(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_chosen_twice_counts_twice(device: torch.device, dtype: torch.dtype) -> None:
    attention = make(dtype)
    view_rows = attention.view_rows.clone()
    view_rows[0] = view_rows[0, 0]
    view_rows[1, 75:] = view_rows[1, :75]
    attention = replace(attention, view_rows=view_rows)
    attention.check(device)
    out, _ = attention.of(sparse_mla, device)
    row = attention.latent[view_rows[0, 0], :RANK].double().expand(16, -1)
    torch.testing.assert_close(out[0].double(), row, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_nobody_chose_change_no_bit(device: torch.device, dtype: torch.dtype) -> None:
    """NaN in every other row, in the last and the first one, and between rows that lie apart in memory."""
    attention = with_gaps(make(dtype, chosen=40, rows=200))
    alone = attention.of(sparse_mla, device)
    expected = attention.of(reference, torch.device("cpu"))
    latent = torch.full_like(attention.latent, float("nan"))
    used = attention.view_rows[attention.view_rows >= 0].long().unique()
    assert len(used) < len(latent)
    latent[used] = attention.latent[used]
    poisoned = replace(attention, latent=latent)
    apart = replace(attention, latent=guarded(latent, device))
    for what, changed in (("NaN rows", poisoned), ("rows apart", apart)):
        for ours, theirs in zip(changed.of(sparse_mla, device), alone, strict=True):
            assert_same_bits(ours, theirs, what)
        assert not bool(changed.of(sparse_mla, device)[0].isnan().any())
    for ours, theirs in zip(poisoned.of(reference, torch.device("cpu")), expected, strict=True):
        assert_same_bits(ours, theirs, "the reference's")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_row_that_was_chosen_shows_in_its_query_and_no_other(device: torch.device, dtype: torch.dtype) -> None:
    """Kind 8: poison is not hidden, in neither of the outputs."""
    attention = make(dtype, chosen=70)
    for column in (0, RANK + ROPE - 1):
        latent = attention.latent.clone()
        view_rows = attention.view_rows.clone()
        view_rows[view_rows == 7] = 8
        view_rows[1, 66] = 7
        latent[7, column] = float("nan")
        poisoned = replace(attention, latent=latent, view_rows=view_rows)
        for module, where in ((sparse_mla, device), (reference, torch.device("cpu"))):
            for part in poisoned.of(module, where):
                assert [bool(part[query].isnan().any()) for query in range(4)] == [False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_where_the_rows_lie(device: torch.device, dtype: torch.dtype) -> None:
    """The same rows in another order, among others, and apart: shared against replicated."""
    attention = with_gaps(make(dtype, 64))
    alone = attention.of(sparse_mla, device)
    for seed in range(3):
        places = torch.randperm(500, generator=torch.Generator().manual_seed(seed))[: len(attention.latent)]
        latent = torch.full((500, attention.latent.shape[1]), float("nan"), dtype=dtype)
        latent[places] = attention.latent
        moved = torch.where(attention.view_rows < 0, -1, places[attention.view_rows.clamp(min=0)].to(torch.int32))
        other = replace(attention, latent=guarded(latent, device), view_rows=moved.to(torch.int32))
        for ours, theirs in zip(other.of(sparse_mla, device), alone, strict=True):
            assert_same_bits(ours, theirs, f"rows moved by seed {seed}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[], [1], [64, 100], [70, 70, 140]])
def test_parts_merge_into_the_whole(device: torch.device, dtype: torch.dtype, cuts: list[int]) -> None:
    """Parts of any size, also those without a token for some queries or for all."""
    attention = with_gaps(make(dtype))
    edges = [0, *cuts, attention.view_rows.shape[1]]
    parts = []
    for first, last in zip(edges, edges[1:], strict=False):
        view_rows = attention.view_rows[:, first:last].contiguous()
        if first == last:
            view_rows = torch.full((4, 3), -1, dtype=torch.int32)
        parts.append(replace(attention, view_rows=view_rows).of(sparse_mla, device))
    outs, log_sums = (torch.stack(list(part)) for part in zip(*parts, strict=True))
    wanted, wanted_sums = attention.in_float64()
    with poisoned_outputs():
        merged = sparse_mla.merge_attention(outs.to(device), log_sums.to(device))
    for out, total in (merged, reference.merge_attention(outs, log_sums)):
        assert out.dtype == dtype and total.dtype == torch.float32
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(total.cpu().double(), wanted_sums, rtol=2e-5, atol=2e-5)
        assert not bool(out[3].any()) and bool((total[3] == NEG_INF).all())


def test_a_nan_part_shows_where_it_is_merged(device: torch.device) -> None:
    outs, log_sums = torch.randn(2, 3, 8, RANK), torch.randn(2, 3, 8)
    outs[1, 2], log_sums[1, 2] = float("nan"), float("nan")
    for out, total in (
        sparse_mla.merge_attention(outs.to(device), log_sums.to(device)),
        reference.merge_attention(outs, log_sums),
    ):
        for part in (out, total):
            assert [bool(part[query].isnan().any()) for query in range(3)] == [False, False, True]


def test_rows_beyond_two_to_the_31_values(device: torch.device) -> None:
    """Row numbers fit in 32 bits; row numbers times the width do not."""
    attention = make(torch.bfloat16)
    first = 2**31 // (RANK + ROPE) - 150
    rows, width = first + len(attention.latent), RANK + ROPE
    latent = far_bytes(device, 2 * rows * width).view(torch.bfloat16).view(rows, width)
    assert latent.numel() > 2**31
    latent[first:] = attention.latent.to(device)
    view_rows = attention.view_rows + first
    far = replace(attention, latent=latent, view_rows=view_rows)
    for ours, theirs in zip(far.of(sparse_mla, device), attention.of(sparse_mla, device), strict=True):
        assert_same_bits(ours, theirs, "rows far away")


def test_float64_queries_are_computed_in_float64_by_the_reference() -> None:
    attention = with_gaps(make(torch.float64))
    wanted = attention.in_float64()
    found = attention.of(reference, torch.device("cpu"))
    parts = [
        replace(attention, view_rows=part).of(reference, torch.device("cpu"))
        for part in attention.view_rows.chunk(3, dim=1)
    ]
    merged = reference.merge_attention(*(torch.stack(list(part)) for part in zip(*parts, strict=True)))
    for ours, theirs in ((found, wanted), (merged, wanted)):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_no_queries_have_no_outputs(device: torch.device) -> None:
    """Kind 21: a rank without a token."""
    attention = make(torch.float32)
    empty = replace(attention, queries=attention.queries[:0], view_rows=attention.view_rows[:0])
    for module, where in ((sparse_mla, device), (reference, torch.device("cpu"))):
        out, log_sums = empty.of(module, where)
        assert out.shape == (0, 16, RANK) and log_sums.shape == (0, 16)
        merged = module.merge_attention(out.expand(2, -1, -1, -1), log_sums.expand(2, -1, -1))
        assert merged[0].shape == out.shape and merged[1].shape == log_sums.shape
