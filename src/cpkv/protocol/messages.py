"""What prefill and decode workers say to each other. Plain data, msgpack, one tag each.

prefill scheduler                       decode worker                     prefill rank r
  Hello ------------------------------->                 <----------------------- Hello
        <------------------------ Welcome                Welcome ------------------>
  OpenTransfer ------------------------>  allocates its pages
        <----------------- TransferOpened
  (pages to the ranks, chunk by chunk)      <======== page bytes, by the engine =====
                                            <--------------------------- PagesSent
                                            PagesTaken ---------------------------->
  FinishTransfer ---------------------->  every position exactly once?
        <--------------- TransferComplete
  or AbortTransfer, then WritesDrained once no write of the attempt can land any more

An attempt is one try to move one request. Its number counts up within an `instance`, the life of one prefill
scheduler, so that whatever comes late can be told from what is current.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from cpkv.config.names import IndexDtype, LatentDtype, SplitStrategy

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 << 20
MAX_REQUEST_ID_CHARS = 128


class PoolDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What both ends must agree on, field by field."""

    protocol_version: int
    model: str
    num_layers: int
    index_slots: tuple[int, ...]
    page_size: int
    latent_row_bytes: int
    index_row_bytes: int
    latent_dtype: LatentDtype
    index_dtype: IndexDtype
    norm_eps: float
    latent_norm_eps: float
    transfer: str


class SenderDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill worker tells about itself; carried, not compared. Rank -1 is the scheduler.

    `instance` is drawn when a scheduler starts, and is that of its ranks too.
    """

    rank: int
    cp_size: int
    strategy: SplitStrategy
    instance: str


class MemoryRegion(msgspec.Struct, frozen=True):
    """Registered memory of a worker, in bytes."""

    address: int
    length: int


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn. Temperature 0 is greedy.

    Attributes:
        temperature: divides the logits.
        top_p: keeps the smallest set of tokens whose probability reaches it.
        seed: makes the draws of a request repeatable.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message on a connection, which greetings and the proof of the secret have opened."""

    pool: PoolDescription
    sender: SenderDescription


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The decode worker agrees, and says how long it believes in a scheduler that says nothing."""

    pool: PoolDescription
    lease_s: float


class TransferTarget(msgspec.Struct, frozen=True):
    """Where one decode owner's pages lie.

    Attributes:
        session_id: how its transfer engine is reached; another one after the engine was rebuilt.
        regions: the latent allocation, then the index allocation.
    """

    session_id: str
    regions: tuple[MemoryRegion, ...]


class OpenTransfer(msgspec.Struct, frozen=True, tag=True):
    """Announce a request.

    Attributes:
        attempt: number of this attempt, higher than any before it of this instance.
        prompt_tokens: tokens whose rows will arrive.
        max_new_tokens: tokens that will be decoded; pages for them are set aside now.
        senders: per logical page position, the rank that will send it.
    """

    request_id: str
    attempt: int
    prompt_tokens: int
    max_new_tokens: int
    senders: tuple[int, ...]
    sampling: Sampling


class TransferOpened(msgspec.Struct, frozen=True, tag=True):
    """Where the pages of a request go.

    Attributes:
        positions: logical page positions to send, ascending; what the decode worker has already is left out.
        pages: the decode side's logical page for each of them; owner and local page by its placement.
        targets: memory by decode owner; one where decode has no context parallelism.
    """

    request_id: str
    attempt: int
    positions: tuple[int, ...]
    pages: tuple[int, ...]
    targets: tuple[TransferTarget, ...]


class PagesSent(msgspec.Struct, frozen=True, tag=True):
    """A rank's writes of these positions are complete at the engine.

    Attributes:
        report: counts the reports of this rank and attempt from 0; one that comes again changes nothing.
        digests: SHA-256 of each page at its source, by position; empty unless transfers are verified.
    """

    request_id: str
    attempt: int
    rank: int
    report: int
    positions: tuple[int, ...]
    digests: tuple[str, ...] = ()


class PagesTaken(msgspec.Struct, frozen=True, tag=True):
    """Answer to `PagesSent`: all have arrived but the `damaged` positions, which must be sent once more."""

    request_id: str
    attempt: int
    report: int
    damaged: tuple[int, ...] = ()


class FinishTransfer(msgspec.Struct, frozen=True, tag=True):
    """Every rank has sent; start from this token."""

    request_id: str
    attempt: int
    first_token: int


class TransferComplete(msgspec.Struct, frozen=True, tag=True):
    """Every position arrived exactly once; the request can be decoded."""

    request_id: str
    attempt: int


class AbortTransfer(msgspec.Struct, frozen=True, tag=True):
    """Give an attempt up, whatever became of it. Its pages go to quarantine where writes may still land."""

    request_id: str
    attempt: int
    cause: str
    writes_may_land: bool


class WritesDrained(msgspec.Struct, frozen=True, tag=True):
    """No write of an attempt that was given up can land any more: its pages leave quarantine."""

    request_id: str
    attempt: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The instance of this connection lives; any other message says so too."""


class DecodeStep(msgspec.Struct, frozen=True, tag=True):
    """Decode one token of each request, as one batch in this order."""

    request_ids: tuple[str, ...]


class DecodedTokens(msgspec.Struct, frozen=True, tag=True):
    """One new token and its logits (raw bytes in the compute dtype) per request."""

    tokens: tuple[int, ...]
    logits: tuple[bytes, ...]


class RowDigest(msgspec.Struct, frozen=True, tag=True):
    """Ask for a digest of a request's stored rows, prompt and decoded, in position order."""

    request_id: str


class RowDigestIs(msgspec.Struct, frozen=True, tag=True):
    """SHA-256 over the rows that hold tokens."""

    digest: str


class ReleaseRequest(msgspec.Struct, frozen=True, tag=True):
    """A request is over; free its pages."""

    request_id: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """Done, nothing to tell."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It did not work.

    Attributes:
        kind: name of the error class in `cpkv.errors`.
        message: fact, cause and remedy.
        where: the worker that says so.
    """

    kind: str
    message: str
    where: str


ToDecode = (
    Hello
    | OpenTransfer
    | PagesSent
    | FinishTransfer
    | AbortTransfer
    | WritesDrained
    | Heartbeat
    | DecodeStep
    | RowDigest
    | ReleaseRequest
)
FromDecode = Welcome | TransferOpened | PagesTaken | TransferComplete | DecodedTokens | RowDigestIs | Done | Failed

# What answers a question, where nothing is wrong.
ANSWER_OF: Mapping[type, type] = MappingProxyType(
    {
        Hello: Welcome,
        OpenTransfer: TransferOpened,
        PagesSent: PagesTaken,
        FinishTransfer: TransferComplete,
        AbortTransfer: Done,
        WritesDrained: Done,
        Heartbeat: Done,
        DecodeStep: DecodedTokens,
        RowDigest: RowDigestIs,
        ReleaseRequest: Done,
    }
)


def describe_mismatch(ours: PoolDescription, theirs: PoolDescription) -> str:
    """Every field that differs, in words; empty when none does."""
    differing = [
        f"{name}: prefill has {getattr(theirs, name)!r}, decode has {getattr(ours, name)!r}"
        for name in PoolDescription.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    return "; ".join(differing)
