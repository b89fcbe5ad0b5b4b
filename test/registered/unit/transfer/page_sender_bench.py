"""One page sender over an engine and connections that do as the test says."""

from __future__ import annotations

from typing import ClassVar

from cpkv.errors import CpkvError, TransferError
from cpkv.layout.transfer_map import PageMove
from cpkv.protocol.messages import MemoryRegion, PagesSent, PagesTaken, TransferTarget
from cpkv.testing.hostile_fabric import UNIT, PageMemory
from cpkv.transfer.backend import Region, Run, TransferBackend, TransferStatus
from cpkv.transfer.page_sender import News, PageSender, SendOrder

PAGES = 16
TARGET_BASE = 1 << 30


class Engine(TransferBackend):
    """Writes end as the test says."""

    name: ClassVar[str] = "scripted"

    def __init__(self, max_outstanding_per_peer: int = 100) -> None:
        super().__init__(max_outstanding_per_peer)
        self.session_id = "here"
        self.runs: list[tuple[str, Run]] = []
        self.ended: dict[int, str] = {}
        self.registered: list[Region] = []
        self.refuses = ""

    @classmethod
    def why_not(cls) -> str | None:
        return None

    def end(self, state: str = "done", count: int = 1000) -> None:
        """Let the next writes that are under way end."""
        under_way = [handle for handle in range(len(self.runs)) if handle not in self.ended]
        self.ended.update(dict.fromkeys(under_way[:count], state))

    def _register_memory(self, region: Region) -> None:
        if len(self.registered) == 1 and self.refuses:
            raise TransferError(self.refuses)
        self.registered.append(region)

    def _unregister_memory(self, region: Region) -> None:
        self.registered.remove(region)

    def _submit_write(self, session_id: str, run: Run) -> int:
        self.runs.append((session_id, run))
        return len(self.runs) - 1

    def _check(self, handle: int) -> TransferStatus:
        state = self.ended.get(handle, "pending")
        return TransferStatus(state, "the peer is gone" if state == "failed" else "")  # type: ignore[arg-type]

    def _forget(self, session_id: str) -> None:
        pass

    def _close_engine(self) -> None:
        pass


class Link:
    """A connection whose answers the test gives."""

    def __init__(self) -> None:
        self.reports: list[PagesSent] = []
        self.beats = 0
        self.ready: list[tuple[PagesSent, PagesTaken | CpkvError]] = []
        self.broken = False
        self.closed = False

    def post(self, report: PagesSent) -> None:
        if self.broken:
            raise TransferError("the decode worker is gone")
        self.reports.append(report)

    def heartbeat(self) -> None:
        if self.broken:
            raise TransferError("the decode worker is gone")
        self.beats += 1

    def answers(self) -> list[tuple[PagesSent, PagesTaken | CpkvError]]:
        if self.broken:
            raise TransferError("the decode worker is gone")
        ready, self.ready = self.ready, []
        return ready

    def answer(self, report: PagesSent, damaged: tuple[int, ...] = ()) -> None:
        self.ready.append((report, PagesTaken(report.request_id, report.attempt, report.report, damaged)))

    def close(self) -> None:
        self.closed = True


class Bench:
    """A sender of rank 1 over an engine and links."""

    def __init__(self, *, part_pages: int = 100, digests: bool = False, owners: int = 1) -> None:
        self.engine = Engine()
        self.memory = PageMemory(1 << 20, PAGES)
        self.links: list[Link] = []
        self.connects = True
        self.targets = tuple(target_of(owner) for owner in range(owners))
        self.sender = PageSender(
            1, self.engine, self.memory, self.connect, digest_pages=digests, part_bytes=part_pages * 2 * UNIT
        )

    def connect(self) -> Link:
        if not self.connects:
            raise TransferError("nobody listens there")
        self.links.append(Link())
        return self.links[-1]

    @property
    def link(self) -> Link:
        return self.links[-1]

    def order(self, positions: tuple[int, ...], attempt: int = 1, name: str = "a", owner: int = 0) -> None:
        """Send page 2 * p + 1 to page 3 * p + 1 for each position p, so that no two are neighbours."""
        moves = tuple(PageMove(position, 2 * position + 1, owner, 3 * position + 1) for position in positions)
        self.sender.order(SendOrder(name, attempt, moves, self.targets))

    def step(self) -> tuple[News, ...]:
        self.sender.step()
        return self.sender.take_news()

    def landed(self) -> tuple[News, ...]:
        """Let all writes end, and the decode worker take what is reported."""
        self.engine.end()
        news = self.step()
        for report in self.link.reports:
            self.link.answer(report)
        self.link.reports.clear()
        return news + self.step()


def target_of(owner: int) -> TransferTarget:
    base, size = TARGET_BASE * (owner + 1), 64 * UNIT
    return TransferTarget(f"decode-{owner}", (MemoryRegion(base, size), MemoryRegion(base + size, size)))
