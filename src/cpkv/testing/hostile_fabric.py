"""A network, a transfer engine and memory that do every bad thing that they may, in one thread and by one seed.

page bytes   latent [serial position 0 mark]   index [serial position 1 mark]     a serial is one life of one request
write        submitted -> lands whole, in parts, late, damaged, never -> "done" once it has landed, or "failed"
                          `-> after "failed", or when its process is dead, it may still land, with what it finds
connection   questions and answers in order; broken at any point, after which some questions may still be delivered
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar, NamedTuple

from cpkv.errors import CpkvError, TransferError
from cpkv.protocol.messages import Heartbeat, PagesSent, PagesTaken, SenderDescription
from cpkv.transfer.backend import TransferBackend, TransferStatus
from cpkv.transfer.runs import Region, Run

UNIT = 8
"""Bytes of a page in each of its two regions."""
POISON = b"\xff" * UNIT
_MARK = 0xA5


class Fault(AssertionError):
    """An invariant of the transfer protocol was broken."""


class Tag(NamedTuple):
    """What a page's bytes say: whose they are, and which part."""

    serial: int
    position: int
    region: int


class Span(NamedTuple):
    """A run of memory."""

    address: int
    length: int


def page_content(serial: int, position: int, region: int) -> bytes:
    """The bytes of one page in one region."""
    return serial.to_bytes(5, "little") + bytes((position, region, _MARK))


def read_tag(unit: bytes) -> Tag | None:
    """What the bytes of one page and region say; None for poison."""
    return Tag(int.from_bytes(unit[:5], "little"), unit[5], unit[6]) if unit[7] == _MARK else None


class PageMemory:
    """The pages of one rank or decode owner: latent region, then index region, without a gap."""

    def __init__(self, base: int, num_pages: int) -> None:
        self.base = base
        self.num_pages = num_pages
        self.data = bytearray(POISON * (2 * num_pages))
        size = num_pages * UNIT
        self._regions = (Span(base, size), Span(base + size, size))

    def regions(self) -> Sequence[Span]:
        """Both allocations."""
        return self._regions

    def page_spans(self, local_page: int) -> Sequence[Span]:
        """The bytes of one page in each."""
        return [Span(region.address + local_page * UNIT, UNIT) for region in self._regions]

    def page_digest(self, local_page: int) -> str:
        """The bytes of one page themselves."""
        return self.read(local_page).hex()

    def read(self, local_page: int) -> bytes:
        """The bytes of one page, latent and index."""
        latent, index = local_page * UNIT, (self.num_pages + local_page) * UNIT
        return bytes(self.data[latent : latent + UNIT] + self.data[index : index + UNIT])

    def write(self, local_page: int, latent: bytes, index: bytes) -> None:
        """Set the bytes of one page."""
        at = local_page * UNIT
        self.data[at : at + UNIT] = latent
        at += self.num_pages * UNIT
        self.data[at : at + UNIT] = index


class Flight:
    """One write at the engine. `state` is what the sender is told; `end` how many of its bytes will ever land."""

    def __init__(self, source: PageMemory, session_id: str, run: Run, tags: Sequence[Tag]) -> None:
        self.source = source
        self.session_id = session_id
        self.run = run
        self.tags = tags
        self.at = run.source - source.base
        self.snapshot = bytes(source.data[self.at : self.at + run.length])
        self.frozen: bytes | None = None
        self.state = "pending"
        self.landed = 0
        self.end = run.length

    def __repr__(self) -> str:
        return (
            f"<write of {self.tags} to {self.run.target:#x} at {self.session_id}: {self.state}, {self.landed} landed>"
        )


