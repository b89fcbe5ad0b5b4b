"""A second stream of a GPU, and the order between it and the main one. Where there is no GPU, order is the host's.

main stream   ... attend l-1 | fork ........ | join | attend l+1
side stream                    gather l+1 ---------^
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cpkv.ops.device import launching_on


class SideStream:
    """Work beside the main stream of one device.

    Args:
        device: of both streams; nothing is made where it is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fork(self) -> torch.cuda.Event | None:
        """What the main stream has been given so far; work that is run with it begins behind that."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def run(self, begins: torch.cuda.Event | None, work: Callable[[], None]) -> None:
        """Give the side stream some work; from any thread, one at a time."""
        if self._stream is None or begins is None:
            work()
            return
        self._stream.wait_event(begins)
        with launching_on(self._device), torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """The main stream goes on behind everything that the side stream was given."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
