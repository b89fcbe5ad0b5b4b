"""One run of some requests: prefill through one kind of pool, hand over, decode together. Two runs can be compared.

shared run      prefill (one copy) -> pages -> decode      |  the same requests, chunks, batches and decode
replicated run  prefill (N copies) -> pages -> decode      |  batches, so every bit must be equal
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cpkv.engine.cluster import Cluster
from cpkv.engine.commands import CountersAre, Trace
from cpkv.engine.prefill import PrefillReport, PrefillScheduler
from cpkv.engine.request import Request
from cpkv.engine.tensors import bytes_tensor
from cpkv.model.norms import compute_dtype_of
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.protocol.messages import DecodedTokens, DecodeStep, Done, DumpPool, ReleaseRequest, RowDigests, RowDigestsAre


@dataclass
class GenerationResult:
    """What a run produced and what it cost.

    Attributes:
        tokens: request -> new tokens, the first one included.
        logits: request -> [new tokens, vocab_size]: of the last prompt token, then of each decoded token but the last.
        row_digests: request -> digest of each page's rows in the decode pool at the end.
        prefill: the prefill's report.
        counters: view counters by rank.
        kv_bytes_per_rank: bytes of the prefill pool of each rank.
        seconds: per phase.
    """

    tokens: dict[str, list[int]]
    logits: dict[str, torch.Tensor]
    row_digests: dict[str, tuple[str, ...]]
    prefill: PrefillReport
    counters: list[CountersAre]
    kv_bytes_per_rank: int
    seconds: dict[str, float] = field(default_factory=dict)

    def same_bits(self, other: GenerationResult) -> bool:
        """Whether tokens, logits and decode pools are equal bit for bit."""
        return (
            self.tokens == other.tokens
            and self.row_digests == other.row_digests
            and self.logits.keys() == other.logits.keys()
            and all(torch.equal(values, other.logits[name]) for name, values in self.logits.items())
        )


def generate(
    cluster: Cluster,
    requests: Sequence[Request],
    *,
    shared: bool,
    trace: Trace | None = None,
    dump_pool: Path | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> GenerationResult:
    """Run requests once; the pool is opened and closed here.

    Args:
        cluster: running workers.
        requests: decoded together, as one batch, once all of them have been handed over.
        shared: one copy of the KV cache over the ranks, or one on each.
        trace: what prefill batches and decode steps leave behind in a folder.
        dump_pool: file for the decode pool and its page table, written at the end.
        progress: told the name of each phase as it begins.

    Raises:
        CpkvError: the first failure, of a request or of a worker.
    """
    progress("prefill and transfer")
    kv_bytes = cluster.open_pool(shared)
    report = PrefillScheduler(cluster, shared=shared, trace=trace).run(requests)
    for failure in report.failures.values():
        raise failure
    counters = cluster.counters()
    cluster.close_pool()
    progress("decode")
    started = time.perf_counter()
    tokens = {name: [token] for name, token in report.first_tokens.items()}
    logits = {name: [values] for name, values in report.last_logits.items()}
    _decode(cluster, requests, tokens, logits, trace)
    decode_seconds = time.perf_counter() - started
    digests = {
        request.request_id: cluster.ask_decode(RowDigests(request.request_id), RowDigestsAre).digests
        for request in requests
    }
    if dump_pool is not None:
        cluster.ask_decode(DumpPool(str(dump_pool)), Done)
    for request in requests:
        cluster.ask_decode(ReleaseRequest(request.request_id), Done)
    return GenerationResult(
        tokens=tokens,
        logits={name: torch.stack(values) for name, values in logits.items()},
        row_digests=digests,
        prefill=report,
        counters=counters,
        kv_bytes_per_rank=kv_bytes,
        seconds={
            "prefill": report.compute_seconds,
            "transfer": report.transfer_seconds,
            "decode": decode_seconds,
        },
    )


def _decode(
    cluster: Cluster,
    requests: Sequence[Request],
    tokens: dict[str, list[int]],
    logits: dict[str, list[torch.Tensor]],
    trace: Trace | None,
) -> None:
    dtype = compute_dtype_of(torch_dtype(cluster.settings.dtype))
    step = 0
    while True:
        unfinished = [
            request.request_id for request in requests if len(tokens[request.request_id]) < request.max_new_tokens
        ]
        if not unfinished:
            return
        trace_file = None
        if trace is not None and trace.want_choices:
            trace_file = str(Path(trace.folder) / f"decode{step}.safetensors")
        decoded = cluster.ask_decode(DecodeStep(tuple(unfinished), trace_file), DecodedTokens)
        for request_id, token, raw in zip(unfinished, decoded.tokens, decoded.logits, strict=True):
            tokens[request_id].append(token)
            logits[request_id].append(bytes_tensor(raw, dtype))
        step += 1
