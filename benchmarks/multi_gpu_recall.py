"""Whether the recall model answers right through every view, on the ranks of the benchmark on several cards.

The prompt's links lead over every page behind its first 2 delta tokens (delta is a quarter of the prompt, at most
1,000), and the answers follow each link, so a wrong or stale page shows in an answer. Beyond 120,000 tokens names run
out, and links lead over some of these pages. The pools hold poison before each view, so that no view finds rows that
another one wrote. The first chunk, without history, goes through `current` and the others through the view. The answers
but the last one are given behind the prompt, and the model must say the next one at each of them.

    prompt ................................ k0 | k3  k6  k9  ...
    says                                    k3 | k6  k9  k12 ...
"""

from __future__ import annotations

from pathlib import Path

import torch
from multi_gpu_group import Job, Rank, open_pools
from view_group import PAGE_SIZE

from cpkv.comm.communicator import Communicator
from cpkv.config.settings import EngineSettings
from cpkv.engine.devices import model_kernels
from cpkv.engine.forward import BatchTrace
from cpkv.errors import ConfigError
from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.dsa_model import DsaModel
from cpkv.testing.recall_model import write_recall_checkpoint
from cpkv.testing.recall_prompt import RecallPrompt, recall_prompt

FAMILY = "glm52"
VIEWS = ("replicated", "unified", "mixed", "full", "blocked")
# Of short prompts, which have fewer links than these follow.
FEWEST_ANSWERS = 64
LINKS_PER_ANSWER = 3


def write_recall(folder: Path, prompt_tokens: int) -> RecallPrompt:
    """Make the model's folder, with weights as ranks load them.

    Raises:
        ConfigError: so short a prompt asks nothing.
    """
    # At most one link a page, the one that the last token cuts included.
    following = -(-(prompt_tokens // PAGE_SIZE + 1) // LINKS_PER_ANSWER)
    prompt = recall_prompt(FAMILY, prompt_tokens, PAGE_SIZE, max(FEWEST_ANSWERS, following), seed=3)
    if prompt is None:
        raise ConfigError(f"a recall prompt of {prompt_tokens} tokens asks nothing; give a larger --chunk")
    checkpoint = folder / "recall"
    write_recall_checkpoint(checkpoint, FAMILY, vocab_size=prompt.vocab_size, delta=prompt.delta)
    prepare_weights(checkpoint, checkpoint / "weights.safetensors", torch.bfloat16)
    return prompt


def check_recall(comm: Communicator, device: torch.device, settings: EngineSettings, job: Job) -> dict[str, list[int]]:
    """Of each view: answers that are right, and those asked for."""
    folder = job.folder / "recall"
    model = DsaModel.load(read_config(folder), folder / "weights.safetensors", 1e-6, device)
    kernels = model_kernels(model.shape, settings, device)
    geometry = model.shape.geometry(PAGE_SIZE, job.latent_dtype, "fp8")
    ours = open_pools(comm, model, geometry, kernels, job, len(job.recall))
    found = {}
    try:
        for view in VIEWS:
            found[view] = [right_answers(ours, view), len(job.answers)]
            ours.note(f"recall model, {view}: {found[view][0]} of {found[view][1]} answers right")
    finally:
        ours.close()
    return found


def right_answers(ours: Rank, view: str) -> int:
    """Right answers over all ranks: chunk by chunk, and the next token behind each of the last ones."""
    # The right rows of the view before it would do for a view that writes none.
    pool = ours.pool(view)
    pool.poison(list(range(pool.local_pages)))
    ids, answers, step = ours.job.recall, ours.job.answers, ours.job.chunk
    first_answer = len(ids) - len(answers)
    right, scratch = 0, ours.scratch()
    for first in range(0, len(ids), step):
        chunk, trace = ids[first : first + step], BatchTrace(want_logits=True)
        name = "current" if first == 0 and view != "replicated" else view
        ours.run(name, first, scratch, trace, chunk)
        assert trace.logits is not None
        said = trace.logits.argmax(-1).tolist()
        positions = ours.plan(name, first, chunk).local_tokens(ours.comm.rank).positions.tolist()
        right += sum(
            token == answers[position - first_answer]
            for position, token in zip(positions, said, strict=True)
            if position >= first_answer
        )
    return int(ours.comm.all_gather(torch.tensor([right]), "right answers").sum())
