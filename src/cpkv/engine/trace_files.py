"""Reads back what batches and decode steps left in a trace folder, by request and position.

batch0-rank0.safetensors   positions, segments, logits, choices.<layer>    of the tokens that rank 0 computed
decode0.safetensors        choices.<layer>                                 one row a request of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from cpkv.errors import PlanError


@dataclass
class RequestTrace:
    """What was kept of one request.

    Attributes:
        logits: [prompt tokens, vocab_size], or None when not asked for.
        choices: layer -> int32 [prompt tokens + decoded tokens - 1, topk], -1 padded.
    """

    logits: torch.Tensor | None = None
    choices: dict[int, torch.Tensor] = field(default_factory=dict)


def read_trace(folder: Path, request_id: str, prompt_tokens: int) -> RequestTrace:
    """Put together one request's trace.

    Raises:
        PlanError: a prompt position was computed by no rank, or by two.
    """
    rows: dict[str, dict[int, torch.Tensor]] = {}
    for path in sorted(folder.glob("batch*.safetensors")):
        with safe_open(path, framework="pt") as file:
            requests: Sequence[str] = msgspec.json.decode(file.metadata()["requests"])
            if request_id not in requests:
                continue
            own = file.get_tensor("segments") == requests.index(request_id)
            positions = file.get_tensor("positions")[own].tolist()
            for name in set(file.keys()) - {"positions", "segments"}:
                for position, row in zip(positions, file.get_tensor(name)[own], strict=True):
                    if rows.setdefault(name, {}).setdefault(position, row) is not row:
                        raise PlanError(f"request {request_id}: position {position} was computed twice")
    for name, by_position in rows.items():
        if sorted(by_position) != list(range(prompt_tokens)):
            raise PlanError(f"request {request_id}: {name} of {prompt_tokens - len(by_position)} positions is missing")
    steps = sorted(folder.glob("decode*.safetensors"), key=lambda path: int(path.stem.removeprefix("decode")))
    for path in steps:
        with safe_open(path, framework="pt") as file:
            requests = msgspec.json.decode(file.metadata()["requests"])
            if request_id in requests:
                for name in file.keys():
                    by_position = rows.setdefault(name, {})
                    by_position[len(by_position)] = file.get_tensor(name)[requests.index(request_id)]
    stacked = {
        name: torch.stack([by_position[key] for key in sorted(by_position)]) for name, by_position in rows.items()
    }
    choices = {int(name.removeprefix("choices.")): value for name, value in stacked.items() if name != "logits"}
    return RequestTrace(stacked.get("logits"), dict(sorted(choices.items())))
