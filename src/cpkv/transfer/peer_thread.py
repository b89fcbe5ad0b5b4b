"""Back ends whose writes are carried out by a thread of our own for each peer.

owner thread                      thread of peer A                  thread of peer B
  submit -> queue of A  --bell-->   carries out, in order
  submit -> queue of B  ------------------------------- bell ----->   carries out
  poll   <- outcomes    <--------   one entry per write       <----
"""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from typing import NamedTuple

from cpkv.errors import ConfigError, CpkvError, TransferError
from cpkv.transfer.backend import TransferBackend, TransferStatus
from cpkv.transfer.bounded_socket import Bell, StopWorkError
from cpkv.transfer.runs import Run

LOG = logging.getLogger(__name__)
MAX_RUNS_PER_WRITE = 1024
MAX_BYTES_PER_WRITE = 1 << 20

# For the end of a transfer behind which a peer has many writes left.
_REST_S = 5e-3
_PENDING = TransferStatus("pending")
_DONE = TransferStatus("done")
_CLOSED = "the back end was closed"


class Outcomes:
    """How writes ended, by handle: added to by the threads of peers, taken out by the owner's.

    Args:
        low: the owner rests until a peer has this many writes left, so that none runs dry and few wake it.
    """

    def __init__(self, low: int) -> None:
        self._low = low
        self._ended: dict[int, TransferStatus] = {}
        self._progress = threading.Event()

    def add(self, handle: int, status: TransferStatus, left: int) -> None:
        """Note the end of a write of a peer that has `left` others."""
        self._ended[handle] = status
        if left <= self._low or status.cause:
            self._progress.set()

    def take(self, handle: int) -> TransferStatus:
        """The end of a write, once; pending before."""
        return self._ended.pop(handle, _PENDING)

    def rest(self) -> None:
        """Wait a while for writes to end."""
        # What is added from here on sets it again, and what was added before is found by whoever looks next.
        self._progress.wait(_REST_S)
        self._progress.clear()


class Write(NamedTuple):
    """One write that is queued for a peer."""

    handle: int
    runs: list[Run]


class PeerThread(abc.ABC):
    """Carries out the writes for one peer, in order, until it is closed or the peer fails; it is `broken` from then on.

    Args:
        session_id: of the peer.
        outcomes: of all writes of the back end; this thread adds those that ended.
        silence_s: how long the peer may be silent while something is asked of it.
    """

    def __init__(self, session_id: str, outcomes: Outcomes, silence_s: float) -> None:
        self.session_id = session_id
        self.silence_s = silence_s
        self.broken = ""
        self._bell = Bell()
        self._queue: deque[Write] = deque()
        # Writes begun and not ended, oldest first.
        self._begun: deque[int] = deque()
        self._outcomes = outcomes
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"cpkv writes to {session_id}", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> bool:
        """Queue a write; False if the peer has failed meanwhile."""
        with self._lock:
            if self.broken:
                return False
            self._queue.append(write)
            self._bell.ring()
        return True

    def close(self) -> None:
        """End the thread, and every write as failed; nothing is read from our memory when this returns. Call once."""
        self._bell.ring_to_stop()
        self._thread.join()
        self._bell.close()

    @abc.abstractmethod
    def _serve(self) -> None:
        """Connect, and carry out writes for ever. Raises OSError or TransferError with why that ended."""

    @abc.abstractmethod
    def _in_words(self, error: OSError) -> str:
        """Why the connection failed."""

    def _end_write(self, handle: int, cause: str = "") -> None:
        self._begun.remove(handle)
        status = TransferStatus("failed", cause) if cause else _DONE
        self._outcomes.add(handle, status, len(self._begun) + len(self._queue))

    def _run(self) -> None:
        try:
            self._serve()
            cause = _CLOSED
        except StopWorkError:
            cause = _CLOSED
        except CpkvError as error:
            cause = str(error)
        except OSError as error:
            cause = self._in_words(error)
        # Whatever it is, writes that never end would hold pages for ever.
        except Exception as error:
            LOG.exception("the thread that writes to %s failed", self.session_id)
            cause = f"the thread that writes to peer {self.session_id} failed: {error!r}"
        with self._lock:
            self.broken = cause
        for handle in [*self._begun, *(write.handle for write in self._queue)]:
            self._outcomes.add(handle, TransferStatus("failed", cause), 0)
        self._queue.clear()


class ThreadedBackend(TransferBackend):
    """A back end with one `PeerThread` per peer that it has written to."""

    max_runs_per_write = MAX_RUNS_PER_WRITE
    max_bytes_per_write = MAX_BYTES_PER_WRITE

    def __init__(self, max_outstanding_per_peer: int, transfer_timeout_s: float) -> None:
        super().__init__(max_outstanding_per_peer)
        if transfer_timeout_s <= 0:
            raise ConfigError(f"transfer_timeout_s is {transfer_timeout_s}: every write would fail; 10 is usual")
        if reason := self.why_not():
            raise TransferError(reason)
        self._silence_s = transfer_timeout_s / 2
        self._peers: dict[str, PeerThread] = {}
        self._outcomes = Outcomes(max_outstanding_per_peer // 2)
        self._last_handle = 0

    @abc.abstractmethod
    def _open_peer(self, session_id: str) -> PeerThread:
        """A new thread for a peer. TransferError if the id leads nowhere."""

    def _submit_write(self, session_id: str, run: Run) -> int:
        return self._submit_runs(session_id, [run])

    def _submit_runs(self, session_id: str, runs: list[Run]) -> int:
        self._last_handle += 1
        write = Write(self._last_handle, runs)
        peer = self._peers.get(session_id)
        if peer is None or not peer.submit(write):
            # An idle peer that went away is not missed until now, and may be back.
            self._forget(session_id)
            self._peers[session_id] = peer = self._open_peer(session_id)
            if not peer.submit(write):
                raise TransferError(peer.broken)
        return write.handle

    def _check(self, handle: int) -> TransferStatus:
        return self._outcomes.take(handle)

    def _rest(self, pause_s: float) -> None:
        self._outcomes.rest()

    def _forget(self, session_id: str) -> None:
        # A write that was refused leaves the connection as it is, and others may be in flight on it.
        if (peer := self._peers.get(session_id)) and peer.broken:
            del self._peers[session_id]
            peer.close()

    def _close_engine(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
