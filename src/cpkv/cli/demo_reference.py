"""The demo's independent reference: transformers in float32, our own float64 implementation in float64.

Random weights have near-ties among scores, which another order of additions decides otherwise; there transformers is
given the positions that the engine chose, so that the logits compare. The recall model's margins need no such help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from cpkv.engine.generation import GenerationResult
from cpkv.engine.request import Request
from cpkv.engine.trace_files import read_trace

FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-4
DECIDED_MARGIN = 1e-2
REFERENCE_CHUNK = 256


@dataclass(frozen=True)
class Reference:
    """What the reference says.

    Attributes:
        tokens: per request, its greedy tokens.
        max_logit_diff: over the last prompt token and each decoded one but the last, of all requests.
        decided_differently: per request, output positions where the tokens differ although the reference's two best
            logits are more than `DECIDED_MARGIN` apart.
        tolerance: what `max_logit_diff` may be.
        name: which implementation.
    """

    tokens: list[list[int]]
    max_logit_diff: float
    decided_differently: list[list[int]]
    tolerance: float
    name: str


def compare_with_reference(
    checkpoint: Path,
    dtype: str,
    requests: tuple[Request, ...],
    result: GenerationResult,
    trace_folder: Path | None,
) -> Reference:
    """Run the reference over prompts and decoded tokens, and compare logits and tokens.

    Args:
        checkpoint: the model.
        dtype: "float32" or "float64".
        requests: what was asked.
        result: what the engine said.
        trace_folder: the engine's choices, to be replayed; None lets the reference choose.
    """
    tokens, largest, decided = [], 0.0, []
    run = _float64_logits if dtype == "float64" else _float32_logits
    for request in requests:
        ours = result.tokens[request.request_id]
        logits = run(checkpoint, request, ours, trace_folder)
        greedy = logits.argmax(dim=-1).tolist()
        best = logits.topk(2, dim=-1).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        tokens.append(greedy)
        decided.append(
            [
                number
                for number, (token, margin) in enumerate(zip(greedy, margins, strict=True))
                if token != ours[number] and margin > DECIDED_MARGIN
            ]
        )
        difference = (logits - result.logits[request.request_id]).abs().max()
        # A NaN would lose every comparison.
        largest = max(largest, float(difference) if math.isfinite(difference) else math.inf)
    return Reference(
        tokens=tokens,
        max_logit_diff=largest,
        decided_differently=decided,
        tolerance=FLOAT64_TOLERANCE if dtype == "float64" else FLOAT32_TOLERANCE,
        name="the float64 reference" if dtype == "float64" else "transformers",
    )


def _float64_logits(checkpoint: Path, request: Request, tokens: list[int], trace_folder: Path | None) -> torch.Tensor:
    from cpkv.testing.reference import ReferenceModel

    ids = [*request.token_ids, *tokens[:-1]]
    logits = ReferenceModel(checkpoint).forward(ids).logits
    return logits[len(request.token_ids) - 1 :]


def _float32_logits(checkpoint: Path, request: Request, tokens: list[int], trace_folder: Path | None) -> torch.Tensor:
    from cpkv.testing.oracle import TransformersOracle

    ids = [*request.token_ids, *tokens[:-1]]
    oracle = TransformersOracle(checkpoint)
    replay = None
    if trace_folder is not None:
        choices = read_trace(trace_folder, request.request_id, len(request.token_ids)).choices
        layers = oracle.model.config.num_hidden_layers
        replay = [choices.get(layer, next(iter(choices.values()))) for layer in range(layers)]
    logits = oracle.forward(ids, REFERENCE_CHUNK, replay=replay)
    return logits[len(request.token_ids) - 1 :]
