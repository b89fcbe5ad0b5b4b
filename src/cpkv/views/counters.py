"""What the batches of one rank cost, by view."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ViewCounters:
    """Counters of one batch or of many.

    Attributes:
        batches: view -> batches that used it.
        moved_bytes: bytes that gathers of pages brought to this rank, padding and own pages included.
        history_bytes: of the pages brought here, the bytes of those that hold history.
        scratch_bytes: the most that any batch held beside the pool.
        gather_seconds: time that gathers of pages took, whoever waited for them.
        wait_seconds: of it, the time that the layers waited.
    """

    batches: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    history_bytes: int = 0
    scratch_bytes: int = 0
    gather_seconds: float = 0.0
    wait_seconds: float = 0.0

    def open_batch(self, view: str, held_bytes: int) -> None:
        """Count one batch and what it holds."""
        self.batches[view] = self.batches.get(view, 0) + 1
        self.scratch_bytes = max(self.scratch_bytes, held_bytes)

    def moved(self, num_bytes: int, history_bytes: int, seconds: float) -> None:
        """Count one gather."""
        self.moved_bytes += num_bytes
        self.history_bytes += history_bytes
        self.gather_seconds += seconds

    def add(self, other: ViewCounters) -> None:
        """Count what others cost too."""
        for view, batches in other.batches.items():
            self.batches[view] = self.batches.get(view, 0) + batches
        self.moved_bytes += other.moved_bytes
        self.history_bytes += other.history_bytes
        self.scratch_bytes = max(self.scratch_bytes, other.scratch_bytes)
        self.gather_seconds += other.gather_seconds
        self.wait_seconds += other.wait_seconds
