"""What prefill and decode workers say to each other. Plain data, msgpack, one tag each.

prefill scheduler                       decode worker                     prefill rank r
  Hello ------------------------------->                 <----------------------- Hello
        <------------------------ Welcome                Welcome ------------------>
  OpenTransfer ------------------------>  allocates its pages
        <----------------- TransferOpened
  (pages to the ranks)                      <======== page bytes, by the engine =====
                                            <--------------------------- PagesSent
  FinishTransfer ---------------------->  every position exactly once?
        <--------------- TransferComplete
"""

from __future__ import annotations

import msgspec

from cpkv.config.names import IndexDtype, LatentDtype, SplitStrategy

PROTOCOL_VERSION = 1
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
    """What a prefill worker tells about itself; carried, not compared. Rank -1 is the scheduler."""

    rank: int
    cp_size: int
    strategy: SplitStrategy


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
    """First message on a connection; without the run's secret nothing else is looked at."""

    secret: str
    pool: PoolDescription
    sender: SenderDescription


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The decode worker agrees; where its pages lie: the latent allocation, then the index allocation."""

    pool: PoolDescription
    session_id: str
    regions: tuple[MemoryRegion, ...]


class OpenTransfer(msgspec.Struct, frozen=True, tag=True):
    """Announce a request.

    Attributes:
        attempt: number of this attempt; messages of another attempt are refused.
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
    """The decode worker's local pages for a request, by logical page position."""

    request_id: str
    attempt: int
    pages: tuple[int, ...]


class PagesSent(msgspec.Struct, frozen=True, tag=True):
    """A rank's writes of these positions are complete at the engine.

    Attributes:
        digests: SHA-256 of each page at its source, by position; empty unless diagnostics are on.
    """

    request_id: str
    attempt: int
    rank: int
    positions: tuple[int, ...]
    digests: tuple[str, ...] = ()


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
    """Give a request up. Its pages go to quarantine where writes may still land."""

    request_id: str
    attempt: int
    cause: str
    writes_may_land: bool


class DecodeStep(msgspec.Struct, frozen=True, tag=True):
    """Decode one token of each request, as one batch in this order."""

    request_ids: tuple[str, ...]


class DecodedTokens(msgspec.Struct, frozen=True, tag=True):
    """One new token and its logits (raw bytes in the compute dtype) per request."""

    tokens: tuple[int, ...]
    logits: tuple[bytes, ...]


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


ToDecode = Hello | OpenTransfer | PagesSent | FinishTransfer | AbortTransfer | DecodeStep | ReleaseRequest
FromDecode = Welcome | TransferOpened | TransferComplete | DecodedTokens | Done | Failed


def describe_mismatch(ours: PoolDescription, theirs: PoolDescription) -> str:
    """Every field that differs, in words; empty when none does."""
    differing = [
        f"{name}: prefill has {getattr(theirs, name)!r}, decode has {getattr(ours, name)!r}"
        for name in PoolDescription.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    return "; ".join(differing)
