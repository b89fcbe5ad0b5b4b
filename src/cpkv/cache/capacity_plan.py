"""What `cpkv plan` tells, as frozen values: what a pool holds and what each view costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cpkv.config.names import ViewName
from cpkv.layout.model_numbers import ModelNumbers

Hosts = Literal["one", "several"]


@dataclass(frozen=True)
class Capacity:
    """What some bytes of every rank hold.

    Attributes:
        memory_bytes: bytes of a rank that pages may take, its trash page included.
        pages: logical pages that can be allocated.
        tokens: tokens of these pages.
    """

    memory_bytes: int
    pages: int
    tokens: int


@dataclass(frozen=True)
class ViewNumbers:
    """One view for one request.

    Attributes:
        view: its name; `current` serves only a first chunk, so its numbers are those of the first chunk.
        scratch_bytes: bytes that a rank sets aside beside its pages, so that no chunk of a request of up to this
            length needs more.
        buffers: of these, by buffer, before alignment.
        last_chunk_bytes: bytes that the last chunk takes of them.
        moved_bytes: bytes of the history that the last chunk brings to a rank over all layers; for `blocked` the
            most that it can be. The exchange of the chunk's own rows, the same for every view, is not in it.
        capacity: of the memory less the scratch.
        capacity_ratio: tokens over those of a replicated pool less its own scratch.
        serves_context: the view can serve this chunk, within --scratch-bytes where that is given.
    """

    view: ViewName
    scratch_bytes: int
    buffers: dict[str, int]
    last_chunk_bytes: int
    moved_bytes: int
    capacity: Capacity
    capacity_ratio: float
    serves_context: bool


@dataclass(frozen=True)
class EngineChoice:
    """What the planner takes for the last chunk.

    Attributes:
        hosts: whether all ranks run on one host and share memory.
        view: the chosen view; None when the request would be refused.
        reason: why, in words.
        scratch_bytes: scratch that is set aside at start; 0 when no view can serve.
        capacity: of the memory less that scratch.
        capacity_ratio: tokens over those of a replicated pool less its own scratch.
    """

    hosts: Hosts
    view: ViewName | None
    reason: str
    scratch_bytes: int
    capacity: Capacity
    capacity_ratio: float


@dataclass(frozen=True)
class ContextNumbers:
    """One request of `context` tokens, and its last chunk.

    Attributes:
        context: tokens of the request.
        chunk: tokens of its last chunk.
        pages: logical pages of the request.
        replicated_bytes: bytes of its pages on a rank when every rank holds them all.
        shared_bytes: bytes of its pages on the fullest rank when they are spread.
        beyond_model: it is longer than the model was made for.
        views: by view, replicated first.
        choices: what the planner takes.
    """

    context: int
    chunk: int
    pages: int
    replicated_bytes: int
    shared_bytes: int
    beyond_model: bool
    views: tuple[ViewNumbers, ...]
    choices: tuple[EngineChoice, ...]


@dataclass(frozen=True)
class CapacityPlan:
    """Everything that `cpkv plan` tells.

    Attributes:
        model: sizes of the model.
        cp_size: ranks.
        page_size: tokens of a page.
        chunk_size: tokens of a batch at most.
        latent_dtype: of stored latent rows.
        index_dtype: of stored index keys.
        prefetch: layers are gathered one ahead, into a second buffer.
        kv_memory_bytes: bytes of a rank for pages and scratch.
        latent_row_bytes: bytes of a latent row of one layer.
        index_row_bytes: bytes of an index key of one layer.
        token_bytes: bytes of a token in the pool of a rank that holds it, all layers.
        page_bytes: the same of a page.
        replicated: what the memory holds when every rank holds every page, no scratch counted.
        shared: what it holds when the pages are spread over the ranks, no scratch counted.
        capacity_ratio: tokens shared over tokens replicated, no scratch counted.
        contexts: the contexts that were asked for.
        million: 1,048,576 tokens.
    """

    model: ModelNumbers
    cp_size: int
    page_size: int
    chunk_size: int
    latent_dtype: str
    index_dtype: str
    prefetch: bool
    kv_memory_bytes: int
    latent_row_bytes: int
    index_row_bytes: int
    token_bytes: float
    page_bytes: int
    replicated: Capacity
    shared: Capacity
    capacity_ratio: float
    contexts: tuple[ContextNumbers, ...]
    million: ContextNumbers
