"""A back end for ranks and decode workers that are threads of one process: it copies memory, and tests can hold it.

    fabric = InProcessFabric()              what a network is to the others; one object, handed to every back end
    sender, receiver = InProcessBackend(fabric), InProcessBackend(fabric)

A write reads its source when it is copied, not when it is submitted, as a network card would. `fabric.hold()` keeps
writes in flight for as long as a test wants, and so shows whoever frees pages too early.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import ClassVar

from cpkv.errors import TransferError
from cpkv.transfer.backend import Region, Run, TransferBackend, TransferStatus


class InProcessFabric:
    """Who is there and what they registered: session id -> regions. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, list[Region]] = {}
        self._causes: deque[str] = deque()
        self._held = False
        self._joined = 0

    def hold(self) -> None:
        """Copy nothing until `release`: every write that is submitted stays in flight."""
        with self._lock:
            self._held = True

    def release(self) -> None:
        """Let writes move again."""
        with self._lock:
            self._held = False

    def fail_next(self, cause: str) -> None:
        """Let the next write that would be copied fail with `cause`, and copy nothing of it; calls queue up."""
        with self._lock:
            self._causes.append(cause)

    def join(self) -> str:
        """Add a session and return its id."""
        with self._lock:
            session_id = f"inprocess-{self._joined}"
            self._joined += 1
            self._sessions[session_id] = []
            return session_id

    def leave(self, session_id: str) -> None:
        """Forget a session; when this returns, nothing is written into its memory any more."""
        with self._lock:
            self._sessions.pop(session_id, None)

    def publish(self, session_id: str, region: Region) -> None:
        """Let others write into `region`."""
        with self._lock:
            self._sessions[session_id].append(region)

    def withdraw(self, session_id: str, region: Region) -> None:
        """Undo `publish`; when this returns, nothing is written into `region` any more."""
        with self._lock:
            self._sessions[session_id].remove(region)

    def has(self, session_id: str) -> bool:
        """Whether the session is there."""
        with self._lock:
            return session_id in self._sessions

    def copy(self, session_id: str, run: Run) -> TransferStatus:
        """Carry one write out, unless the fabric is held (then "pending")."""
        # The lock covers the copy too, so that leave and withdraw are fences: they cannot return in the middle of one.
        with self._lock:
            if self._held:
                return TransferStatus("pending")
            if self._causes:
                return TransferStatus("failed", self._causes.popleft())
            regions = self._sessions.get(session_id)
            if regions is None:
                return TransferStatus("failed", _not_there(session_id))
            if not any(region.holds(run.target, run.length) for region in regions):
                return TransferStatus("failed", f"peer {session_id} has withdrawn the memory that the run writes to")
            ctypes.memmove(run.target, run.source, run.length)
            return TransferStatus("done")


class InProcessBackend(TransferBackend):
    """Copies memory inside this process: one run per `poll`, so that a test can stop between any two."""

    name: ClassVar[str] = "inprocess"

    def __init__(self, fabric: InProcessFabric, max_outstanding_per_peer: int = 16) -> None:
        super().__init__(max_outstanding_per_peer)
        self._fabric = fabric
        self._writes: dict[int, tuple[str, Run]] = {}
        self._next_handle = 1
        self._may_copy = False
        self.session_id = fabric.join()

    @classmethod
    def why_not(cls) -> str | None:
        """Always None: memory can be copied anywhere."""
        return None

    def _pump(self) -> bool:
        self._may_copy = True
        return super()._pump()

    def _register_memory(self, region: Region) -> None:
        self._fabric.publish(self.session_id, region)

    def _unregister_memory(self, region: Region) -> None:
        self._fabric.withdraw(self.session_id, region)

    def _submit_write(self, session_id: str, run: Run) -> int:
        if not self._fabric.has(session_id):
            raise TransferError(_not_there(session_id))
        handle = self._next_handle
        self._next_handle += 1
        self._writes[handle] = (session_id, run)
        return handle

    def _check(self, handle: int) -> TransferStatus:
        if not self._may_copy:
            return TransferStatus("pending")
        status = self._fabric.copy(*self._writes[handle])
        if status.state != "pending":
            del self._writes[handle]
            self._may_copy = False
        return status

    def _forget(self, session_id: str) -> None:
        pass

    def _close_engine(self) -> None:
        self._writes.clear()
        self._fabric.leave(self.session_id)


def _not_there(session_id: str) -> str:
    return f"peer {session_id} is not there: it is closed or never existed; take its id from the handshake"
