"""The decode side of transfers as a state machine: messages and the time in, answers out. No I/O.

open -> arriving -> complete -> released           pages free
          |            `-> aborted, or its scheduler is gone: pages free, since every write was done
          `-> aborted, superseded, stalled, or its scheduler is gone:
                pages free if the scheduler says that no write may land, else
                quarantine -> WritesDrained, or the engine was closed -> pages free
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cpkv.errors import BusyError, CapacityError, CpkvError, PromptError, ProtocolError
from cpkv.protocol import messages as m
from cpkv.protocol.arrivals import Arrivals
from cpkv.protocol.attempts import EndedAttempts

MAX_INSTANCES = 256


class PageStore(Protocol):
    """Who holds the decode side's pages; a name holds pages once. `PageAllocator` is one."""

    @property
    def capacity_pages(self) -> int:
        """Pages that can be held in all."""

    def allocate(self, request_id: str, count: int) -> tuple[int, ...]:
        """Set pages aside."""

    def free(self, request_id: str) -> tuple[int, ...]:
        """Give them back."""

    def quarantine(self, request_id: str) -> tuple[int, ...]:
        """Keep them out of use: a write may still land."""

    def release_quarantine(self, request_id: str) -> tuple[int, ...]:
        """Give quarantined pages back."""


class Ended(NamedTuple):
    """An attempt that ended without a message of its own."""

    request_id: str
    attempt: int
    cause: str


@dataclass(eq=False)
class Incoming:
    """A request that holds pages.

    Attributes:
        opened: how it was announced.
        instance: the prefill scheduler that sends it.
        pages: decode pages of prompt and new tokens, by logical page position.
        arrivals: which have arrived.
        answer: given again when the announcement comes again.
        progress_at: when it last moved on.
        first_token: once it is complete.
    """

    opened: m.OpenTransfer
    instance: str
    pages: tuple[int, ...]
    arrivals: Arrivals
    answer: m.TransferOpened
    progress_at: float
    first_token: int | None = None

    @property
    def key(self) -> str:
        """The name under which the store holds its pages."""
        return store_key(self.opened.request_id, self.instance, self.opened.attempt)


def store_key(request_id: str, instance: str, attempt: int) -> str:
    """A name for the pages of one attempt; two attempts of a request may hold pages at once."""
    # repr, since both names are a peer's choice: no other pair of them may give the same text.
    return f"{request_id} (attempt {attempt} of {instance!r})"


class _Instance:
    """What is known of one prefill scheduler; `highest` is the last attempt that it announced or gave up."""

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.highest = 0
        self.ended = EndedAttempts()
        self.quarantined: dict[int, str] = {}


