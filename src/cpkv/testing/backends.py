"""Transfer back ends for tests: memory between guards, back ends that count, and peers in processes of their own."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from cpkv.config.names import TransferName
from cpkv.transfer.backend import TransferBackend
from cpkv.transfer.inprocess import InProcessBackend, InProcessFabric
from cpkv.transfer.runs import Peer, Region, Run

BETWEEN_PROCESSES: tuple[TransferName, ...] = ("tcp", "shm", "mooncake", "nixl")
ALL_BACKENDS: tuple[TransferName, ...] = ("inprocess", *BETWEEN_PROCESSES)
GUARD = 4096
SECRET = "a secret of the test run"
_UNTOUCHED = 0xFF

_PEER_PROGRAM = """
import hashlib, sys
import numpy
from cpkv.testing.backends import SECRET, Memory
from cpkv.transfer.backends import open_backend
with open_backend(sys.argv[1], "127.0.0.1", secret=SECRET, transfer_timeout_s=float(sys.argv[3])) as backend:
    memory = Memory(int(sys.argv[2]), backend)
    backend.register(memory.region)
    print(backend.session_id, memory.region.address, flush=True)
    for line in sys.stdin:
        if line == "unregister\\n":
            backend.unregister(memory.region)
        if line == "values\\n":
            print(*numpy.unique(memory.everything), flush=True)
        else:
            print(hashlib.sha256(memory.everything).hexdigest(), flush=True)
    del memory
