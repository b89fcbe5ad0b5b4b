"""A request as a client gives it, and its checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpkv.errors import PromptError
from cpkv.model.shape import ModelShape
from cpkv.protocol.messages import Sampling


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        request_id: unique among requests that are open.
        token_ids: the prompt.
        max_new_tokens: tokens to decode, the first one (sampled by the prefill) included.
        sampling: how tokens are drawn.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)


def check_request(request: Request, shape: ModelShape, capacity_tokens: int) -> None:
    """Refuse a request that cannot be served.

    Args:
        request: the request.
        shape: the model.
        capacity_tokens: tokens that the whole prefill pool holds.

    Raises:
        PromptError: an empty prompt, one that is too long, a token that the model does not have.
    """
    name, tokens = request.request_id, len(request.token_ids)
    if tokens == 0:
        raise PromptError(f"request {name} has an empty prompt; give at least one token")
    if request.max_new_tokens < 1:
        raise PromptError(f"request {name} asks for {request.max_new_tokens} new tokens; ask for 1 or more")
    low, high = min(request.token_ids), max(request.token_ids)
    if low < 0 or high >= shape.vocab_size:
        wrong = low if low < 0 else high
        raise PromptError(
            f"request {name} holds token id {wrong}, and the model knows 0 to {shape.vocab_size - 1}; "
            "use the tokenizer of the checkpoint"
        )
    if tokens + request.max_new_tokens > shape.max_positions:
        raise PromptError(
            f"request {name} has {tokens} + {request.max_new_tokens} tokens, and the model knows "
            f"{shape.max_positions} positions; shorten the prompt to {shape.max_positions - request.max_new_tokens}"
        )
    if tokens > capacity_tokens:
        raise PromptError(
            f"request {name} has {tokens} tokens and the prefill pool holds {capacity_tokens}; "
            "raise --num-pages, or shorten the prompt"
        )
