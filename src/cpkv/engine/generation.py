"""One run of some requests: prefill through one kind of pool, hand over, decode together. Two runs can be compared.

shared run      prefill (one copy) -> pages -> decode      |  the same requests, chunks, batches and decode
replicated run  prefill (N copies) -> pages -> decode      |  batches, so every bit must be equal
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cpkv.engine.cluster import Cluster
from cpkv.engine.commands import CountersAre, DumpPool, Trace, TraceDecode
from cpkv.engine.prefill import PrefillScheduler
from cpkv.engine.prefill_report import PrefillReport
from cpkv.engine.request import Request
from cpkv.engine.tensors import bytes_tensor, tensor_bytes
from cpkv.errors import CapacityError, WorkerDiedError
from cpkv.model.norms import compute_dtype_of
from cpkv.ops.reference.latent_rows import torch_dtype
from cpkv.protocol.messages import DecodedTokens, DecodeStep, Done, ReleaseRequest, RowDigest, RowDigestIs


@dataclass
class GenerationResult:
    """What a run produced and what it cost.

    Attributes:
        tokens: request -> new tokens, the first one included.
        logits: request -> [new tokens, vocab_size]: of the last prompt token, then of each decoded token but the last.
        row_digests: request -> digest of its rows in the decode pool at the end, in position order.
        prefill: the prefill's report.
        counters: view counters by rank.
        kv_bytes_per_rank: bytes of the prefill pool of each rank.
        seconds: per phase.
    """

    tokens: dict[str, list[int]]
    logits: dict[str, torch.Tensor]
    row_digests: dict[str, str]
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
            and all(tensor_bytes(values) == tensor_bytes(other.logits[name]) for name, values in self.logits.items())
        )


def generate(
    cluster: Cluster,
    requests: Sequence[Request],
    *,
    shared: bool | None = None,
    trace: Trace | None = None,
    dump_pool: Path | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> GenerationResult:
    """Run requests once. The pool is opened and closed here and every request released, whatever happens.

    Args:
        cluster: running workers.
        requests: decoded together, as one batch, once all of them have been handed over.
        shared: one copy of the KV cache over the ranks, or one on each; by default what the settings say.
        trace: what prefill batches and decode steps leave behind in a folder.
        dump_pool: file for the decode pool and its page table, written at the end.
        progress: told the name of each phase as it begins.

    Raises:
        CpkvError: the first failure, of a request or of a worker.
    """
    shared = cluster.settings.enable_cp_shared_kv if shared is None else shared
    check_decode_pages(requests, cluster)
    handed_over: list[str] = []
    try:
        progress("prefill and transfer")
        kv_bytes, report, counters = _prefill(cluster, requests, shared, trace, handed_over)
        progress("decode")
        if not cluster.decode_runs_elsewhere:
            cluster.command_decode(TraceDecode(trace.folder if trace is not None and trace.want_choices else ""), Done)
        started = time.perf_counter()
        tokens = {name: [token] for name, token in report.first_tokens.items()}
        logits = {name: [values] for name, values in report.last_logits.items()}
        _decode(cluster, requests, tokens, logits)
        decode_seconds = time.perf_counter() - started
        digests = {name: cluster.ask_decode(RowDigest(name), RowDigestIs).digest for name in handed_over}
        if dump_pool is not None:
            cluster.command_decode(DumpPool(str(dump_pool)), Done)
    finally:
        with _unless_workers_died():
            for name in handed_over:
                cluster.ask_decode(ReleaseRequest(name), Done)
    seconds = {"prefill": report.compute_seconds, "transfer": report.transfer_seconds, "decode": decode_seconds}
    stacked = {name: torch.stack(values) for name, values in logits.items()}
    return GenerationResult(tokens, stacked, digests, report, counters, kv_bytes, seconds)


def _prefill(
    cluster: Cluster, requests: Sequence[Request], shared: bool, trace: Trace | None, handed_over: list[str]
) -> tuple[int, PrefillReport, list[CountersAre]]:
    """Open a pool, prefill, close it whatever happens; names what the decode worker took in `handed_over`."""
    kv_bytes = cluster.open_pool(shared)
    try:
        report = PrefillScheduler(cluster, shared=shared, trace=trace).run(requests)
        handed_over += report.first_tokens
        for failure in report.failures.values():
            raise failure
        return kv_bytes, report, cluster.counters()
    finally:
        with _unless_workers_died():
            cluster.close_pool()


@contextlib.contextmanager
def _unless_workers_died() -> Iterator[None]:
    """Clean up, unless that is moot: an error that is under way must not be hidden by that of a dead worker."""
    with contextlib.suppress(WorkerDiedError):
        yield


def check_decode_pages(requests: Sequence[Request], cluster: Cluster) -> None:
    """Refuse requests that our decode worker could not hold together, before their prompts are computed.

    One that runs elsewhere is shared with others: it says so itself, and a request waits until others have ended.

    Raises:
        CapacityError: with the number of pages that would do.
    """
    if cluster.decode_runs_elsewhere:
        return
    page_size = cluster.settings.page_size
    needed = sum(-(-(len(request.token_ids) + request.max_new_tokens) // page_size) for request in requests)
    if needed > cluster.decode_pages - 1:
        raise CapacityError(
            f"the requests need {needed} pages at the decode worker, which has {cluster.decode_pages - 1}; "
            f"raise decode_pages to {needed + 1}, or send fewer requests at a time"
        )


def _decode(
    cluster: Cluster,
    requests: Sequence[Request],
    tokens: dict[str, list[int]],
    logits: dict[str, list[torch.Tensor]],
) -> None:
    dtype = compute_dtype_of(torch_dtype(cluster.settings.dtype))
    while True:
        unfinished = [
            request.request_id for request in requests if len(tokens[request.request_id]) < request.max_new_tokens
        ]
        if not unfinished:
            return
        decoded = cluster.ask_decode(DecodeStep(tuple(unfinished)), DecodedTokens)
        for request_id, token, raw in zip(unfinished, decoded.tokens, decoded.logits, strict=True):
            tokens[request_id].append(token)
            logits[request_id].append(bytes_tensor(raw, dtype))
