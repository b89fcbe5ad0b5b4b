"""What every transfer back end promises, and the logic they share.

A back end writes runs of bytes from registered memory here into registered memory of a peer:

    submit(peer, runs) -> id      runs are checked against BOTH ends, merged, and queued for that peer
    poll / wait(id) -> status     settles what the engine has finished, then refills: at most `cap` writes per peer
    drain(seconds) -> bool        nothing of ours is read any more

A run longer than the back end's `max_bytes_per_write` is cut, and short runs travel together where it takes several.

"failed" is only said once no write of the transfer is in flight as far as the engine knows. That is no fence at the
peer: a write that was reported as failed can still land there later, so whoever owns the target keeps it out of use.
The source must stay as it is until its transfer is "done" or "failed".

An engine that is wedged, one whose transfers stay pending or fail whatever the peer does, is rebuilt by its owner:
close() it, make another with `cpkv.transfer.backends.open_backend`, register the same regions, and tell the peers the
new session id in a new handshake. The memory stays where it is, that of `allocate_target` too.

This module imports neither torch nor a vendor package.
"""

from __future__ import annotations

import abc
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, Literal, Self

from cpkv.errors import ConfigError, TransferError
from cpkv.transfer.runs import Peer, Region, Run, Runs, listed, place_runs
from cpkv.transfer.waiting_runs import WaitingRuns

__all__ = ["Peer", "Region", "Run", "Runs", "TransferBackend", "TransferStatus"]

# An idle wait backs off from the first pause to the last: status polls spin a core otherwise. At about 30 us a slice
# 16 writes outlast the first pause, and shorter ones were slower where the peer shares the machine.
_FIRST_PAUSE_S = 200e-6
_LAST_PAUSE_S = 1e-3


@dataclass(frozen=True)
class TransferStatus:
    """Where a transfer stands; `cause` is the first cause, empty unless `state` is "failed"."""

    state: Literal["pending", "done", "failed"]
    cause: str = ""


_PENDING = TransferStatus("pending")
_DONE = TransferStatus("done")


@dataclass(eq=False)
class _Transfer:
    transfer_id: int
    session_id: str
    runs: WaitingRuns
    sources: frozenset[Region]
    submitted: float
    in_flight: int = 0
    cause: str = ""


@dataclass(eq=False)
class _Lane:
    """What is queued and in flight for one peer; `in_flight` maps an engine handle to whose write it is."""

    queue: deque[_Transfer] = field(default_factory=deque)
    in_flight: dict[int, tuple[_Transfer, list[Run]]] = field(default_factory=dict)


