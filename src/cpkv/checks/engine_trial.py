"""A back end tried for real: two engines, registered memory, 1 MiB moved and compared. Run in a process of its own:

    python -m cpkv.checks.engine_trial tcp 127.0.0.1        prints one JSON object, a Trial

since a library that crashes or hangs when it is loaded, started or closed must not take the caller with it.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import Literal, cast

import msgspec
import numpy as np

from cpkv.config.names import TransferName
from cpkv.errors import CpkvError, TransferError
from cpkv.transfer.backend import Peer, Region, Run, TransferBackend
from cpkv.transfer.backends import open_backend, why_not

MOVED_BYTES = 1 << 20
TRANSFER_TIMEOUT_S = 10.0


class Trial(msgspec.Struct, frozen=True):
    """How it went: "cannot" is what `why_not` says, "failed" anything after that; `seconds` are those of the move."""

    outcome: Literal["moved", "cannot", "failed"]
    cause: str = ""
    seconds: float = 0.0


def try_engine(name: TransferName, host: str) -> Trial:
    """Move 1 MiB between two engines of this process."""
    if (reason := why_not(name)) is not None:
        return Trial("cannot", reason)
    secret = secrets.token_hex(32)
    try:
        with _open(name, host, secret) as sender, _open(name, host, secret) as receiver:
            source = np.frombuffer(secrets.token_bytes(MOVED_BYTES), np.uint8)
            given = receiver.allocate_target(MOVED_BYTES)
            target = np.zeros(MOVED_BYTES, np.uint8) if given is None else np.frombuffer(given, np.uint8)
            seconds = _move(sender, receiver, source, target)
    except CpkvError as error:
        return Trial("failed", str(error))
    wrong = int((source != target).sum())
    if wrong:
        return Trial("failed", f"{wrong:,} of {MOVED_BYTES:,} bytes arrived wrong")
    return Trial("moved", seconds=seconds)


def _move(sender: TransferBackend, receiver: TransferBackend, source: np.ndarray, target: np.ndarray) -> float:
    """Register, move, and return the seconds of the move."""
    here, there = (Region(memory.ctypes.data, memory.nbytes) for memory in (source, target))
    sender.register(here)
    receiver.register(there)
    begun = time.perf_counter()
    run = Run(here.address, there.address, here.length)
    transfer = sender.submit(Peer(receiver.session_id, (there,)), [run])
    status = sender.wait(transfer, 2 * TRANSFER_TIMEOUT_S)
    seconds = time.perf_counter() - begun
    if status.state != "done":
        raise TransferError(status.cause or f"1 MiB has not arrived after {seconds:.1f} s")
    return seconds


def _open(name: TransferName, host: str, secret: str) -> TransferBackend:
    return open_backend(name, host, secret=secret, transfer_timeout_s=TRANSFER_TIMEOUT_S)


def main() -> None:
    """Try the back end that the arguments name."""
    answer = os.dup(sys.stdout.fileno())
    # Libraries print on stdout; what they say belongs beside the answer and not into it.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    trial = try_engine(cast(TransferName, sys.argv[1]), sys.argv[2])
    os.write(answer, msgspec.json.encode(trial))


if __name__ == "__main__":
    main()