class HostileFabric:
    """Carries writes. `on_land(flight, memory, first unit, last unit)` is asked before bytes land."""

    def __init__(self, rng: Random, counts: Counter[str], max_damaged: int) -> None:
        self.rng = rng
        self.counts = counts
        self.sessions: dict[str, Sequence[PageMemory]] = {}
        self.flights: list[Flight] = []
        self.unfenced: set[int] = set()
        self.damage_left = max_damaged
        self.on_land: Callable[[Flight, PageMemory, int, int], None] = lambda *_: None

    def submit(self, source: PageMemory, session_id: str, run: Run) -> Flight:
        """Begin a write."""
        offset = run.source - source.base
        units = [bytes(source.data[at : at + UNIT]) for at in range(offset, offset + run.length, UNIT)]
        tags = [tag for tag in map(read_tag, units) if tag is not None]
        if len(tags) < len(units):
            raise Fault(f"a write was submitted from a page that is free or not computed: {run}")
        if session_id not in self.sessions:
            self.counts["writes to a session that is gone"] += 1
            if self.rng.random() < 0.5:
                self.unfenced.update(tag.serial for tag in tags)
                raise TransferError(f"peer {session_id} is not there")
        flight = Flight(source, session_id, run, tags)
        self.flights.append(flight)
        return flight

    def move(self, hostile: bool) -> None:
        """Let something happen to one write."""
        if not self.flights:
            return
        flight = self.flights[0 if self.rng.random() < 0.5 else self.rng.randrange(len(self.flights))]
        luck = self.rng.random() if hostile else 0.0
        if flight.state != "pending":
            # Late enough that whoever believes in an end of its own has acted on it.
            if 0.8 < luck < 0.95:
                self._land(flight, flight.end - flight.landed)
            elif luck >= 0.95:
                flight.end = flight.landed
        elif flight.landed == flight.end or flight.session_id not in self.sessions:
            self.tell(flight)
        elif luck < 0.7:
            self._land(flight, flight.end - flight.landed)
            if luck < 0.5:
                self.tell(flight)
        elif luck < 0.8:
            self.counts["writes landed in parts"] += 1
            self._land(flight, self.rng.randrange(1, flight.end - flight.landed + 1))
        elif luck < 0.87 and self.damage_left:
            self._damage(flight)
        elif luck < 0.93:
            self._fail(flight)
        if flight.state != "pending" and flight.landed >= flight.end:
            self.flights.remove(flight)

    def tell(self, flight: Flight) -> None:
        """Let the sender learn that a write has landed, or that its target is gone."""
        if flight.session_id in self.sessions:
            flight.state = "done"
        else:
            flight.state = "failed"
            flight.end = flight.landed
            self.unfenced.update(tag.serial for tag in flight.tags)

    def settle(self, *, late: bool) -> None:
        """Bring every write to its end, as a healthy network does; those that were given up only if `late`."""
        for flight in list(self.flights):
            if flight.state == "pending" or late:
                if self.damage_left and flight.landed < flight.end:
                    self._damage(flight)
                self._land(flight, flight.end - flight.landed)
                if flight.state == "pending":
                    self.tell(flight)
                self.flights.remove(flight)

    def kill(self, sources: Sequence[PageMemory]) -> None:
        """Their process is gone: of what it was writing, some bytes are on the wire and may land."""
        for flight in [flight for flight in self.flights if flight.source in sources]:
            if flight.state == "pending":
                flight.end = self.rng.randint(flight.landed, flight.end) if self.rng.random() < 0.5 else flight.end
            flight.state = "dead"
            flight.frozen = bytes(flight.source.data[flight.at : flight.at + flight.end])
            self.counts["writes on the wire of a dead process"] += 1

    def readers(self, source: PageMemory, local_page: int) -> Flight | None:
        """A write that still reads a page."""
        for span in source.page_spans(local_page):
            for flight in self.flights:
                run = flight.run
                if flight.state == "pending" and flight.source is source:
                    if run.source <= span.address < run.source + run.length:
                        return flight
        return None

    def _land(self, flight: Flight, count: int) -> None:
        if count <= 0:
            return
        begin, end = flight.landed, flight.landed + count
        data = (flight.frozen or bytes(flight.source.data[flight.at : flight.at + flight.run.length]))[begin:end]
        if flight.state == "pending" and data != flight.snapshot[begin:end]:
            raise Fault(f"a source page was overwritten while it was read: {flight}")
        self._put(flight, data)

    def _damage(self, flight: Flight) -> None:
        self.damage_left -= 1
        self.counts["pages damaged"] += 1
        data = bytearray(flight.snapshot[flight.landed :])
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        self._put(flight, bytes(data))

    def _put(self, flight: Flight, data: bytes) -> None:
        address = flight.run.target + flight.landed
        first, last = flight.landed // UNIT, (flight.landed + len(data) - 1) // UNIT
        flight.landed += len(data)
        for memory in self.sessions.get(flight.session_id, ()):
            offset = address - memory.base
            if 0 <= offset < len(memory.data):
                if flight.state != "pending":
                    self.counts[f"late writes landed ({flight.state})"] += 1
                self.on_land(flight, memory, first, last)
                memory.data[offset : offset + len(data)] = data
                return
        self.counts["writes that landed nowhere"] += 1

    def _fail(self, flight: Flight) -> None:
        flight.state = "failed"
        self.unfenced.update(tag.serial for tag in flight.tags)
        self.counts["writes failed"] += 1
        if self.rng.random() < 0.3:
            flight.end = flight.landed


