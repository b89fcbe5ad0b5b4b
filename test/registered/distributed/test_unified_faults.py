"""Views of the whole command: equal to replicated, and what cannot work is told with cause and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from cpkv.config.debug import DEBUG_VARIABLE
from cpkv.engine import rank_worker
from cpkv.errors import ConfigError
from cpkv.pool import sealed_segment
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=18, suite="distributed")

Run = Callable[..., Any]
SOON_S = 15.0
SMALL = ("--transfer", "inprocess", "--page-size", "16", "--prompt-tokens", "250", "--max-new-tokens", "3", "--json")
# About 500 GB of pages, and fewer rows than 2^31.
TOO_MANY_PAGES = ("--page-size", "1024", "--num-pages", "300000")


def good(ended: Any) -> dict[str, Any]:
    """The JSON of a run that must have ended well, equal to replicated."""
    assert ended.status == 0, ended.err
    report: dict[str, Any] = json.loads(ended.out)
    assert report["bitwise_equal_replicated"] is True
    assert report["tokens_replicated"] == report["tokens"]
    assert report["recall_right"] == report["recall_asked"]
    return report


def cause_of(ended: Any) -> str:
    """The message of a run that must have been refused."""
    assert (ended.status, ended.out) == (2, ""), ended.err
    assert "Traceback" not in ended.err
    assert ended.seconds < SOON_S
    return str(ended.err.partition("error: ")[2].strip())


@pytest.mark.parametrize(
    ("arguments", "views", "debug"),
    [
        (("auto",), {"current", "unified"}, True),
        (("auto", "--no-current-reuse"), {"unified"}, False),
        (("mixed",), {"mixed"}, True),
        (("mixed", "--no-prefetch", "--cp-strategy", "interleave"), {"mixed"}, False),
        (("full",), {"full"}, True),
        (("unified", "--latent-dtype", "fp8", "--index-dtype", "fp8"), {"unified"}, False),
        (("blocked", "--latent-dtype", "fp8", "--dtype", "bfloat16", "--index-dtype", "bfloat16"), {"blocked"}, True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "debug" if value is True else "",
)
def test_views_in_threads(
    cpkv: Run, arguments: tuple[str, ...], views: set[str], debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with diagnostics, which compare what each view hands out with what the owners store."""
    if debug:
        monkeypatch.setenv(DEBUG_VARIABLE, "1")
    report = good(cpkv("demo", *SMALL, "--cp-size", "3", "--chunk-size", "100", "--kv-view", *arguments))
    assert set(report["views"]) == views
    assert sum(report["views"].values()) == 3
    assert (report["gathered_bytes"] > 0) == bool(views & {"mixed", "full", "blocked"})


def test_a_rank_without_its_shared_memory_is_the_cause(cpkv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, who wait for what it was to send, do not hide it or outlast it."""
    real = UnifiedPool.open

    def fail_on_rank_1(*arguments: Any, rank: int, **options: Any) -> UnifiedPool:
        if rank == 1:
            raise ConfigError("there is no memory here; lower --num-pages")
        return real(*arguments, rank=rank, **options)

    monkeypatch.setattr(rank_worker.UnifiedPool, "open", fail_on_rank_1)
    cause = cause_of(cpkv("demo", *SMALL, "--cp-size", "3", "--kv-view", "unified"))
    assert cause == "prefill rank 1: there is no memory here; lower --num-pages"


def test_shared_memory_that_is_not_there(cpkv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours and no SIGBUS: the pages are taken before anything is written."""
    # As much as a machine may have, it is not taken from it.
    monkeypatch.setattr(sealed_segment, "available_bytes", lambda: 1 << 30)
    ended = cpkv("demo", *SMALL, "--cp-size", "2", "--kv-view", "unified", *TOO_MANY_PAGES)
    assert "shared: prefill" in ended.err
    cause = cause_of(ended)
    assert re.fullmatch(
        r"prefill rank \d: --kv-view unified on 2 ranks of this host needs \d+ bytes of shared memory and \d+ bytes "
        r"are available; lower --num-pages",
        cause,
    ), cause


def test_current_forced_for_more_than_a_chunk(cpkv: Run) -> None:
    cause = cause_of(cpkv("demo", *SMALL, "--cp-size", "2", "--chunk-size", "100", "--kv-view", "current"))
    assert "the request is longer than one chunk; raise --chunk-size or leave out --kv-view" in cause
    good(cpkv("demo", *SMALL, "--cp-size", "2", "--chunk-size", "250", "--kv-view", "current"))


@pytest.mark.parametrize(("view", "chunk_size"), [("auto", "400"), ("unified", "100"), ("mixed", "100")])
def test_a_scratch_that_is_too_small_is_refused_with_the_right_number(cpkv: Run, view: str, chunk_size: str) -> None:
    """The number is that of the chunk that needs most, and is no limit of the replicated run behind it."""
    command = ("demo", *SMALL, "--cp-size", "2", "--chunk-size", chunk_size, "--kv-view", view)
    enough = wanted_scratch(cause_of(cpkv(*command, "--scratch-bytes", "1000")))
    report = good(cpkv(*command, "--scratch-bytes", str(enough)))
    assert report["scratch_bytes_per_rank"] <= enough
    assert wanted_scratch(cause_of(cpkv(*command, "--scratch-bytes", str(enough - 1)))) == enough


def wanted_scratch(cause: str) -> int:
    """The number in a refusal."""
    found = re.search(r"the scratch has \d+; raise --scratch-bytes to (\d+)", cause)
    assert found, cause
    return int(found[1])


def test_what_was_admitted_never_lacks_scratch(cpkv: Run) -> None:
    """251 tokens a batch: of the second request one token comes first, whose history then takes a page of every rank.

    With what the first request needs, the two never share a batch; with a little more they do.
    """
    command = ("demo", *SMALL, "--requests", "2", "--cp-size", "8", "--chunk-size", "251", "--kv-view", "mixed")
    enough = wanted_scratch(cause_of(cpkv(*command, "--scratch-bytes", "1000")))
    for more in (0, 1 << 13, 1 << 14):
        good(cpkv(*command, "--scratch-bytes", str(enough + more)))
