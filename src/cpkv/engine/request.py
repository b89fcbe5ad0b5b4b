"""A request as a client gives it, and its checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpkv.config.settings import EngineSettings
from cpkv.engine.sampling import check_sampling
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


def check_request(request: Request, shape: ModelShape, settings: EngineSettings) -> None:
    """Refuse a request that cannot be served.

    Args:
        request: the request.
        shape: the model.
        settings: of the prefill group; both kinds of pool hold the same tokens.

    Raises:
        ConfigError: a temperature, top_p or seed that nothing can be drawn with.
        PromptError: an empty prompt, one that is too long, a token that the model does not have.
    """
    name, tokens = request.request_id, len(request.token_ids)
    if tokens == 0:
        raise PromptError(f"request {name} has an empty prompt; give at least one token")
    if request.max_new_tokens < 1:
        raise PromptError(f"request {name} asks for {request.max_new_tokens} new tokens; ask for 1 or more")
    check_sampling(request.sampling)
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
    cp_size, page_size = settings.cp_size, settings.page_size
    needed, held = -(-tokens // page_size), settings.num_pages - cp_size
    if needed > held:
        raise PromptError(
            f"request {name} has {tokens} tokens and needs {needed} pages, and the prefill pool holds {held} "
            f"({settings.num_pages} less {cp_size} reserved); raise --num-pages to "
            f"{-(-(needed + cp_size) // cp_size) * cp_size}, or shorten the prompt to {held * page_size} tokens"
        )
