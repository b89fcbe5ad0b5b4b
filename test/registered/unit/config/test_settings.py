"""Settings: what is refused and in which words, what may be combined, and the debug variable."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import msgspec
import pytest

from cpkv.config.debug import DEBUG_VARIABLE, debug_requested
from cpkv.config.names import KvView
from cpkv.config.settings import ROW_FORMATS, EngineSettings, check_decode_cp_size, check_settings
from cpkv.errors import ConfigError
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=1, suite="unit")

GOOD = EngineSettings(num_pages=64, enable_cp_shared_kv=True, cp_size=4)


def check(**changes: object) -> None:
    check_settings(msgspec.structs.replace(GOOD, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cp_size": 0}, "cp_size is 0; it must be from 1 to 8"),
        ({"cp_size": 9}, "cp_size is 9; it must be from 1 to 8"),
        ({"chunk_size": 0}, "chunk_size is 0; it must be from 1 to "),
        ({"chunk_size": (1 << 20) + 1}, "chunk_size is 1048577; it must be from 1 to "),
        ({"transfer_timeout_s": 0.5}, "transfer_timeout_s is 0.5; it must be from 5 to 3600"),
        ({"transfer_timeout_s": 3601.0}, "transfer_timeout_s is 3601.0; it must be from 5 to 3600"),
        ({"transfer_timeout_s": math.nan}, "transfer_timeout_s is nan; it must be from 5 to 3600"),
        ({"cp_strategy": "zig"}, "cp_strategy is 'zig'; it must be one of zigzag, interleave"),
        ({"device": "tpu"}, "device is 'tpu'; it must be one of cpu, cuda"),
        ({"device": "cuda", "kernels": "theirs"}, "kernels is 'theirs'; it must be one of auto, ours, vendor"),
        (
            {"kernels": "ours"},
            "--kernels ours chooses between kernels of a GPU, and --device is cpu; leave one of them out",
        ),
        (
            {"device": "cuda", "dtype": "float64", "index_dtype": "float64"},
            "--dtype float64 has no kernels on a GPU; give --dtype bfloat16 or float32, or --device cpu",
        ),
        ({"transfer": "udp"}, "transfer is 'udp'; it must be one of mooncake, tcp, shm, nixl, inprocess"),
        (
            {"page_size": 0},
            "page_size is 0, which the mooncake back end does not take: one page is one write per pool; use 1 to 1024",
        ),
        (
            {"page_size": 1025, "transfer": "inprocess"},
            "page_size is 1025, which the inprocess back end does not take: one page is one write per pool; "
            "use 1 to 1024",
        ),
        (
            {"dtype": "bfloat16", "index_dtype": "float32"},
            "rows of bfloat16 with index keys of float32 do not exist; choose dtype/index_dtype from float64/float64, "
            "float32/float32, float32/fp8, bfloat16/bfloat16, bfloat16/fp8",
        ),
        (
            {"cp_size": 1},
            "--enable-cp-shared-kv was given with cp_size 1: one rank has nobody to share with; raise --cp-size to 2 "
            "or more, or leave the flag out",
        ),
        (
            {"enable_cp_shared_kv": False, "current_reuse": False},
            "--no-current-reuse chooses between views of a shared pool, and the pool is replicated; give "
            "--enable-cp-shared-kv too, or leave the option out",
        ),
        (
            {"kv_view": "replicated"},
            "kv_view is 'replicated'; it must be one of auto, current, full, mixed, unified, blocked",
        ),
        ({"kv_view": "layer-split"}, "kv_view is 'layer-split'; it must be one of auto, "),
        (
            {"kv_view": "current", "current_reuse": False},
            "--kv-view current and --no-current-reuse contradict each other; leave one of them out",
        ),
        (
            {"enable_cp_shared_kv": False, "kv_view": "mixed"},
            "--kv-view chooses between views of a shared pool, and the pool is replicated; give "
            "--enable-cp-shared-kv too, or leave the option out",
        ),
        (
            {"enable_cp_shared_kv": False, "kv_view": "full", "current_reuse": False},
            "--kv-view chooses between views of a shared pool",
        ),
        (
            {"dtype": "bfloat16", "index_dtype": "fp8", "latent_dtype": "float32"},
            "latent rows of float32 with a model of bfloat16 do not exist; leave out --latent-dtype, or give fp8 with "
            "--dtype float32 or bfloat16",
        ),
        (
            {"dtype": "float64", "index_dtype": "float64", "latent_dtype": "fp8"},
            "latent rows of fp8 with a model of float64 do not exist; leave out --latent-dtype, or give fp8 with",
        ),
        ({"scratch_bytes": 0}, f"scratch_bytes is 0; it must be from 1 to {1 << 50}"),
        ({"scratch_bytes": (1 << 50) + 1}, f"scratch_bytes is {(1 << 50) + 1}; it must be from 1 to {1 << 50}"),
    ],
)
def test_a_refusal_states_the_fact_the_cause_and_the_remedy(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(**changes)
    assert str(refused.value).startswith(says)


def test_the_largest_chunk_size_is_named_exactly() -> None:
    with pytest.raises(ConfigError) as refused:
        check(chunk_size=(1 << 20) + 1)
    assert str(1 << 20) in str(refused.value).replace(",", "")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cp_size": 8},
        {"cp_size": 2, "cp_strategy": "interleave", "transfer": "inprocess"},
        {"chunk_size": 1, "page_size": 1},
        {"chunk_size": 1 << 20, "page_size": 1024},
        {"transfer_timeout_s": 5.0},
        {"transfer_timeout_s": 1.0, "transfer": "inprocess"},
        {"current_reuse": False},
        {"enable_cp_shared_kv": False},
        {"enable_cp_shared_kv": False, "cp_size": 1},
        *({"kv_view": view} for view in get_args(KvView)),
        {"current_reuse": False, "kv_view": "full"},
        {"prefetch": False},
        {"enable_cp_shared_kv": False, "prefetch": False, "scratch_bytes": 1},
        {"scratch_bytes": 1},
        {"scratch_bytes": 1 << 50},
        {"latent_dtype": "float32"},
    ],
)
def test_the_ends_of_every_range_are_accepted(changes: dict[str, object]) -> None:
    check(**changes)


def test_exactly_the_listed_row_formats_are_accepted() -> None:
    latent, index = ("float64", "float32", "bfloat16", "float16"), ("float64", "float32", "bfloat16", "fp8", "int8")
    accepted = set()
    for rows, keys in itertools.product(latent, index):
        try:
            check(dtype=rows, index_dtype=keys)
        except ConfigError:
            continue
        accepted.add((rows, keys))
    assert accepted == set(ROW_FORMATS)
    assert len(ROW_FORMATS) == 5


def test_exactly_the_model_s_own_rows_and_packed_ones_of_float32_and_bfloat16_are_accepted() -> None:
    floats = ("float64", "float32", "bfloat16")
    accepted = set()
    for dtype, latent in itertools.product(floats, (None, *floats, "fp8", "float16")):
        try:
            check(dtype=dtype, index_dtype=dtype, latent_dtype=latent)
        except ConfigError:
            continue
        accepted.add((dtype, latent))
    assert accepted == {
        *((dtype, None) for dtype in floats),
        *((dtype, dtype) for dtype in floats),
        ("float32", "fp8"),
        ("bfloat16", "fp8"),
    }


def test_rows_are_stored_in_the_dtype_of_the_model_unless_they_are_packed() -> None:
    assert EngineSettings(num_pages=64, dtype="bfloat16").stored_latent_dtype == "bfloat16"
    assert EngineSettings(num_pages=64, dtype="bfloat16", latent_dtype="fp8").stored_latent_dtype == "fp8"


def test_sharing_is_off_by_default_and_settings_cannot_change() -> None:
    settings = EngineSettings(num_pages=64)
    check_settings(settings)
    assert not settings.enable_cp_shared_kv and not settings.debug
    with pytest.raises(AttributeError):
        settings.cp_size = 2  # type: ignore[misc]


@pytest.mark.parametrize("cp_size", [0, 2, 8])
def test_a_decode_worker_with_context_parallelism_is_refused(cp_size: int) -> None:
    with pytest.raises(ConfigError) as refused:
        check_decode_cp_size(cp_size)
    assert str(refused.value) == (
        f"the decode worker was given cp_size {cp_size}; it holds the full layout and takes only cp_size 1; "
        "start one decode worker without CP"
    )


def test_a_decode_worker_without_context_parallelism_is_accepted() -> None:
    check_decode_cp_size(1)


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_debugging_is_asked_for_by_one_variable(value: str | None, on: bool) -> None:
    assert debug_requested({} if value is None else {DEBUG_VARIABLE: value, "CPKV_OTHER": "1"}) is on
    assert DEBUG_VARIABLE == "CPKV_DEBUG_SHARED_KV"
