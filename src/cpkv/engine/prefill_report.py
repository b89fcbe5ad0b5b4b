"""What a prefill run did and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cpkv.errors import CpkvError


@dataclass(frozen=True)
class BatchReport:
    """What one batch cost.

    Attributes:
        view: which view it used.
        reason: why that one.
        tokens: computed, over all requests.
        planned_bytes: that the planner expected page gathers to bring to a rank.
        moved_bytes: that they brought to the rank that got most.
        scratch_bytes: that the rank which held most held beside its pool.
        seconds: of the slowest rank.
        slowest_rank: which one that was.
    """

    view: str
    reason: str
    tokens: int
    planned_bytes: int
    moved_bytes: int
    scratch_bytes: int
    seconds: float
    slowest_rank: int


@dataclass
class PrefillReport:
    """What a prefill run did.

    Attributes:
        last_logits: request -> logits [vocab_size] of its last prompt token.
        first_tokens: request -> the token sampled from them.
        failures: request -> why its transfer failed; other requests went on.
        sent_pages: pages sent by rank.
        sent_bytes: bytes sent by rank.
        batches: what each batch cost, in order.
        compute_seconds: spent in batches.
        transfer_seconds: spent waiting for transfers, while nothing was computed.
    """

    last_logits: dict[str, torch.Tensor] = field(default_factory=dict)
    first_tokens: dict[str, int] = field(default_factory=dict)
    failures: dict[str, CpkvError] = field(default_factory=dict)
    sent_pages: list[int] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    batches: list[BatchReport] = field(default_factory=list)
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
