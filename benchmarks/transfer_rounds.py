"""Rounds of the transfer benchmark on one group of processes: pages against bare runs, pages against layers."""

from __future__ import annotations

import multiprocessing
import random
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from paired_ratio import alternate, paired_ratio
from transfer_processes import (
    HOST,
    LAYERS,
    PATIENCE_S,
    SENDERS,
    Bench,
    Interval,
    hello,
    serve_receiver,
    serve_sender,
)

from cpkv.config.names import TransferName
from cpkv.layout.transfer_map import PageMove
from cpkv.protocol.messages import (
    Done,
    FinishTransfer,
    OpenTransfer,
    ReleaseRequest,
    Sampling,
    TransferComplete,
    TransferOpened,
)
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.page_sender import SendOrder

START_TIMEOUT_S = 120.0
# NIXL without cross-memory attach takes 4 to 13 s for a gibibyte on 2 cores: a slow back end moves fewer pages a round.
LONGEST_ROUND_S = 3.0


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
        round_bytes: latent bytes of a round, over all senders.
        rounds: pairs of page transfer and bare runs.
        layer_rounds: pairs of page-major and layer-major.
        layer_runs: that a sender submits at most in a layer-major round; some engines take 30 us each.
    """

    round_bytes: int
    rounds: int
    layer_rounds: int
    layer_runs: int


class Group:
    """Four senders and a receiver, each a process. A context manager: whatever happens, all of them end."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[tuple[Any, Any]] = []
        self._rng = random.Random(0)
        self._attempt = 0
        self._link: DecodeLink | None = None
        self.sender_pages = bench.sender_pages
        self.target_pages: tuple[int, ...] = ()
        # CPU seconds of all processes, by method, round by round.
        self.cpu_seconds: dict[str, list[float]] = defaultdict(list)
        try:
            self._receiver = self._start(serve_receiver, bench)
            _answer(self._receiver, START_TIMEOUT_S)
            port = self.call(self._receiver, "port")
            barrier = self._context.Barrier(SENDERS)
            self.senders = [self._start(serve_sender, bench, rank, port, barrier) for rank in range(SENDERS)]
            for sender in self.senders:
                _answer(sender, START_TIMEOUT_S)
            self._link = DecodeLink(HOST, port, hello(-1), secret=bench.secret, timeout_s=PATIENCE_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            for pipe in (*self.senders, self._receiver):
                self.call(pipe, "close")
        self.close()

    def page_round(self) -> float:
        """Send scattered pages of one request; seconds from the first order to the last report taken."""
        self._attempt += 1
        name = str(self._attempt)
        pages, page_size = SENDERS * self.sender_pages, self._bench.page_size
        senders = tuple(position % SENDERS for position in range(pages))
        opened = self._ask(OpenTransfer(name, self._attempt, pages * page_size, 1, senders, Sampling()), TransferOpened)
        self.target_pages = opened.pages
        moves: list[list[PageMove]] = []
        for rank in range(SENDERS):
            sources = list(range(1, self._bench.sender_pages + 1))
            self._rng.shuffle(sources)
            positions = range(rank, pages, SENDERS)
            pairs = zip(positions, sources[: self.sender_pages], strict=True)
            moves.append([PageMove(position, source, 0, opened.pages[position]) for position, source in pairs])
        orders = [(SendOrder(name, self._attempt, tuple(mine), opened.targets),) for mine in moves]
        seconds = self._timed("page_transfer", orders)
        # An error unless every position has come, once.
        self._ask(FinishTransfer(name, self._attempt, 0), TransferComplete)
        self._ask(ReleaseRequest(name), Done)
        return seconds

    def shorten(self, seconds: float) -> None:
        """Send so few pages from now on that a round of `seconds` would end within the longest one."""
        if seconds > LONGEST_ROUND_S:
            self.sender_pages = max(1, int(self.sender_pages * LONGEST_ROUND_S / seconds))

    def bare_round(self, method: str, *arguments: Any) -> float:
        """Let every sender hand runs to its engine itself; seconds from the first to the last."""
        return self._timed(method, [arguments] * SENDERS)

    def check_bytes(self) -> None:
        """What lies at the target pages must be what lies at the source pages."""
        sent = {position: digest for found in self.call_senders("digests") for position, digest in found.items()}
        arrived = self.call(self._receiver, "digests", self.target_pages)
        wrong = [position for position, digest in enumerate(arrived) if sent[position] != digest]
        if wrong:
            raise SystemExit(f"{self._bench.backend}: {len(wrong)} of {len(arrived)} pages are not what was sent")

    def call_senders(self, method: str, arguments: Sequence[Sequence[Any]] = ((),) * SENDERS) -> list[Any]:
        """Call something on all senders at once."""
        for sender, own in zip(self.senders, arguments, strict=True):
            sender.send((method, tuple(own)))
        return [_answer(sender, 2 * PATIENCE_S) for sender in self.senders]

    def call(self, pipe: Any, method: str, *arguments: Any) -> Any:
        """Call something on one process."""
        pipe.send((method, arguments))
        return _answer(pipe, 2 * PATIENCE_S)

    def close(self) -> None:
        """End every process."""
        if self._link is not None:
            self._link.close()
        for _, pipe in self._processes:
            pipe.close()
        for process, _ in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def _timed(self, method: str, arguments: Sequence[Sequence[Any]]) -> float:
        """Call something on all senders; seconds from when the first began to when the last ended."""
        before = self.call(self._receiver, "cpu_seconds")
        intervals: list[Interval] = self.call_senders(method, arguments)
        spent = self.call(self._receiver, "cpu_seconds") - before + sum(interval.cpu for interval in intervals)
        self.cpu_seconds[method].append(spent)
        return max(interval.ended for interval in intervals) - min(interval.begun for interval in intervals)

    def _ask(self, question: Any, answer: type) -> Any:
        assert self._link is not None
        return self._link.ask(question, answer)

    def _start(self, target: Callable[..., None], *arguments: Any) -> Any:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._processes.append((process, ours))
        return ours


def _answer(pipe: Any, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise SystemExit(f"a process of the benchmark has said nothing for {timeout_s:g} s")
    try:
        result, error = pipe.recv()
    except EOFError:
        raise SystemExit("a process of the benchmark has died") from None
    if error:
        raise SystemExit(error)
    return result


def measure(backend: TransferName, page_bytes: int, page_size: int, sizes: Sizes) -> dict[str, Any]:
    """Everything at one back end and page size."""
    pages = max(1, sizes.round_bytes // (SENDERS * page_bytes))
    bench = Bench(backend, page_size, pages, secrets.token_hex(16))
    with Group(bench) as group:
        group.shorten(group.page_round())
        group.check_bytes()
        group.page_round()
        pages = group.sender_pages
        counts = count(group, bench)
        group.bare_round("raw")
        group.check_bytes()
        group.cpu_seconds.clear()
        ours, raw = alternate(group.page_round, lambda: group.bare_round("raw"), sizes.rounds)
        few = max(1, min(pages, sizes.layer_runs // (2 * LAYERS)))
        group.bare_round("layer_major", few)
        by_page, by_layer = alternate(
            lambda: group.bare_round("page_major", few),
            lambda: group.bare_round("layer_major", few),
            sizes.layer_rounds,
        )
    cpu = group.cpu_seconds
    moved, part = SENDERS * pages * bench.geometry.page_bytes, SENDERS * few * bench.geometry.page_bytes
    return {
        "latent_page_bytes": bench.geometry.latent_page_bytes,
        "index_page_bytes": bench.geometry.index_page_bytes,
        "bytes": moved,
        "bytes_per_second": moved * len(ours) / sum(ours),
        "raw_bytes_per_second": moved * len(raw) / sum(raw),
        "ratio": paired_ratio(raw, ours)._asdict(),
        "cpu_ratio": paired_ratio(cpu["raw"], cpu["page_transfer"])._asdict(),
        **counts,
        "layer_major": {
            "bytes": part,
            "descriptors_per_page": 2 * LAYERS,
            "bytes_per_second": part * len(by_layer) / sum(by_layer),
            "page_major_bytes_per_second": part * len(by_page) / sum(by_page),
            "ratio": paired_ratio(by_layer, by_page)._asdict(),
        },
    }


def count(group: Group, bench: Bench) -> dict[str, Any]:
    """Descriptors per page of each pool, and what the receiver got of the last page transfer: each byte once?"""
    counted = group.call_senders("counted")
    pages = sum(sender.pages for sender in counted)
    descriptors = [sum(sender.descriptors[pool] for sender in counted) / pages for pool in range(2)]
    targets = [np.concatenate([sender.targets[pool] for sender in counted]) for pool in range(2)]
    once = True
    for found in targets:
        starts, lengths = found[np.argsort(found[:, 0])].T
        once &= bool((starts[1:] >= starts[:-1] + lengths[:-1]).all())
    return {
        "descriptors_per_page": descriptors,
        "received_bytes": int(sum(found[:, 1].sum() for found in targets)),
        "expected_bytes": pages * bench.geometry.page_bytes,
        "each_byte_once": once,
    }
