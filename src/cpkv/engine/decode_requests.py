"""What the decode worker knows of its requests, and how it answers each message. One thread owns it.

OpenTransfer -> pages set aside (opening) -> PagesSent x ranks -> FinishTransfer -> decoding -> ReleaseRequest
                             AbortTransfer -> pages free, or in quarantine where writes may still land
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from cpkv.cache.allocator import PageAllocator
from cpkv.engine.forward import BatchTrace, ForwardPass
from cpkv.engine.sampling import check_sampling, sample_token
from cpkv.engine.tensors import tensor_bytes
from cpkv.errors import PromptError, ProtocolError, TransferError
from cpkv.layout.placement import PagePlacement
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.ops.reference.index_keys import split_index_blocks, unpack_index_keys
from cpkv.ops.reference.latent_rows import decode_latent_rows, torch_dtype
from cpkv.pool.page_pool import PagePool
from cpkv.protocol import messages as m
from cpkv.protocol.arrivals import Arrivals


@dataclass
class DecodeRequest:
    """One request. `tokens` holds what was decoded, the first token from the prefill included."""

    opened: m.OpenTransfer
    arrivals: Arrivals
    pages: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)

    @property
    def stored_tokens(self) -> int:
        """Tokens whose rows lie in the pool: the prompt, and every decoded token that was fed back."""
        return self.opened.prompt_tokens + max(0, len(self.tokens) - 1)


class DecodeRequests:
    """Requests, pages and decoding of one decode worker."""

    def __init__(
        self, forward: ForwardPass, allocator: PageAllocator, placement: PagePlacement, *, poison: bool = False
    ) -> None:
        self._forward = forward
        self._pool: PagePool = forward.pool
        self._allocator = allocator
        self._placement = placement
        self._poison = poison
        self._requests: dict[str, DecodeRequest] = {}
        self._steps = 0
        self.trace_folder = ""
        self._handlers: dict[type, Callable[[Any], Any]] = {
            m.OpenTransfer: self._open,
            m.PagesSent: self._pages_sent,
            m.FinishTransfer: self._finish,
            m.AbortTransfer: self._abort,
            m.DecodeStep: self._step,
            m.ReleaseRequest: self._release,
        }

    def handle(self, message: Any, sender: m.SenderDescription) -> Any:
        """Act on a message of a connection whose handshake said who is there, and return the answer.

        Raises:
            CpkvError: whatever is wrong with it; nothing has changed then.
        """
        if isinstance(message, m.PagesSent) and message.rank != sender.rank:
            raise ProtocolError(f"rank {sender.rank} reports pages as rank {message.rank}")
        return self._handlers[type(message)](message)

    def _request(self, request_id: str) -> DecodeRequest:
        if request_id not in self._requests:
            raise ProtocolError(f"request {request_id} is not open here; it was released, aborted or never opened")
        return self._requests[request_id]

    def _open(self, message: m.OpenTransfer) -> m.TransferOpened:
        if len(message.request_id) > m.MAX_REQUEST_ID_CHARS:
            raise ProtocolError(
                f"a request id of {len(message.request_id)} characters; {m.MAX_REQUEST_ID_CHARS} at most"
            )
        if message.request_id in self._requests:
            raise ProtocolError(f"request {message.request_id} is open already; use an id once")
        if message.prompt_tokens < 1 or message.max_new_tokens < 1:
            raise PromptError(
                f"request {message.request_id} has {message.prompt_tokens} prompt tokens and {message.max_new_tokens} "
                "to decode; both must be 1 or more"
            )
        prompt_pages = self._placement.pages_for(message.prompt_tokens)
        if len(message.senders) != prompt_pages:
            raise ProtocolError(
                f"request {message.request_id}: {message.prompt_tokens} tokens are {prompt_pages} pages, and "
                f"{len(message.senders)} senders are named"
            )
        check_sampling(message.sampling)
        tokens = message.prompt_tokens + message.max_new_tokens
        pages = self._allocator.allocate(message.request_id, self._placement.pages_for(tokens))
        local_pages = tuple(self._placement.local_page(page) for page in pages)
        if self._poison:
            self._pool.poison(list(local_pages))
        arrivals = Arrivals(message.request_id, message.attempt, message.senders)
        self._requests[message.request_id] = DecodeRequest(message, arrivals, pages)
        return m.TransferOpened(message.request_id, message.attempt, local_pages[:prompt_pages])

    def _pages_sent(self, message: m.PagesSent) -> m.Done:
        request = self._request(message.request_id)
        request.arrivals.check(message.attempt, message.rank, message.positions)
        for position, digest in zip(message.positions, message.digests, strict=False):
            arrived = self._pool.page_digest(self._placement.local_page(request.pages[position]))
            if arrived != digest:
                raise TransferError(
                    f"request {message.request_id}: page position {position} of rank {message.rank} left with digest "
                    f"{digest[:12]} and arrived with {arrived[:12]}"
                )
        request.arrivals.record(message.attempt, message.rank, message.positions)
        return m.Done()

    def _finish(self, message: m.FinishTransfer) -> m.TransferComplete:
        request = self._request(message.request_id)
        request.arrivals.check_complete(message.attempt)
        if request.tokens:
            raise ProtocolError(f"request {message.request_id} was finished before")
        vocab_size = self._forward.model.shape.vocab_size
        if not 0 <= message.first_token < vocab_size:
            raise ProtocolError(
                f"request {message.request_id} starts from token {message.first_token}, and the model knows 0 to "
                f"{vocab_size - 1}"
            )
        request.tokens.append(message.first_token)
        return m.TransferComplete(message.request_id, message.attempt)

    def _abort(self, message: m.AbortTransfer) -> m.Done:
        request = self._request(message.request_id)
        request.arrivals.check_attempt(message.attempt)
        if request.tokens:
            raise ProtocolError(f"request {message.request_id} has been handed over; release it instead")
        del self._requests[message.request_id]
        if message.writes_may_land:
            self._allocator.quarantine(message.request_id)
        else:
            self._allocator.free(message.request_id)
        return m.Done()

    def _release(self, message: m.ReleaseRequest) -> m.Done:
        request = self._request(message.request_id)
        if not request.tokens:
            raise ProtocolError(f"request {message.request_id} is still being transferred; abort it instead")
        del self._requests[message.request_id]
        self._allocator.free(message.request_id)
        if self._poison:
            self._pool.poison([self._placement.local_page(page) for page in request.pages])
        self._allocator.check()
        return m.Done()

    def _step(self, message: m.DecodeStep) -> m.DecodedTokens:
        if not message.request_ids or len(set(message.request_ids)) < len(message.request_ids):
            raise ProtocolError("a decode step names each request once, and at least one")
        requests = [self._request(request_id) for request_id in message.request_ids]
        for request in requests:
            if not request.tokens:
                raise ProtocolError(f"request {request.opened.request_id} is not complete; finish its transfer first")
            if len(request.tokens) >= request.opened.max_new_tokens:
                raise ProtocolError(f"request {request.opened.request_id} has all its {len(request.tokens)} tokens")
        segments = tuple(
            Segment(
                request_id=request.opened.request_id,
                start=request.stored_tokens,
                token_ids=(request.tokens[-1],),
                pages=request.pages,
                is_last=True,
            )
            for request in requests
        )
        plan = BatchPlan.build(BatchSpec(self._steps, segments, "interleave", "replicated"), self._placement, 1)
        trace = BatchTrace(want_choices=True) if self.trace_folder else None
        logits = self._forward.run(plan, trace).last_logits
        if trace is not None:
            choices = {f"choices.{layer}": chosen.to(torch.int32) for layer, chosen in trace.choices.items()}
            names = msgspec.json.encode(message.request_ids).decode()
            save_file(
                choices, Path(self.trace_folder) / f"decode{self._steps}.safetensors", metadata={"requests": names}
            )
        self._steps += 1
        drawn = [
            sample_token(logits[request.opened.request_id], request.opened.sampling, len(request.tokens))
            for request in requests
        ]
        for request, token in zip(requests, drawn, strict=True):
            request.tokens.append(token)
        return m.DecodedTokens(
            tuple(drawn), tuple(tensor_bytes(logits[request_id]) for request_id in message.request_ids)
        )

    def row_digest(self, request_id: str) -> str:
        """SHA-256 over a request's stored rows in position order; what nobody wrote does not count."""
        request = self._request(request_id)
        geometry = self._pool.geometry
        digest = hashlib.sha256()
        for position in range(self._placement.pages_for(request.stored_tokens)):
            tokens = min(geometry.page_size, request.stored_tokens - position * geometry.page_size)
            local_page = self._placement.local_page(request.pages[position])
            digest.update(tensor_bytes(self._pool.latent[local_page, :, :tokens]))
            for slot in range(geometry.num_slots):
                keys = unpack_index_keys(
                    self._pool.index[local_page],
                    torch.tensor([slot]),
                    tokens=tokens,
                    page_size=geometry.page_size,
                    key_bytes=geometry.row_format.index_key_bytes,
                )
                digest.update(tensor_bytes(keys))
        return digest.hexdigest()

    def dump(self, path: Path) -> None:
        """Write the pool and the page table: `latent` [page, layer, offset, value], index keys by page and slot."""
        geometry, row_format = self._pool.geometry, self._pool.geometry.row_format
        tensors = {"latent": decode_latent_rows(self._pool.latent, row_format, self._forward.model.compute_dtype)}
        keys, scales = split_index_blocks(
            self._pool.index.flatten(0, 1), geometry.page_size, row_format.index_key_bytes
        )
        dtype = torch.float8_e4m3fn if row_format.index_dtype == "fp8" else torch_dtype(row_format.index_dtype)
        shape = (self._pool.local_pages, geometry.num_slots, geometry.page_size, -1)
        tensors["index_keys"] = keys.contiguous().view(dtype).view(shape)
        if row_format.index_dtype == "fp8":
            tensors["index_scales"] = scales.contiguous().view(torch.float32).view(shape[:3])
        for request_id, request in self._requests.items():
            pages = [self._placement.local_page(page) for page in request.pages]
            tensors[f"page_table.{request_id}"] = torch.tensor(pages)
            tensors[f"stored_tokens.{request_id}"] = torch.tensor(request.stored_tokens)
        layout = {
            "latent": f"[page, layer, offset, {row_format.kv_lora_rank} latent + {row_format.rope_dim} rope values]",
            "index_keys": "[page, index slot, offset, value]; fp8 keys are to be multiplied by their index_scales",
            "index_slot_of_layer": ",".join(map(str, geometry.slots)),
        }
        save_file(tensors, path, metadata=layout)
