"""The signals that end a command which serves until it is told to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def end_signals() -> Iterator[set[signal.Signals]]:
    """SIGTERM and SIGINT, blocked inside, to be taken by `signal.sigwait`. Enter before other threads start.

    So the main thread takes them where it waits, and no handler runs in the middle of anything. One that came too often
    is dropped: it must not turn a clean end into another exit status.
    """
    ends = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        yield ends
    finally:
        while signal.sigtimedwait(ends, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
