"""Prompts for the constructed recall model: links between tokens, one cycle over all pages.

The vocabulary is two halves of N ids. Token t < N is the name t; token N + t is "the value t", which points to name t.
Token 0 is padding (and what the model says when it finds nothing), token 1 is the end of text and occurs nowhere.

A link k -> v is a key token k at position p - delta and a value token N + v at position p. The links of a prompt are
one cycle k_0 -> k_1 -> ... -> k_{m-1} -> k_0, the last token is k_0, and the model answers a name with the name three
links on. So greedy decoding says k_3, k_6, k_9, ... (indices mod m) and has read every link after m / 3 tokens.

    0 ........ delta ............ 2 delta ..................................... L-1
    | padding  | fillers and keys | fillers, keys, one value in every page      | k_0
                 p - delta  <-----  delta ----->  p

Why the borders lie there: a row finds its own link by looking delta back, so rows before delta find nothing, keys must
lie at delta or later (values at 2 delta or later), and fewer than delta tokens may be generated, since the row delta
after the last prompt token would look like the value of k_0.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from cpkv.errors import ConfigError, PromptError

RECALL_FAMILIES: Final = ("glm5", "glm52", "deepseek-v32")
PAD: Final = 0
EOS: Final = 1
# The model's code holds 1 + 62 * 31 names (recall_model.py). A longer walk than that many links is never asked for.
MAX_NAMES: Final = 1923
_MIN_FILLERS: Final = 16
_MAX_LINKS: Final = MAX_NAMES - 2 - _MIN_FILLERS
_TOKENS_PER_LINK: Final = 16


@dataclass(frozen=True)
class RecallPrompt:
    """A prompt and what the recall model must say after it."""

    token_ids: tuple[int, ...]
    answers: tuple[int, ...]
    """The right greedy tokens in order, min(max_new_tokens, delta - 1) of them."""
    delta: int
    """Tokens between a key and its value; the checkpoint must be written with the same."""
    vocab_size: int
    """Ids the prompt was drawn from; the checkpoint must be written with the same."""


def recall_delta(family: str, prompt_tokens: int) -> int:
    """Distance in tokens between a key and its value: min(100 for DeepSeek or 1,000 for GLM, prompt_tokens // 4).

    GLM's rope turns more slowly (theta 1e6 and more against 1e4), so the same angles need a longer distance.
    """
    if family not in RECALL_FAMILIES:
        raise ConfigError(f"no recall model of family {family!r}: the families are {', '.join(RECALL_FAMILIES)}")
    return min(100 if family == "deepseek-v32" else 1000, prompt_tokens // 4)


def recall_vocab_size(family: str, prompt_tokens: int, page_size: int) -> int:
    """Ids that a prompt of this length needs whatever its delta, so the longest prompt of a batch decides for all.

    Grows by two ids per link, that is per max(page_size, 16) tokens, up to 3,846.
    """
    recall_delta(family, prompt_tokens)
    links = prompt_tokens // max(page_size, _TOKENS_PER_LINK) + 1
    return 2 * (min(links, _MAX_LINKS) + _MIN_FILLERS + 2)


def recall_prompt(
    family: str,
    prompt_tokens: int,
    page_size: int,
    max_new_tokens: int,
    seed: int,
    vocab_size: int | None = None,
    delta: int | None = None,
) -> RecallPrompt | None:
    """A prompt of `prompt_tokens` tokens with one link per max(page_size, 16) tokens from 2 delta on.

    None where no whole page lies between 2 delta and the last token, or delta < 2 leaves nothing to ask.

    Prompts of different lengths share one checkpoint when all are made with one delta and one vocab_size: the delta of
    the shortest, as a longer prompt only gains pages past 2 delta by a smaller one, and the vocab_size of the longest,
    which is enough for every shorter one.

    Beyond about 30,000 tokens in pages of 16 or fewer (120,000 in pages of 64) names run out and a link covers more
    pages. A prompt with one or three links repeats one answer, its last token: too weak a test of anything but poison.
    Raises PromptError where `vocab_size` has too few names for the links, ConfigError for a size out of range.
    """
    if prompt_tokens < 1 or page_size < 1 or max_new_tokens < 0:
        raise ConfigError(
            f"a recall prompt of {prompt_tokens} tokens in pages of {page_size} with {max_new_tokens} new tokens does "
            f"not exist: the first two must be at least 1, the last at least 0"
        )
    delta = recall_delta(family, prompt_tokens) if delta is None else delta
    vocab_size = recall_vocab_size(family, prompt_tokens, page_size) if vocab_size is None else vocab_size
    spans = _link_spans(prompt_tokens, page_size, delta) if delta >= 2 else []
    if not spans:
        return None
    names = vocab_size // 2
    needed = len(spans) + _MIN_FILLERS + 2
    if not needed <= names <= MAX_NAMES:
        raise PromptError(
            f"{len(spans)} links do not fit a vocabulary of {vocab_size}: each takes a name of its own, and the model "
            f"has at most {MAX_NAMES} names; pass vocab_size between {2 * needed} and {2 * MAX_NAMES}"
        )
    rng = random.Random(f"{seed} {prompt_tokens} {page_size} {delta} {vocab_size}")
    shuffled = rng.sample(range(EOS + 1, names), names - 2)
    keys, fillers = shuffled[: len(spans)], shuffled[len(spans) :]
    ids = [PAD] * delta + rng.choices(fillers, k=prompt_tokens - delta)
    places = _value_places(spans, delta, rng)
    rng.shuffle(places)  # neighbours on the cycle lie in pages far apart
    for i, place in enumerate(places):
        ids[place - delta] = keys[i]
        ids[place] = names + keys[(i + 1) % len(keys)]
    ids[-1] = keys[0]
    asked = min(max_new_tokens, delta - 1)
    answers = tuple(keys[3 * (n + 1) % len(keys)] for n in range(asked))
    return RecallPrompt(tuple(ids), answers, delta, vocab_size)


def _link_spans(prompt_tokens: int, page_size: int, delta: int) -> list[range]:
    """The positions among which each link's value may lie: one whole page each (several where pages are small).

    The tail page, cut before the last token, gets a link of its own where pages hold 16 tokens and more: a partly
    filled page is where transfers go wrong. The trailing pages that make no whole span join the last one.
    """
    first = -(-2 * delta // page_size)
    stop = (prompt_tokens - 1) // page_size
    if first >= stop:
        return []
    pages = max(-(-_TOKENS_PER_LINK // page_size), -(-(stop - first) // (_MAX_LINKS - 1)))
    starts = [page * page_size for page in range(first, stop - pages + 1, pages)] or [first * page_size]
    if pages == 1 and stop * page_size < prompt_tokens - 1:
        starts.append(stop * page_size)
    return [range(a, b) for a, b in zip(starts, [*starts[1:], prompt_tokens - 1], strict=True)]


def _value_places(spans: list[range], delta: int, rng: random.Random) -> list[int]:
    """One position per span such that no position is both a key and a value.

    From the last span to the first, so that only keys of later values can bar a place. The last span, which may be a
    tail of one token, meets none; every other has at least 16 places, or is the only one.
    """
    keys: set[int] = set()
    places = []
    for span in reversed(spans):
        place = rng.choice([p for p in span if p not in keys])
        keys.add(place - delta)
        places.append(place)
    return places
