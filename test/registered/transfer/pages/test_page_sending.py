"""Pages from prefill ranks to a decode worker: each once, by its owner, to a place that the decode worker chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.mooncake import MooncakeBackend

register_cpu_ci(est_time=20, suite="transfer")

HandOver = Callable[..., list[torch.Tensor]]
MakeGeometry = Callable[..., PoolGeometry]


def check_same(shared: list[torch.Tensor], replicated: list[torch.Tensor]) -> None:
    for number, pages in enumerate(zip(shared, replicated, strict=True)):
        assert_same_bits(*pages, f"request {number}")


@hypothesis_settings(max_examples=40)
@given(
    cp_size=st.integers(1, 5),
    page_size=st.sampled_from((1, 2, 5, 8)),
    lengths=st.lists(st.integers(1, 26), min_size=1, max_size=3),
    has_indexer=st.sampled_from(((True,), (True, False, True), (True, True, False))),
    index_dtype=st.sampled_from(("float32", "fp8")),
    seed=st.integers(0, 1000),
)
def test_the_decode_pool_is_what_a_replicated_prefill_sends(
    hand_over: HandOver,
    make_geometry: MakeGeometry,
    cp_size: int,
    page_size: int,
    lengths: list[int],
    has_indexer: tuple[bool, ...],
    index_dtype: str,
    seed: int,
) -> None:
    geometry = make_geometry(page_size, has_indexer, index_dtype)
    shared = hand_over(geometry, cp_size, lengths, shared=True, seed=seed)
    check_same(shared, hand_over(geometry, cp_size, lengths, shared=False, seed=seed))


@pytest.mark.parametrize("tokens", range(1, 14))
def test_all_lengths_of_up_to_three_pages_and_one(
    hand_over: HandOver, make_geometry: MakeGeometry, tokens: int
) -> None:
    (pages,) = hand_over(make_geometry(4, (True, False, True), "fp8"), 2, [tokens], shared=True, seed=3)
    assert len(pages) == -(-tokens // 4)


@pytest.mark.skipif(MooncakeBackend.why_not() is not None, reason=f"Mooncake: {MooncakeBackend.why_not()}")
def test_over_mooncake(hand_over: HandOver, make_geometry: MakeGeometry) -> None:
    geometry = make_geometry(4, (True, False, True), "fp8")
    shared, replicated = (
        hand_over(geometry, 2, [21, 8, 1], shared=shared, seed=8, make_backend=MooncakeBackend)
        for shared in (True, False)
    )
    check_same(shared, replicated)


def test_neither_end_uses_pages_in_order(prefill: Any) -> None:
    prefill.write("a", 40)
    targets = prefill.open("a")
    for pages in (prefill.allocator.pages_of("a"), targets):
        assert list(pages) != sorted(pages), "sorted pages would hide whoever takes a position for a page"
    assert set(targets) != set(prefill.allocator.pages_of("a"))


def test_a_pool_can_be_taken_back_and_registered_again(prefill: Any, decode: Any) -> None:
    for number in range(3):
        name = f"round {number}"
        prefill.write(name, 17)
        targets = prefill.open(name, attempt=number + 1)
        prefill.send(name, targets, attempt=number + 1)
        prefill.finish(name, attempt=number + 1)
        decode.check_rows(name, 17, targets)
        prefill.reopen()