"""


class Memory:
    """`length` bytes between two guard bands of 0xFF; all of it starts as 0xFF.

    Args:
        length: of the region, in bytes.
        target_of: a back end that must be able to receive into it; without one it is a source.
    """

    def __init__(self, length: int, target_of: TransferBackend | None = None) -> None:
        buffer = None if target_of is None else target_of.allocate_target(length + 2 * GUARD)
        self.everything = np.empty(length + 2 * GUARD, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
        self.everything[:] = _UNTOUCHED
        self.bytes = self.everything[GUARD : GUARD + length]
        self.region = Region(self.bytes.ctypes.data, length)

    def fill(self, seed: int) -> None:
        """Bytes that depend on the seed; none is 0xFF."""
        self.bytes[:] = np.random.default_rng(seed).integers(0, _UNTOUCHED, self.bytes.size, np.uint8)

    def check_guards(self) -> None:
        """AssertionError if anything was written outside of the region."""
        assert (self.everything[:GUARD] == _UNTOUCHED).all(), "bytes landed before the region"
        assert (self.everything[-GUARD:] == _UNTOUCHED).all(), "bytes landed behind the region"


def expected_bytes(source: Memory, target: Region, runs: Sequence[Run]) -> np.ndarray:
    """What the memory of a target that held 0xFF has to hold after `runs`, without its guards."""
    expected = np.full(target.length, _UNTOUCHED, np.uint8)
    for run in runs:
        at = run.source - source.region.address
        to = run.target - target.address
        expected[to : to + run.length] = source.bytes[at : at + run.length]
    return expected


def scattered_runs(source: Region, target: Region, count: int) -> list[Run]:
    """Runs of odd lengths with odd gaps, of at most 913 bytes each, in an order of their own at both ends."""
    rng = random.Random(count)
    lengths = [rng.randrange(1, 900, 2) for _ in range(count)]
    places = []
    for _ in range(2):
        at, offsets = rng.randrange(40), [0] * count
        for i in rng.sample(range(count), count):
            offsets[i] = at
            at += lengths[i] + rng.choice([0, 1, 13])
        places.append(offsets)
    return [Run(source.address + a, target.address + b, n) for a, b, n in zip(*places, lengths, strict=True)]


def pieces(source: Region, target: Region, step: int) -> list[Run]:
    """Runs of step - 1 bytes at each step, so that none merges with the next."""
    return [Run(source.address + at, target.address + at, step - 1) for at in range(0, target.length, step)]


class Counted:
    """Mixed into a back end: how many writes it started, the most in flight at one peer and in all, and the longest."""

    started = 0
    peak_per_peer = 0
    peak = 0
    peak_bytes = 0

    def _submit_runs(self, session_id: str, runs: list[Run]) -> int:
        handle = int(super()._submit_runs(session_id, runs))  # type: ignore[misc]
        backend = cast(TransferBackend, self)
        self.started += 1
        self.peak_bytes = max(self.peak_bytes, sum(run.length for run in runs))
        self.peak_per_peer = max(self.peak_per_peer, len(backend._lanes[session_id].in_flight) + 1)
        self.peak = max(self.peak, backend.outstanding() + 1)
        return handle


class BackendMaker:
    """Makes back ends of one name that reach each other; `with` closes them all.

    Args:
        name: of the back ends.
        spares: engines that earlier tests left in order. Some take a second to start and one to end, so they are used
            again; None for new ones only.

    Attributes:
        fabric: that of `inprocess`.
    """

    def __init__(self, name: TransferName, spares: list[TransferBackend] | None = None) -> None:
        self.name = name
        self.fabric = InProcessFabric()
        self._spares = spares
        self._made: list[TransferBackend] = []

    def __call__(self, *, max_outstanding_per_peer: int = 16, runs_per_write: int | None = None) -> Any:
        """A back end that counts; `runs_per_write` keeps runs apart that would travel together."""
        if self._spares and max_outstanding_per_peer > 0:
            backend = self._spares.pop()
            backend._cap = max_outstanding_per_peer
        else:
            backend = self.new(max_outstanding_per_peer=max_outstanding_per_peer)
        if runs_per_write is not None:
            backend.max_runs_per_write = runs_per_write
        self._made.append(backend)
        return backend

    def new(self, **options: Any) -> Any:
        """A new back end that counts, with options of its class; the caller closes it."""
        if self.name == "inprocess":
            return _counted(InProcessBackend)(self.fabric, **options)
        if self.name == "tcp":
            options.setdefault("secret", SECRET)
        return _counted(_class_of(self.name))(**options)

    def __enter__(self) -> BackendMaker:
        return self

    def __exit__(self, *_: object) -> None:
        for backend in self._made:
            if self._spares is None or backend._closed or not backend.drain(0):
                backend.close()
                continue
            for region in list(backend._regions):
                backend.unregister(region)
            for counted in ("started", "peak_per_peer", "peak", "peak_bytes", "max_runs_per_write"):
                backend.__dict__.pop(counted, None)
            self._spares.append(backend)


def _counted(kind: type[TransferBackend]) -> Any:
    return type(f"Counted{kind.__name__}", (Counted, kind), {})


def _class_of(name: TransferName) -> type[TransferBackend]:
    # Each loads a library, so only those that are asked for are imported.
    if name == "tcp":
        from cpkv.transfer.tcp import TcpBackend

        return TcpBackend
    if name == "shm":
        from cpkv.transfer.shm import ShmBackend

        return ShmBackend
    if name == "mooncake":
        from cpkv.transfer.mooncake import MooncakeBackend

        return MooncakeBackend
    from cpkv.transfer.nixl import NixlBackend

    return NixlBackend


class PeerProcess:
    """A receiver in a process of its own, with memory between guards.

    Args:
        name: of its back end.
        num_bytes: that it registers; all start as 0xFF.
        transfer_timeout_s: of its back end.
    """

    def __init__(self, name: TransferName, num_bytes: int, transfer_timeout_s: float) -> None:
        command = [sys.executable, "-c", _PEER_PROGRAM, name, str(num_bytes), str(transfer_timeout_s)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        session_id, address = self._read().split()
        self.region = Region(int(address), num_bytes)
        self.peer = Peer(session_id, (self.region,))

    def holds(self, expected: np.ndarray) -> bool:
        """Whether its memory holds these bytes, and its guards nothing new."""
        guard = bytes([_UNTOUCHED]) * GUARD
        return self.digest() == hashlib.sha256(guard + expected.tobytes() + guard).hexdigest()

    def values(self) -> set[int]:
        """The values of the bytes of its memory."""
        return set(map(int, self._ask("values")))

    def unregister(self) -> str:
        """Let it take its memory back; the digest of what it held when that was done."""
        return self._ask("unregister")[0]

    def digest(self) -> str:
        """Of all its memory."""
        return self._ask("digest")[0]

    def stop(self) -> None:
        """Stop all its threads (SIGSTOP); returns when they have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        # Its threads run on for a moment after the signal.
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Undo `stop`."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, word: str) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self._read().split()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with status {self.process.wait(10)}"
        return line


@contextmanager
def peer_processes(name: TransferName, transfer_timeout_s: float = 10.0) -> Iterator[Callable[[int], PeerProcess]]:
    """Starts peers of one back end with memory of so many bytes; all are killed at the end."""
    peers: list[PeerProcess] = []

    def start(num_bytes: int) -> PeerProcess:
        peers.append(PeerProcess(name, num_bytes, transfer_timeout_s))
        return peers[-1]

    try:
        yield start
    finally:
        for peer in peers:
            peer.close()


def poll_to_the_end(backend: TransferBackend, transfer: int, limit_s: float) -> tuple[str, str, float]:
    """State and cause at the end, and the longest time that one poll took, in seconds."""
    longest, deadline = 0.0, time.monotonic() + limit_s
    while True:
        begun = time.monotonic()
        status = backend.poll(transfer)
        longest = max(longest, time.monotonic() - begun)
        if status.state != "pending" or time.monotonic() > deadline:
            return status.state, status.cause, longest
        time.sleep(1e-3)


def eventually(is_so: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Whether something becomes true in time."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True
