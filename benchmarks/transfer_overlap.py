"""What sending pages of finished chunks early saves: the engine with `overlap` on and off, in turn, on one cluster.

chunk | chunk | chunk | chunk | transfer of all pages            | decode        overlap off
chunk | chunk | chunk | chunk | transfer of the last chunk's | decode            overlap on
        `-- pages of the first ---'
                              |<------------ the tail ------------------>|
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from paired_ratio import alternate, paired_ratio

from cpkv.config import EngineSettings
from cpkv.config.names import TransferName
from cpkv.engine.cluster import Cluster
from cpkv.engine.commands import RunBatch
from cpkv.engine.prefill import PrefillScheduler
from cpkv.engine.request import Request
from cpkv.protocol.messages import DecodedTokens, DecodeStep, Done, ReleaseRequest, RowDigest, RowDigestIs
from cpkv.testing.checkpoints import TinyShape

PAGE_SIZE = 64
CP_SIZE = 2
# Rows as wide as those of the released models over little computation, so that the transfer is not hidden by decoding.
WIDE_ROWS = TinyShape(
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=64,
    num_hidden_layers=8,
    num_attention_heads=2,
    kv_lora_rank=512,
    q_lora_rank=128,
    qk_rope_head_dim=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    index_n_heads=1,
    index_head_dim=128,
    index_topk=128,
)


class Prompt(NamedTuple):
    """What is prefilled.

    Attributes:
        tokens: of the prompt.
        chunk: tokens of a chunk.
        rounds: pairs of with and without.
    """

    tokens: int
    chunk: int
    rounds: int


class Timing(NamedTuple):
    """Seconds to the first decoded token, from the end of the last chunk and from the beginning; tokens and rows."""

    tail: float
    total: float
    outcome: tuple[tuple[int, ...], str]


class TimedCluster(Cluster):
    """A cluster that knows when its last chunk ended."""

    chunk_ended = 0.0

    def call_ranks(self, command: Any) -> dict[Any, Any]:
        """As `Cluster` does."""
        replies = super().call_ranks(command)
        if isinstance(command, RunBatch):
            self.chunk_ended = time.perf_counter()
        return replies


def measure_overlap(backend: TransferName, checkpoint: Path, prompt: Prompt) -> dict[str, Any]:
    """The tail with and without overlap at one back end."""
    pages = -(-(prompt.tokens + 2) // PAGE_SIZE) + 1
    settings = EngineSettings(
        num_pages=(pages + CP_SIZE) // CP_SIZE * CP_SIZE + CP_SIZE,
        enable_cp_shared_kv=True,
        cp_size=CP_SIZE,
        page_size=PAGE_SIZE,
        chunk_size=prompt.chunk,
        transfer=backend,
        # Long, since a machine that does other work too may take its time for a prompt.
        lease_s=600.0,
    )
    with TimedCluster(settings, checkpoint, decode_pages=pages + 1, shuffle_seed=1) as cluster:
        totals: dict[bool, list[float]] = {True: [], False: []}
        expected = run_once(cluster, prompt, overlap=True).outcome

        def tail(overlap: bool) -> float:
            timing = run_once(cluster, prompt, overlap=overlap)
            if timing.outcome != expected:
                raise SystemExit(f"{backend}: overlap {overlap} gives another token or other rows")
            totals[overlap].append(timing.total)
            return timing.tail

        tail(False)
        totals[False].clear()
        overlapped, plain = alternate(lambda: tail(True), lambda: tail(False), prompt.rounds)
        page_bytes = cluster.geometry.page_bytes
    return {
        "prompt_tokens": prompt.tokens,
        "chunk_tokens": prompt.chunk,
        "bytes": -(-prompt.tokens // PAGE_SIZE) * page_bytes,
        "tail_seconds": sum(overlapped) / len(overlapped),
        "tail_seconds_without": sum(plain) / len(plain),
        "ratio": paired_ratio(overlapped, plain)._asdict(),
        "total_seconds": sum(totals[True]) / len(overlapped),
        "total_seconds_without": sum(totals[False]) / len(plain),
        "total_ratio": paired_ratio(totals[True], totals[False])._asdict(),
    }


def run_once(cluster: TimedCluster, prompt: Prompt, *, overlap: bool) -> Timing:
    """One prompt through a new pool; the first token is the prefill's, the second the first that is decoded."""
    # The scheduler alone reads it, and it lives for this run only.
    cluster.settings = msgspec.structs.replace(cluster.settings, overlap=overlap)
    request = Request("bench", tuple(token * 31 % 500 for token in range(prompt.tokens)), 2)
    cluster.open_pool(True)
    try:
        begun = time.perf_counter()
        report = PrefillScheduler(cluster, shared=True).run([request])
        for failure in report.failures.values():
            raise failure
        decoded = cluster.ask_decode(DecodeStep(("bench",)), DecodedTokens)
        ended = time.perf_counter()
        digest = cluster.ask_decode(RowDigest("bench"), RowDigestIs).digest
        cluster.ask_decode(ReleaseRequest("bench"), Done)
    finally:
        cluster.close_pool()
    tokens = (report.first_tokens["bench"], *decoded.tokens)
    return Timing(ended - cluster.chunk_ended, ended - begun, (tokens, digest))
