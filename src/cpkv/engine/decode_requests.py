"""What the decode worker knows of its requests, and how it answers each message. One thread owns it.

transfer messages -> PageReceiver (pages, arrivals, quarantine)
DecodeStep        -> the forward pass over the pages of complete requests -> one token each
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from cpkv.engine.forward import BatchTrace, ForwardPass
from cpkv.engine.sampling import check_sampling, sample_token
from cpkv.engine.tensors import tensor_bytes
from cpkv.errors import ProtocolError
from cpkv.layout.plan import BatchPlan, BatchSpec, Segment
from cpkv.ops.reference.index_keys import split_index_blocks, unpack_index_keys
from cpkv.ops.reference.latent_rows import decode_latent_rows, torch_dtype
from cpkv.pool.page_pool import PagePool
from cpkv.protocol import messages as m
from cpkv.protocol.receiver import Incoming
from cpkv.transfer.page_receiver import PageReceiver


@dataclass
class DecodeRequest:
    """A request that is being decoded. `tokens` holds what was decoded, the first token from the prefill included."""

    incoming: Incoming
    tokens: list[int]

    @property
    def request_id(self) -> str:
        """The request."""
        return self.incoming.opened.request_id

    @property
    def stored_tokens(self) -> int:
        """Tokens whose rows lie in the pool: the prompt, and every decoded token that was fed back."""
        return self.incoming.opened.prompt_tokens + len(self.tokens) - 1


class DecodeRequests:
    """Requests, pages and decoding of one decode worker.

    Args:
        forward: the model over the worker's pool.
        receiver: takes pages into `arrives`.
        arrives: where pages arrive: that pool, or its like in memory of the host where the pool is on a GPU.
    """

    def __init__(self, forward: ForwardPass, receiver: PageReceiver, arrives: PagePool) -> None:
        self._forward = forward
        self._pool: PagePool = forward.pool
        self._arrives = arrives
        self._receiver = receiver
        self._placement = receiver.allocator.placement
        self._decoding: dict[str, DecodeRequest] = {}
        self._steps = 0
        self.trace_folder = ""

    def handle(self, message: Any, sender: m.SenderDescription) -> Any:
        """Act on a message of a connection whose handshake said who is there, and return the answer.

        Raises:
            CpkvError: whatever is wrong with it; nothing has changed then.
        """
        if isinstance(message, m.DecodeStep):
            self._receiver.heard(sender)
            return self._step(message)
        if isinstance(message, m.RowDigest):
            self._receiver.heard(sender)
            return m.RowDigestIs(self.row_digest(message.request_id))
        if isinstance(message, m.OpenTransfer):
            check_sampling(message.sampling)
        return self._receiver.handle(message, sender)

    def tick(self, now: float) -> None:
        """Give up what stalled or belongs to a prefill that is gone."""
        self._receiver.tick(now)
        for name, request in list(self._decoding.items()):
            if self._receiver.requests.get(name) is not request.incoming:
                del self._decoding[name]

    def _request(self, request_id: str) -> DecodeRequest:
        """A complete request and its tokens so far.

        Raises:
            ProtocolError: there is none.
        """
        incoming = self._receiver.complete(request_id)
        request = self._decoding.get(request_id)
        # An id may come again, once the request that had it has ended.
        if request is None or request.incoming is not incoming:
            assert incoming.first_token is not None
            if self._arrives is not self._pool:
                prompt = incoming.pages[: self._placement.pages_for(incoming.opened.prompt_tokens)]
                self._pool.copy_pages(self._arrives, [self._placement.local_page(page) for page in prompt])
            request = self._decoding[request_id] = DecodeRequest(incoming, [incoming.first_token])
        return request

    def _step(self, message: m.DecodeStep) -> m.DecodedTokens:
        if not message.request_ids or len(set(message.request_ids)) < len(message.request_ids):
            raise ProtocolError("a decode step names each request once, and at least one")
        requests = [self._request(request_id) for request_id in message.request_ids]
        for request in requests:
            if len(request.tokens) >= request.incoming.opened.max_new_tokens:
                raise ProtocolError(f"request {request.request_id} has all its {len(request.tokens)} tokens")
        segments = tuple(
            Segment(
                request_id=request.request_id,
                start=request.stored_tokens,
                token_ids=(request.tokens[-1],),
                pages=request.incoming.pages,
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
            sample_token(logits[request.request_id], request.incoming.opened.sampling, len(request.tokens))
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
            local_page = self._placement.local_page(request.incoming.pages[position])
            digest.update(tensor_bytes(self._pool.latent[local_page, :, :tokens].cpu()))
            for slot in range(geometry.num_slots):
                keys = unpack_index_keys(
                    self._pool.index[local_page].cpu(),
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
        tensors = {"latent": decode_latent_rows(self._pool.latent.cpu(), row_format, self._forward.model.compute_dtype)}
        keys, scales = split_index_blocks(
            self._pool.index.cpu().flatten(0, 1), geometry.page_size, row_format.index_key_bytes
        )
        dtype = torch.float8_e4m3fn if row_format.index_dtype == "fp8" else torch_dtype(row_format.index_dtype)
        shape = (self._pool.local_pages, geometry.num_slots, geometry.page_size, -1)
        tensors["index_keys"] = keys.contiguous().view(dtype).view(shape)
        if row_format.index_dtype == "fp8":
            tensors["index_scales"] = scales.contiguous().view(torch.float32).view(shape[:3])
        for request_id, incoming in self._receiver.requests.items():
            if incoming.first_token is None:
                continue
            request = self._request(request_id)
            pages = [self._placement.local_page(page) for page in incoming.pages]
            tensors[f"page_table.{request_id}"] = torch.tensor(pages)
            tensors[f"stored_tokens.{request_id}"] = torch.tensor(request.stored_tokens)
        layout = {
            "latent": f"[page, layer, offset, {row_format.kv_lora_rank} latent + {row_format.rope_dim} rope values]",
            "index_keys": "[page, index slot, offset, value]; fp8 keys are to be multiplied by their index_scales",
            "index_slot_of_layer": ",".join(map(str, geometry.slots)),
        }
        save_file(tensors, path, metadata=layout)