class TransferReceiver:
    """Every transfer of one decode worker.

    Args:
        store: holds the pages.
        page_size: tokens of a page.
        targets: where the pages lie now, by decode owner.
        vocab_size: tokens that the model knows.
        lease_s: a scheduler that says nothing for so long is taken for dead.
        progress_s: a transfer that does not move on for so long is given up.
        held: pages of a request that are here already, by position; by default none.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        page_size: int,
        targets: Callable[[], tuple[m.TransferTarget, ...]],
        vocab_size: int,
        lease_s: float,
        progress_s: float,
        held: Callable[[m.OpenTransfer], Mapping[int, int]] = lambda opened: {},
    ) -> None:
        self._store = store
        self._page_size = page_size
        self._targets = targets
        self._vocab_size = vocab_size
        self.lease_s = lease_s
        self._progress_s = progress_s
        self._held = held
        self._requests: dict[str, Incoming] = {}
        self._instances: dict[str, _Instance] = {}

    @property
    def arriving(self) -> int:
        """Transfers under way."""
        return sum(request.first_token is None for request in self._requests.values())

    @property
    def quarantined(self) -> int:
        """Attempts whose pages are in quarantine."""
        return sum(len(instance.quarantined) for instance in self._instances.values())

    @property
    def requests(self) -> Mapping[str, Incoming]:
        """Requests that hold pages, by id."""
        return self._requests

    def complete(self, request_id: str) -> Incoming:
        """A request that can be decoded.

        Raises:
            ProtocolError: it is not open, or not complete.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise ProtocolError(f"request {request_id} is not open here; it was released, aborted or never opened")
        if request.first_token is None:
            raise ProtocolError(f"request {request_id} is not complete; finish its transfer first")
        return request

    def heard(self, sender: m.SenderDescription, now: float) -> None:
        """An instance said something: its lease begins anew."""
        self._instance(sender.instance, now)

    def open(self, message: m.OpenTransfer, sender: m.SenderDescription, now: float) -> m.TransferOpened:
        """Set pages aside. The same announcement again is answered again; a later attempt supersedes an earlier one.

        Raises:
            BusyError: no pages now; it may be announced again, as a new attempt.
            CapacityError: it would not fit if it were alone.
            PromptError: token counts that nothing can be decoded with.
            ProtocolError: the attempt is over, or the id is taken.
        """
        instance = self._instance(sender.instance, now)
        current = self._requests.get(message.request_id)
        if current is not None and (current.instance, current.opened) == (sender.instance, message):
            return current.answer
        instance.ended.refuse(message.request_id, message.attempt)
        if message.attempt <= instance.highest:
            raise ProtocolError(
                f"request {message.request_id}: attempt {message.attempt} was announced after attempt "
                f"{instance.highest}; it is late, and dropped"
            )
        if current is not None and (current.instance != sender.instance or current.first_token is not None):
            other = "another" if current.instance != sender.instance else "this"
            raise ProtocolError(f"request {message.request_id} is open already, for {other} scheduler; use an id once")
        self._check_announcement(message, sender)
        instance.highest = message.attempt
        if current is not None:
            self._end(current, f"attempt {message.attempt} took its place", writes_may_land=True)
        try:
            return self._accept(message, sender, now)
        except CapacityError as error:
            instance.ended.end(message.attempt, str(error))
            tokens = message.prompt_tokens + message.max_new_tokens
            if self._pages_for(tokens) <= self._store.capacity_pages:
                raise BusyError(str(error)) from error
            raise

    def _accept(self, message: m.OpenTransfer, sender: m.SenderDescription, now: float) -> m.TransferOpened:
        # Before pages are set aside: nobody would give them back if one of these raised.
        targets, held = self._targets(), self._held(message)
        count = self._pages_for(message.prompt_tokens + message.max_new_tokens)
        key = store_key(message.request_id, sender.instance, message.attempt)
        fresh = iter(self._store.allocate(key, count - len(held)))
        pages = tuple(held[position] if position in held else next(fresh) for position in range(count))
        wanted = tuple(position for position in range(len(message.senders)) if position not in held)
        answer = m.TransferOpened(
            message.request_id,
            message.attempt,
            wanted,
            tuple(pages[position] for position in wanted),
            targets,
        )
        arrivals = Arrivals(message.request_id, message.senders, wanted)
        self._requests[message.request_id] = Incoming(message, sender.instance, pages, arrivals, answer, now)
        return answer

    def _check_announcement(self, message: m.OpenTransfer, sender: m.SenderDescription) -> None:
        name = message.request_id
        if len(name) > m.MAX_REQUEST_ID_CHARS:
            raise ProtocolError(f"a request id of {len(name)} characters; {m.MAX_REQUEST_ID_CHARS} at most")
        if message.prompt_tokens < 1 or message.max_new_tokens < 1:
            raise PromptError(
                f"request {name} has {message.prompt_tokens} prompt tokens and {message.max_new_tokens} to decode; "
                "both must be 1 or more"
            )
        pages = self._pages_for(message.prompt_tokens)
        if len(message.senders) != pages:
            raise ProtocolError(
                f"request {name}: {message.prompt_tokens} tokens are {pages} pages, and {len(message.senders)} senders "
                "are named"
            )
        if not all(0 <= rank < sender.cp_size for rank in message.senders):
            raise ProtocolError(f"request {name}: its senders are {message.senders}, of {sender.cp_size} ranks")

    def pages_sent(
        self, message: m.PagesSent, sender: m.SenderDescription, arrived_digests: Sequence[str], now: float
    ) -> m.PagesTaken:
        """Note pages that have arrived.

        Raises:
            ProtocolError: not the current attempt, or pages that must not arrive; nothing has changed.
            TransferError: a page is damaged for the second time; the attempt is over.
        """
        if message.rank != sender.rank:
            raise ProtocolError(f"rank {sender.rank} reports pages as rank {message.rank}")
        request = self._current(message.request_id, message.attempt, sender, now)
        try:
            answer = request.arrivals.take(message, arrived_digests)
        except ProtocolError:
            raise
        except CpkvError as error:
            self._end(request, str(error), writes_may_land=True)
            raise
        request.progress_at = now
        return answer

    def finish(self, message: m.FinishTransfer, sender: m.SenderDescription, now: float) -> m.TransferComplete:
        """Every rank has sent: the request can be decoded. The same message again is answered again.

        Raises:
            ProtocolError: pages are missing, the token does not exist, or the request was finished with another one.
        """
        request = self._current(message.request_id, message.attempt, sender, now)
        if request.first_token is not None and request.first_token != message.first_token:
            raise ProtocolError(f"request {message.request_id} was finished before, with another first token")
        request.arrivals.check_complete()
        if not 0 <= message.first_token < self._vocab_size:
            raise ProtocolError(
                f"request {message.request_id} starts from token {message.first_token}, and the model knows 0 to "
                f"{self._vocab_size - 1}"
            )
        request.first_token = message.first_token
        request.progress_at = now
        return m.TransferComplete(message.request_id, message.attempt)

    def abort(self, message: m.AbortTransfer, sender: m.SenderDescription, now: float) -> m.Done:
        """Give an attempt up, in whatever state, also one that never arrived here; again is harmless."""
        instance = self._instance(sender.instance, now)
        request = self._requests.get(message.request_id)
        if request is not None and (request.instance, request.opened.attempt) == (sender.instance, message.attempt):
            self._end(request, message.cause, writes_may_land=message.writes_may_land)
        elif not message.writes_may_land:
            self._drain(instance, message.attempt)
        instance.highest = max(instance.highest, message.attempt)
        instance.ended.end(message.attempt, message.cause)
        return m.Done()

    def drained(self, message: m.WritesDrained, sender: m.SenderDescription, now: float) -> m.Done:
        """No write of an attempt can land any more; again is harmless.

        Raises:
            ProtocolError: the attempt was not given up.
        """
        instance = self._instance(sender.instance, now)
        request = self._requests.get(message.request_id)
        if request is not None and (request.instance, request.opened.attempt) == (sender.instance, message.attempt):
            raise ProtocolError(f"request {message.request_id} is under way; abort it before its writes are drained")
        self._drain(instance, message.attempt)
        return m.Done()

    def release(self, message: m.ReleaseRequest, sender: m.SenderDescription, now: float) -> m.Done:
        """A decoded request is over: its pages are free.

        Raises:
            ProtocolError: it is not complete, or another scheduler's.
        """
        self._instance(sender.instance, now)
        request = self.complete(message.request_id)
        if request.instance != sender.instance:
            raise ProtocolError(f"request {message.request_id} belongs to another scheduler")
        self._end(request, "it was released", writes_may_land=False)
        return m.Done()

    def tick(self, now: float) -> tuple[Ended, ...]:
        """Give up what stalled and what belongs to schedulers that are gone; what ended, for the log."""
        ended = []
        for request in list(self._requests.values()):
            silent = now - self._instances[request.instance].heard_at
            cause = ""
            if silent > self.lease_s:
                cause = f"prefill instance {request.instance} has said nothing for {silent:.0f} s"
            elif request.first_token is None and now - request.progress_at > self._progress_s:
                missing = len(request.arrivals.missing)
                cause = f"no page arrived for {now - request.progress_at:.0f} s, and {missing} are missing"
            if cause:
                self._end(request, cause, writes_may_land=True)
                ended.append(Ended(request.opened.request_id, request.opened.attempt, cause))
        self._forget_instances(now)
        return tuple(ended)

    def engine_closed(self) -> int:
        """The engine that wrote into the pages is gone: nothing can land, so every quarantine ends.

        Raises:
            ProtocolError: transfers are still under way.
        """
        if self.arriving:
            raise ProtocolError(f"{self.arriving} transfers are under way; end them before the engine is closed")
        count = self.quarantined
        for instance in self._instances.values():
            for attempt in list(instance.quarantined):
                self._drain(instance, attempt)
        return count

    def end_arriving(self, cause: str) -> None:
        """Give up every transfer under way."""
        for request in list(self._requests.values()):
            if request.first_token is None:
                self._end(request, cause, writes_may_land=True)

    def _current(self, request_id: str, attempt: int, sender: m.SenderDescription, now: float) -> Incoming:
        instance = self._instance(sender.instance, now)
        request = self._requests.get(request_id)
        if request is not None and (request.instance, request.opened.attempt) == (sender.instance, attempt):
            return request
        instance.ended.refuse(request_id, attempt)
        if request is None or request.instance != sender.instance:
            raise ProtocolError(f"request {request_id} is not open here; it was released, aborted or never opened")
        current = request.opened.attempt
        raise ProtocolError(
            f"request {request_id}: a message of attempt {attempt} came during attempt {current}; dropped"
        )

    def _end(self, request: Incoming, cause: str, *, writes_may_land: bool) -> None:
        """Take a request's pages from it. A complete one has no write under way: all were reported."""
        attempt = request.opened.attempt
        instance = self._instances[request.instance]
        del self._requests[request.opened.request_id]
        instance.ended.end(attempt, cause)
        if writes_may_land and request.first_token is None:
            self._store.quarantine(request.key)
            instance.quarantined[attempt] = request.key
        else:
            self._store.free(request.key)

    def _drain(self, instance: _Instance, attempt: int) -> None:
        key = instance.quarantined.pop(attempt, None)
        if key is not None:
            self._store.release_quarantine(key)

    def _instance(self, name: str, now: float) -> _Instance:
        instance = self._instances.get(name)
        if instance is None:
            instance = self._instances[name] = _Instance(now)
        instance.heard_at = now
        return instance

    def _forget_instances(self, now: float) -> None:
        """Drop the oldest instances that are gone and hold nothing."""
        if len(self._instances) <= MAX_INSTANCES:
            return
        holding = {request.instance for request in self._requests.values()}
        for name, instance in sorted(self._instances.items(), key=lambda item: item[1].heard_at):
            gone = now - instance.heard_at > self.lease_s and not instance.quarantined and name not in holding
            if gone and len(self._instances) > MAX_INSTANCES:
                del self._instances[name]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