class TransferBackend(abc.ABC):
    """Writes runs of bytes into a peer's registered memory, without ever blocking in `submit` or `poll`.

    One thread owns a back end and makes every call on it. Nothing moves between calls beyond what the engine already
    holds, so the owner polls (or waits) often while `outstanding()` is not 0.
    """

    name: ClassVar[str]
    # What one write of the engine may carry. An engine that takes one run of any length leaves both as they are.
    max_runs_per_write: int = 1
    max_bytes_per_write: int = sys.maxsize
    session_id: str

    def __init__(self, max_outstanding_per_peer: int = 16) -> None:
        if max_outstanding_per_peer < 1:
            raise ConfigError(
                f"max_outstanding_per_peer is {max_outstanding_per_peer}: no write could ever be in flight; use 1 or "
                "more (16 was fastest over TCP)"
            )
        self._cap = max_outstanding_per_peer
        self._regions: list[Region] = []
        self._lanes: dict[str, _Lane] = {}
        self._pending: dict[int, _Transfer] = {}
        # A finished id that is not in here was done: what is kept for good grows with failures only.
        self._failures: dict[int, TransferStatus] = {}
        self._next_id = 1
        self._closed = False

    @classmethod
    @abc.abstractmethod
    def why_not(cls) -> str | None:
        """Say in words why this back end cannot run here and what to do about it, or None when it can."""

    def allocate_target(self, num_bytes: int) -> memoryview | None:
        """Memory [num_bytes] of zeros that peers can write to, or None when any memory will do.

        Whoever wants to receive asks first, registers what it gets (an allocation of its own after None), and uses it
        as it is: `torch.frombuffer(memory, dtype=torch.uint8)`. It is not registered by this call, outlives `close`,
        and goes with the last view over it. ConfigError if the system does not give it.
        """
        return None

    def register(self, region: Region) -> None:
        """Let the engine read and write `region`; TransferError if it is empty or overlaps one registered before."""
        self._refuse_closed("register memory")
        if region.address <= 0 or region.length <= 0:
            raise TransferError(f"region {region} cannot be registered: address and length must both be above 0")
        for other in self._regions:
            if region.address < other.end and other.address < region.end:
                raise TransferError(
                    f"region {region} overlaps {other}, which is registered already; register each allocation once"
                )
        self._register_memory(region)
        self._regions.append(region)

    def unregister(self, region: Region) -> None:
        """Take `region` back; TransferError if it is not registered or a pending transfer still reads from it."""
        self._refuse_closed("unregister memory")
        if region not in self._regions:
            raise TransferError(f"region {region} is not registered here; registered: {listed(self._regions)}")
        readers = sorted(i for i, transfer in self._pending.items() if region in transfer.sources)
        if readers:
            raise TransferError(
                f"region {region} is still read by {len(readers)} pending transfers (first: {readers[0]}); drain() "
                "before you unregister it"
            )
        self._unregister_memory(region)
        self._regions.remove(region)

    def submit(self, peer: Peer, runs: Runs | Sequence[Run]) -> int:
        """Queue `runs` as one transfer to `peer` and return its id.

        TransferError, with nothing queued, if a run is empty, its source is not inside ONE region registered here, or
        its target not inside ONE of the peer's: RDMA would refuse those, so the CPU must too. Runs may land in any
        order, so their targets must not overlap. A peer that is not there shows as a failed transfer, not as an error.
        """
        self._refuse_closed("submit")
        merged, sources = place_runs(self._regions, peer, Runs.of(runs))
        transfer = _Transfer(self._next_id, peer.session_id, WaitingRuns(merged), sources, time.monotonic())
        self._next_id += 1
        self._pending[transfer.transfer_id] = transfer
        lane = self._lanes.setdefault(peer.session_id, _Lane())
        lane.queue.append(transfer)
        self._feed(lane)
        return transfer.transfer_id

    def poll(self, transfer_id: int) -> TransferStatus:
        """Pump every peer's queue once and say where this transfer stands; never blocks.

        Costs one engine call per write in flight. TransferError for an id that `submit` never returned.
        """
        self._refuse_unknown(transfer_id)
        self._pump()
        return self._status(transfer_id)

    def wait(self, transfer_id: int, timeout_s: float) -> TransferStatus:
        """Pump until the transfer is done or failed, or `timeout_s` is over (then the status is still "pending")."""
        self._refuse_unknown(transfer_id)
        self._pump_until(lambda: transfer_id not in self._pending, timeout_s)
        return self._status(transfer_id)

    def cancel(self, transfer_id: int) -> None:
        """Submit nothing more of a transfer; what is in flight ends by itself, and then it is "failed"."""
        self._refuse_unknown(transfer_id)
        transfer = self._pending.get(transfer_id)
        if transfer is not None:
            transfer.cause = transfer.cause or "it was cancelled"
            transfer.runs.clear()

    def drain(self, timeout_s: float) -> bool:
        """Pump until every id ever submitted is terminal at the engine; False if `timeout_s` ended first.

        True means that no source memory is read any more.
        """
        return self._pump_until(lambda: not self._pending, timeout_s)

    def outstanding(self) -> int:
        """How many engine writes are in flight, over all peers."""
        return sum(len(lane.in_flight) for lane in self._lanes.values())

    def close(self) -> None:
        """End every pending transfer as failed, then release the engine and its memory; a second call does nothing.

        Queued runs are dropped; writes in flight get a grace to end. When it returns, no source memory is read.
        """
        if self._closed:
            return
        self._closed = True
        for transfer in self._pending.values():
            self._note_failure(transfer, "the back end was closed before the transfer had ended")
        self._pump_until(lambda: not self._pending, self._close_grace_s())
        self._close_engine()
        for transfer in list(self._pending.values()):
            transfer.in_flight = 0
            self._finish(transfer)
        self._lanes.clear()
        self._regions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._pending)} pending, {self.outstanding()} writes in flight"
        return f"<{type(self).__name__} {self.session_id}: {len(self._regions)} regions, {state}>"

    # What a back end provides. Each may raise TransferError; none may block.

    @abc.abstractmethod
    def _register_memory(self, region: Region) -> None: ...

    @abc.abstractmethod
    def _unregister_memory(self, region: Region) -> None: ...

    @abc.abstractmethod
    def _submit_write(self, session_id: str, run: Run) -> int:
        """Start one write; the handle stays unique while the write is in flight."""

    def _submit_runs(self, session_id: str, runs: list[Run]) -> int:
        """Start one write of several runs; a back end with `max_runs_per_write` above 1 has its own."""
        return self._submit_write(session_id, runs[0])

    @abc.abstractmethod
    def _check(self, handle: int) -> TransferStatus:
        """Status of one write; asked no more once it said "done" or "failed". Pending with a cause: late, in flight."""

    @abc.abstractmethod
    def _forget(self, session_id: str) -> None:
        """Drop what is known about a peer, since a write to it failed."""

    @abc.abstractmethod
    def _close_engine(self) -> None: ...

    def _contact(self, session_id: str, since: float) -> bool:
        """Whether the peer can be written to now, which a transfer has waited for `since` (time.monotonic).

        False means ask again, TransferError that the peer is not there.
        """
        return True

    def _close_grace_s(self) -> float:
        """How long `close` lets writes in flight go on."""
        return 0.0

    def _rest(self, pause_s: float) -> None:
        """Let time pass in a wait in which nothing has moved; a back end that is told of progress ends it then."""
        time.sleep(pause_s)

    # The pump.

    def _pump(self) -> bool:
        """Settle and refill every lane once; True if anything moved."""
        moved = False
        for session_id, lane in list(self._lanes.items()):
            moved |= self._settle(lane)
            moved |= self._feed(lane)
            if not lane.queue and not lane.in_flight:
                del self._lanes[session_id]
        return moved

    def _settle(self, lane: _Lane) -> bool:
        moved = False
        for handle, (transfer, runs) in list(lane.in_flight.items()):
            try:
                status = self._check(handle)
            except TransferError as error:
                status = TransferStatus("failed", str(error))
            if status.cause:
                self._note_failure(transfer, f"{status.cause} ({_described(runs, transfer.session_id)})")
            if status.state == "pending":
                continue
            del lane.in_flight[handle]
            transfer.in_flight -= 1
            self._finish(transfer)
            moved = True
        return moved

    def _feed(self, lane: _Lane) -> bool:
        moved = False
        while lane.queue and len(lane.in_flight) < self._cap:
            transfer = lane.queue[0]
            if not transfer.runs:
                lane.queue.popleft()
                self._finish(transfer)
                moved = True
                continue
            runs = transfer.runs.first(1)
            try:
                if not self._contact(transfer.session_id, transfer.submitted):
                    break
                runs = transfer.runs.take_write(self.max_runs_per_write, self.max_bytes_per_write)
                handle = self._submit_runs(transfer.session_id, runs)
            except TransferError as error:
                self._note_failure(transfer, f"{error} ({_described(runs, transfer.session_id)})")
                continue
            transfer.in_flight += 1
            lane.in_flight[handle] = (transfer, runs)
            moved = True
        return moved

    def _note_failure(self, transfer: _Transfer, cause: str) -> None:
        transfer.cause = transfer.cause or cause
        transfer.runs.clear()
        self._forget(transfer.session_id)

    def _finish(self, transfer: _Transfer) -> None:
        if transfer.runs or transfer.in_flight or transfer.transfer_id not in self._pending:
            return
        del self._pending[transfer.transfer_id]
        if transfer.cause:
            self._failures[transfer.transfer_id] = TransferStatus("failed", transfer.cause)

    def _pump_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while True:
            moved = self._pump()
            if is_over():
                return True
            if time.monotonic() >= deadline:
                return False
            pause = _FIRST_PAUSE_S if moved else min(2 * pause, _LAST_PAUSE_S)
            if not moved:
                self._rest(pause)

    # Checks.

    def _status(self, transfer_id: int) -> TransferStatus:
        if transfer_id in self._pending:
            return _PENDING
        return self._failures.get(transfer_id, _DONE)

    def _refuse_closed(self, verb: str) -> None:
        if self._closed:
            raise TransferError(f"cannot {verb}: the back end {self.session_id} is closed; make a new one")

    def _refuse_unknown(self, transfer_id: int) -> None:
        if not 0 < transfer_id < self._next_id:
            raise TransferError(f"transfer {transfer_id} was never submitted here; {self._next_id - 1} were")


def _described(runs: Sequence[Run], session_id: str) -> str:
    source, target, length = runs[0]
    first = f"run of {length:,} bytes from {source:#x} to {target:#x} at peer {session_id}"
    return first if len(runs) == 1 else f"{len(runs)} runs, the first a {first}"