class HostileBackend(TransferBackend):
    """A transfer engine over a hostile fabric."""

    name: ClassVar[str] = "hostile"

    def __init__(self, fabric: HostileFabric, memory: PageMemory, max_outstanding_per_peer: int) -> None:
        super().__init__(max_outstanding_per_peer)
        self.session_id = "sender"
        self._fabric = fabric
        self._memory = memory
        self._flights: dict[int, Flight] = {}
        self._next_handle = 0

    @classmethod
    def why_not(cls) -> str | None:
        """Always None."""
        return None

    def _register_memory(self, region: Region) -> None:
        pass

    def _unregister_memory(self, region: Region) -> None:
        pass

    def _submit_write(self, session_id: str, run: Run) -> int:
        self._next_handle += 1
        self._flights[self._next_handle] = self._fabric.submit(self._memory, session_id, run)
        return self._next_handle

    def _check(self, handle: int) -> TransferStatus:
        state = self._flights[handle].state
        if state == "pending":
            return TransferStatus("pending")
        del self._flights[handle]
        return TransferStatus("done") if state == "done" else TransferStatus("failed", "the network failed")

    def _forget(self, session_id: str) -> None:
        pass

    def _close_engine(self) -> None:
        pass


class Wire:
    """One connection to the decode worker."""

    def __init__(self, sender: SenderDescription) -> None:
        self.sender = sender
        self.questions: deque[Any] = deque()
        self.answers: deque[tuple[Any, Any]] = deque()
        self.broken = False

    def ask(self, question: Any) -> None:
        """Send a question; TransferError where the connection is known to be broken."""
        if self.broken:
            raise TransferError("the connection to the decode worker broke")
        self.questions.append(question)

    def cut(self, rng: Random) -> None:
        """Break it: some of what is under way still arrives, in order, and the rest is lost."""
        self.broken = True
        for way in (self.questions, self.answers):
            for _ in range(rng.randint(0, len(way)) if rng.random() < 0.4 else 0):
                way.pop()


class WireLink:
    """A rank's reports over a wire; a `ReportLink`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def post(self, report: PagesSent) -> None:
        """Send a report."""
        self._wire.ask(report)

    def heartbeat(self) -> None:
        """Say that the prefill lives."""
        self._wire.ask(Heartbeat())

    def answers(self) -> list[tuple[PagesSent, PagesTaken | CpkvError]]:
        """Answers that have come."""
        pairs = [pair for pair in self._wire.answers if isinstance(pair[0], PagesSent)]
        self._wire.answers.clear()
        if not pairs and self._wire.broken:
            raise TransferError("the connection to the decode worker broke")
        return pairs

    def close(self) -> None:
        """Nothing is read any more; what was sent may still arrive."""
        self._wire.broken = True
        self._wire.answers.clear()
