"""The decode side of a simulated transfer: the real receiver and allocator, and the server loop round them.

questions of every connection -> receiver -> answers          bytes are checked where they land, and before every token
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cpkv.cache.allocator import PageAllocator
from cpkv.errors import CpkvError, ProtocolError
from cpkv.layout.placement import PagePlacement
from cpkv.protocol import messages as m
from cpkv.protocol.receiver import Incoming, TransferReceiver, store_key
from cpkv.testing.hostile_fabric import POISON, UNIT, Fault, Flight, HostileFabric, PageMemory, Wire, page_content
from cpkv.testing.simulated_prefill import PAGE_SIZE, PROGRESS_S, VOCAB_SIZE, WorldConfig

LEASE_S = 6.0


class Decode:
    """A decode worker: its life is one process; its engine may be another one from time to time.

    Args:
        serial_of: the serial of an attempt of an instance.
        now: the time.
    """

    def __init__(
        self,
        config: WorldConfig,
        life: int,
        fabric: HostileFabric,
        serial_of: Callable[[str, int], int],
        now: Callable[[], float],
    ) -> None:
        self.config = config
        self.life = life
        self._fabric = fabric
        self._rng = fabric.rng
        self._serial_of = serial_of
        self._now = now
        self._placement = PagePlacement(PAGE_SIZE, config.owners)
        local_pages = 1 + -(-config.decode_pages // config.owners)
        self.allocator = PageAllocator(local_pages * config.owners, self._placement, fabric.rng.getrandbits(32))
        self.memories = [PageMemory((64 + owner) << 20, local_pages) for owner in range(config.owners)]
        self.stopped = False
        self.dirty = True
        self.holder: dict[int, str] = {}
        self.quarantined: dict[str, int] = {}
        self.serials: dict[str, int] = {}
        self.places: dict[str, dict[int, tuple[int, int]]] = {}
        self._held_pages: dict[tuple[str, int], Mapping[int, int]] = {}
        self._engines = 0
        self.session_id = self._open_engine()
        self.receiver = TransferReceiver(
            self,
            page_size=PAGE_SIZE,
            targets=self._targets,
            vocab_size=VOCAB_SIZE,
            lease_s=LEASE_S,
            progress_s=PROGRESS_S * 2,
            held=self._held,
        )

    def _open_engine(self) -> str:
        self._engines += 1
        session_id = f"decode-{self.life}-{self._engines}"
        self._fabric.sessions[session_id] = self.memories
        return session_id

    def close_engine(self) -> None:
        """Nothing lands any more."""
        del self._fabric.sessions[self.session_id]

    def rebuild_engine(self) -> None:
        """Another engine over the same memory."""
        self.close_engine()
        self.receiver.engine_closed()
        self.session_id = self._open_engine()

    def _targets(self) -> tuple[m.TransferTarget, ...]:
        return tuple(
            m.TransferTarget(self.session_id, tuple(m.MemoryRegion(*region) for region in memory.regions()))
            for memory in self.memories
        )

    def _memory_of(self, page: int) -> tuple[PageMemory, int]:
        return self.memories[self._placement.owner(page)], self._placement.local_page(page)

    def _held(self, opened: m.OpenTransfer) -> Mapping[int, int]:
        """Some whole pages of the prompt, as if a prefix cache had them."""
        if not self.config.held or self._rng.random() < 0.4:
            return {}
        whole = opened.prompt_tokens // PAGE_SIZE
        positions = sorted(self._rng.sample(range(whole), self._rng.randint(0, min(2, whole))))
        if not positions or len(positions) > self.allocator.free_pages:
            return {}
        key = f"held {self._asking.instance} {opened.attempt}"
        held = dict(zip(positions, self.allocate(key, len(positions)), strict=True))
        serial = self._serial_of(self._asking.instance, opened.attempt)
        for position, page in held.items():
            memory, local_page = self._memory_of(page)
            memory.write(local_page, page_content(serial, position, 0), page_content(serial, position, 1))
        self._held_pages[self._asking.instance, opened.attempt] = held
        return held

    def drop_held(self) -> None:
        """Let held pages go whose request is over."""
        if self._held_pages:
            using = {(request.instance, request.opened.attempt) for request in self.receiver.requests.values()}
            for key in [key for key in self._held_pages if key not in using]:
                del self._held_pages[key]
                self.free(f"held {key[0]} {key[1]}")

    def answer(self, wire: Wire) -> Any:
        """Take the next question of a wire; returns it."""
        question = wire.questions.popleft()
        self._asking = wire.sender
        foreign = self._request_of_another_attempt(question, wire.sender)
        before = (foreign.arrivals.missing, foreign.first_token) if foreign else None
        try:
            answer = self._answer(question, wire.sender)
        except CpkvError as error:
            answer = error
        if foreign is not None:
            self._fabric.counts["messages of another attempt"] += 1
            if self.receiver.requests.get(question.request_id) is not foreign:
                raise Fault(f"{foreign.key} was ended by a message of another attempt: {question}")
            if (foreign.arrivals.missing, foreign.first_token) != before:
                raise Fault(f"{foreign.key} was changed by a message of another attempt: {question}")
        if not wire.broken:
            wire.answers.append((question, answer))
        self.drop_held()
        return question

    def _request_of_another_attempt(self, question: Any, sender: m.SenderDescription) -> Incoming | None:
        """The request of that id, where the question is of an earlier attempt or of another scheduler."""
        request = self.receiver.requests.get(getattr(question, "request_id", ""))
        attempt = getattr(question, "attempt", None)
        if request is None or attempt is None:
            return None
        is_current = request.instance == sender.instance and attempt >= request.opened.attempt
        return None if is_current else request

    def _answer(self, question: Any, sender: m.SenderDescription) -> Any:
        receiver, now = self.receiver, self._now()
        if isinstance(question, m.OpenTransfer):
            opened = receiver.open(question, sender, now)
            key = store_key(question.request_id, sender.instance, question.attempt)
            serial = self._serial_of(sender.instance, question.attempt)
            self.serials[key] = serial
            self.places[key] = {page: (serial, at) for at, page in zip(opened.positions, opened.pages, strict=True)}
            return opened
        if isinstance(question, m.PagesSent):
            return receiver.pages_sent(question, sender, self._arrived_digests(question), now)
        if isinstance(question, m.FinishTransfer):
            complete = receiver.finish(question, sender, now)
            self.check_prompt(question.request_id)
            return complete
        if isinstance(question, m.AbortTransfer):
            return receiver.abort(question, sender, now)
        if isinstance(question, m.WritesDrained):
            return receiver.drained(question, sender, now)
        if isinstance(question, m.ReleaseRequest):
            return receiver.release(question, sender, now)
        receiver.heard(sender, now)
        if isinstance(question, m.DecodeStep):
            return self._decode(question, sender)
        return m.Done()

    def _decode(self, step: m.DecodeStep, sender: m.SenderDescription) -> m.Done:
        for name in step.request_ids:
            if self.receiver.complete(name).instance != sender.instance:
                raise ProtocolError(f"request {name} is another scheduler's")
            self.check_prompt(name)
        return m.Done()

    def _arrived_digests(self, report: m.PagesSent) -> list[str]:
        # Of a late report nothing is known but that it is refused: its positions may not exist here.
        request = self.receiver.requests.get(report.request_id)
        if request is None or not report.digests:
            return []
        if (request.instance, request.opened.attempt) != (self._asking.instance, report.attempt):
            return []
        places = [self._memory_of(request.pages[position]) for position in report.positions]
        return [memory.page_digest(local_page) for memory, local_page in places]

    def check_prompt(self, name: str) -> None:
        """Every page of a complete prompt has its bytes, by position and region."""
        request = self.receiver.complete(name)
        serial = self._serial_of(request.instance, request.opened.attempt)
        for position in range(len(request.opened.senders)):
            memory, local_page = self._memory_of(request.pages[position])
            wanted = page_content(serial, position, 0) + page_content(serial, position, 1)
            if memory.read(local_page) != wanted:
                raise Fault(f"complete request {request.key} has wrong bytes at position {position}")

    def check_landing(self, flight: Flight, memory: PageMemory, first: int, last: int) -> None:
        """The page that a write lands in is held, or kept in quarantine, for the attempt that the write belongs to."""
        offset = (flight.run.target - memory.base) // UNIT
        for unit in range(first, last + 1):
            region, local_page = divmod(offset + unit, memory.num_pages)
            page = self._placement.page(self.memories.index(memory), local_page)
            key, tag = self.holder.get(page), flight.tags[unit]
            if key is None:
                raise Fault(f"written after free: page {page} by {flight}")
            if self.places.get(key, {}).get(page) != tag[:2] or tag.region != region:
                raise Fault(f"page {page} of {key} was written by another attempt, or in a wrong place: {flight}")
            for request in self.receiver.requests.values():
                if request.key == key and request.first_token is not None:
                    raise Fault(f"page {page} of complete request {key} was written by {flight}")

    # What the state machine needs of a page store.

    @property
    def capacity_pages(self) -> int:
        """Pages that can be held in all."""
        return self.allocator.capacity_pages

    def allocate(self, request_id: str, count: int) -> tuple[int, ...]:
        """Set pages aside."""
        pages = self.allocator.allocate(request_id, count)
        self.holder.update(dict.fromkeys(pages, request_id))
        self.dirty = True
        return pages

    def free(self, request_id: str) -> tuple[int, ...]:
        """Give pages back."""
        return self._poison(self.allocator.free(request_id))

    def quarantine(self, request_id: str) -> tuple[int, ...]:
        """Keep pages out of use."""
        pages = self.allocator.quarantine(request_id)
        self.quarantined[request_id] = self.serials[request_id]
        self.dirty = True
        return pages

    def release_quarantine(self, request_id: str) -> tuple[int, ...]:
        """Give quarantined pages back."""
        del self.quarantined[request_id]
        return self._poison(self.allocator.release_quarantine(request_id))

    def _poison(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        self.dirty = True
        for page in pages:
            del self.holder[page]
            memory, local_page = self._memory_of(page)
            memory.write(local_page, POISON, POISON)
        return pages
