"""The prefill side of a simulated transfer: the real sender, page senders and allocator, and the loop round them.

actions -> questions, one at a time | inboxes of the ranks | allocator          answers, news of the ranks -> sender
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from cpkv.cache.allocator import PageAllocator
from cpkv.errors import CpkvError, TransferError
from cpkv.layout.placement import Page, PagePlacement
from cpkv.layout.transfer_map import page_moves, sender_of_positions
from cpkv.protocol import messages as m
from cpkv.protocol import sender as s
from cpkv.testing.hostile_fabric import (
    POISON,
    UNIT,
    Fault,
    HostileBackend,
    HostileFabric,
    PageMemory,
    Wire,
    WireLink,
    page_content,
)
from cpkv.transfer.page_sender import DrainedNews, FailedNews, News, PageSender, SendOrder, TakenNews

PAGE_SIZE = 2
VOCAB_SIZE = 100
SAMPLING = m.Sampling()
PROGRESS_S = 3.0
WAIT_S = 4.0


@dataclass(frozen=True)
class WorldConfig:
    """How one simulated world is built.

    Attributes:
        ranks: of the prefill.
        replicated: every rank holds every page.
        owners: of the decode side's pages.
        verify: digests travel along, and up to two pages are damaged.
        held: the decode side has some pages of some requests already.
        decode_pages: that the decode side has at least.
        kills: processes die.
        blocking: the scheduler waits for each answer, and does nothing else meanwhile.
        part_pages: pages handed to the engine at a time.
        max_outstanding: writes at the engine.
    """

    ranks: int = 2
    replicated: bool = False
    owners: int = 1
    verify: bool = False
    held: bool = False
    decode_pages: int = 14
    kills: bool = True
    blocking: bool = False
    part_pages: int = 2
    max_outstanding: int = 3


@dataclass(eq=False)
class Prompt:
    """A request at the prefill, in the life of its id that `serial` counts."""

    name: str
    serial: int
    tokens: int
    pages: tuple[Page, ...]
    done_tokens: int = 0
    ended: bool = False
    handed_over: bool = False


class Rank:
    """One prefill rank."""

    def __init__(self, sender: PageSender, memory: PageMemory) -> None:
        self.sender = sender
        self.memory = memory
        self.inbox: deque[Callable[[], None]] = deque()
        self.news: deque[News] = deque()
        self.stopped = False

    def step(self) -> None:
        """Act on commands, then move on as far as it goes."""
        if not self.stopped:
            while self.inbox:
                self.inbox.popleft()()
            self.sender.step()
            self.news.extend(self.sender.take_news())


class Prefill:
    """A prefill group: its life is one instance.

    Args:
        connect: makes a wire for a rank, -1 for the scheduler.
        ended: told once per request.
    """

    def __init__(
        self,
        config: WorldConfig,
        instance: str,
        fabric: HostileFabric,
        connect: Callable[[m.SenderDescription], Wire],
        ended: Callable[[Prompt, CpkvError | None], None],
    ) -> None:
        self.config = config
        self.instance = instance
        self._rng: Random = fabric.rng
        self._fabric = fabric
        self._connect = connect
        self._ended = ended
        self.placement = PagePlacement(PAGE_SIZE, 1 if config.replicated else config.ranks)
        local_pages = 12 if config.replicated else 1 + 12 // config.ranks
        self.allocator = PageAllocator(local_pages * self.placement.cp_size, self.placement, fabric.rng.getrandbits(32))
        self.sender = s.TransferSender(wait_s=WAIT_S, progress_s=PROGRESS_S, retry_s=0.3)
        self.ranks = [self._make_rank(rank, local_pages) for rank in range(config.ranks)]
        self.prompts: dict[str, Prompt] = {}
        self.serial_of: dict[int, int] = {}
        self.decoding: dict[str, Prompt] = {}
        self.releasing: set[str] = set()
        self.dying = False
        self._opened: dict[int, m.TransferOpened] = {}
        self._questions: deque[Any] = deque()
        self._asked: Any = None
        self._wire: Wire | None = None
        self._ask_again = False

    def _make_rank(self, rank: int, local_pages: int) -> Rank:
        memory = PageMemory((rank + 1) << 20, local_pages)
        sender = PageSender(
            rank,
            HostileBackend(self._fabric, memory, self.config.max_outstanding),
            memory,
            lambda: WireLink(self._connect(self.describe(rank))),
            digest_pages=self.config.verify,
            part_bytes=self.config.part_pages * 2 * UNIT,
        )
        return Rank(sender, memory)

    def describe(self, rank: int) -> m.SenderDescription:
        """Who says something."""
        return m.SenderDescription(rank=rank, cp_size=self.config.ranks, strategy="zigzag", instance=self.instance)

    @property
    def used(self) -> set[str]:
        """Ids that were handed over: a release names no attempt, so such an id is used once."""
        return {name for name, prompt in self.prompts.items() if prompt.handed_over}

    def begin(self, name: str, serial: int, tokens: int, new_tokens: int, now: float) -> None:
        """Take a request."""
        pages = self.allocator.allocate(name, self.placement.pages_for(tokens))
        self.prompts[name] = Prompt(name, serial, tokens, pages)
        senders = sender_of_positions(pages, self.placement, self.config.ranks)
        self.sender.begin(m.OpenTransfer(name, 0, tokens, new_tokens, senders, SAMPLING), now)
        self.act()

    def compute(self, prompt: Prompt, tokens: int, now: float) -> None:
        """Finish a chunk of a prompt; pages that are whole now, and the last one, get their bytes."""
        first = prompt.done_tokens // PAGE_SIZE
        prompt.done_tokens = min(prompt.tokens, prompt.done_tokens + tokens)
        is_last = prompt.done_tokens == prompt.tokens
        whole = len(prompt.pages) if is_last else prompt.done_tokens // PAGE_SIZE
        for position in range(first, whole):
            latent, index = (page_content(prompt.serial, position, region) for region in (0, 1))
            for rank, local_page in self._places(prompt.pages[position]):
                rank.memory.write(local_page, latent, index)
        if is_last:
            self.sender.sampled(prompt.name, prompt.serial % VOCAB_SIZE, now)
        else:
            self.sender.computed(prompt.name, whole, now)
        self.act()

    def _places(self, page: Page) -> Sequence[tuple[Rank, int]]:
        if self.config.replicated:
            return [(rank, int(page)) for rank in self.ranks]
        return [(self.ranks[self.placement.owner(page)], self.placement.local_page(page))]

    def pump(self, now: float) -> None:
        """One turn of the scheduler's loop."""
        self._take_answer(now)
        if self._asked is None or not self.config.blocking:
            for number, rank in enumerate(self.ranks):
                for _ in range(self._rng.randint(0, len(rank.news))):
                    self._tell(number, rank.news.popleft(), now)
            if self._ask_again and self._rng.random() < 0.5:
                self._ask_again = False
                self.sender.decode_back()
            self.sender.tick(now)
        self.act()
        self._ask()

    def _tell(self, rank: int, news: News, now: float) -> None:
        if isinstance(news, TakenNews):
            self.sender.taken(rank, news.request_id, news.attempt, news.positions, now)
        elif isinstance(news, FailedNews):
            self.sender.rank_failed(rank, news.request_id, news.attempt, news.error)
        elif isinstance(news, DrainedNews):
            self.sender.drained(rank, news.request_id, news.attempt, writes_may_land=news.writes_may_land)

    def act(self) -> None:
        """Do what the state machine says."""
        for action in self.sender.take_actions():
            if isinstance(action, s.AskDecode):
                if isinstance(action.message, m.OpenTransfer):
                    self.serial_of[action.message.attempt] = self.prompts[action.message.request_id].serial
                self._questions.append(action.message)
            elif isinstance(action, s.SendPositions):
                self._send(action)
            elif isinstance(action, s.StopSending):
                rank = self.ranks[action.rank]
                rank.inbox.append(partial(rank.sender.stop, action.request_id, action.attempt))
            elif isinstance(action, s.EndRequest):
                self._end(action)
            elif isinstance(action, s.QuarantinePages):
                self.allocator.quarantine(action.request_id)
            else:
                self._free(action.request_id)

    def _send(self, action: s.SendPositions) -> None:
        prompt, opened = self.prompts[action.request_id], self._opened[action.attempt]
        target_of = dict(zip(opened.positions, opened.pages, strict=True))
        moves = page_moves(
            action.positions,
            [prompt.pages[position] for position in action.positions],
            [target_of[position] for position in action.positions],
            self.placement,
            PagePlacement(PAGE_SIZE, self.config.owners),
            action.rank,
        )
        order = SendOrder(action.request_id, action.attempt, moves, opened.targets)
        rank = self.ranks[action.rank]
        rank.inbox.append(partial(rank.sender.order, order))

    def _end(self, action: s.EndRequest) -> None:
        prompt = self.prompts[action.request_id]
        if prompt.ended:
            raise Fault(f"request {prompt.name} ended twice")
        prompt.ended = True
        if action.error is None:
            prompt.handed_over = True
            self.decoding[prompt.name] = prompt
        self._ended(prompt, action.error)

    def _free(self, name: str) -> None:
        pages = self.allocator.release_quarantine(name) if name not in self.allocator.request_ids else None
        for page in self.allocator.free(name) if pages is None else pages:
            for rank, local_page in self._places(page):
                reader = self._fabric.readers(rank.memory, local_page)
                if reader is not None:
                    raise Fault(f"page {page} of request {name} was freed while it is read by {reader}")
                rank.memory.write(local_page, POISON, POISON)

    def ask(self, question: Any) -> None:
        """Put a question of the scheduler itself into the queue."""
        self._questions.append(question)

    def _ask(self) -> None:
        while self._asked is None and self._questions:
            question = self._questions.popleft()
            try:
                if self._wire is None:
                    self._wire = self._connect(self.describe(-1))
                self._wire.ask(question)
                self._asked = question
            except TransferError as error:
                self._lose(question, error)
                return

    def _lose(self, question: Any, error: TransferError) -> None:
        self._wire = None
        self._ask_again = True
        self.sender.decode_lost(error)
        # Void, but for what the state machine knows nothing of: decoding goes on.
        own = [asked for asked in (question, *self._questions) if isinstance(asked, m.ReleaseRequest)]
        if self._rng.random() < 0.8:
            self._questions = deque(own)
        elif isinstance(question, m.ReleaseRequest):
            self._questions.append(question)
        self.act()

    def _take_answer(self, now: float) -> None:
        wire, question = self._wire, self._asked
        if question is None or wire is None or not (wire.answers or wire.broken):
            return
        self._asked = None
        if not wire.answers:
            self._lose(question, TransferError("the connection to the decode worker broke"))
            return
        asked, answer = wire.answers.popleft()
        assert asked is question
        if isinstance(question, m.DecodeStep | m.ReleaseRequest):
            if isinstance(answer, CpkvError) or isinstance(question, m.ReleaseRequest):
                names = (question.request_id,) if isinstance(question, m.ReleaseRequest) else question.request_ids
                for name in names:
                    self.decoding.pop(name, None)
        elif isinstance(answer, CpkvError):
            self.sender.refused(question, answer, now)
        else:
            if isinstance(answer, m.TransferOpened):
                self._opened[answer.attempt] = answer
            self.sender.answered(question, answer, now)
        self.act()

    def notice_cuts(self) -> None:
        """Find out about broken connections, as the keepalive of a connection does in time."""
        if self._wire is not None and self._wire.broken:
            self._wire = None
        for rank in self.ranks:
            rank.sender.heartbeat()

    def heartbeat(self) -> None:
        """Let a rank say that it lives."""
        rank = self._rng.choice(self.ranks)
        if not rank.stopped:
            rank.sender.heartbeat()

    def lose_ranks(self) -> None:
        """Every rank dies; the scheduler learns of each."""
        self.dying = True
        self._fabric.kill([rank.memory for rank in self.ranks])
        for number, rank in enumerate(self.ranks):
            rank.inbox.clear()
            rank.stopped = True
            self.sender.rank_lost(number, TransferError(f"rank {number} died"))
        self.act()
        if self.sender.open_requests or self.allocator.free_pages != self.allocator.capacity_pages:
            raise Fault(f"every rank is dead: {self.sender.open_requests} are open, {self.allocator!r}")
