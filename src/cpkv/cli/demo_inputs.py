"""What the demo serves: a checkpoint and prompts, constructed, random, or the user's own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from cpkv.cli.demo_options import DemoOptions
from cpkv.engine.request import Request
from cpkv.errors import ConfigError, PromptError
from cpkv.model.checkpoint import quiet_transformers, read_config
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.recall_model import write_recall_checkpoint
from cpkv.testing.recall_prompt import recall_delta, recall_prompt, recall_vocab_size


@dataclass(frozen=True)
class DemoInputs:
    """What is served.

    Attributes:
        checkpoint: the model's folder.
        model: "recall", "hot" or "given".
        requests: prompts of different lengths.
        answers: per request what the recall model must say; empty for the other models.
    """

    checkpoint: Path
    model: str
    requests: tuple[Request, ...]
    answers: tuple[tuple[int, ...], ...]


def request_lengths(tokens: int, requests: int) -> list[int]:
    """Prompt lengths from `tokens` down to a little over half of it, all different where the tokens allow it."""
    return [max(1, tokens - number * tokens // (2 * requests)) for number in range(requests)]


def demo_inputs(options: DemoOptions, workspace: Path) -> DemoInputs:
    """Make or find the checkpoint and the prompts.

    Raises:
        CheckpointError: `--model` is no usable checkpoint.
        PromptError: the prompt file is empty or cannot be read.
    """
    if options.model is None and options.prompt_file is None:
        recall = _recall_inputs(options, workspace)
        if recall is not None:
            return recall
    if options.model is not None:
        checkpoint = Path(options.model)
    else:
        checkpoint = write_hot_checkpoint(workspace / "checkpoint", options.model_family, seed=options.seed)
    config = read_config(checkpoint)
    if options.prompt_file is not None:
        text = _file_tokens(Path(options.prompt_file), checkpoint)
        prompts = [text[:length] for length in request_lengths(len(text), options.requests)]
    else:
        rng = random.Random(options.seed)
        lengths = request_lengths(options.prompt_tokens, options.requests)
        prompts = [[rng.randrange(config.vocab_size) for _ in range(length)] for length in lengths]
    return DemoInputs(
        checkpoint,
        "hot" if options.model is None else "given",
        _as_requests([tuple(prompt) for prompt in prompts], options),
        (),
    )


def _as_requests(prompts: list[tuple[int, ...]], options: DemoOptions) -> tuple[Request, ...]:
    return tuple(Request(f"request-{i}", ids, options.max_new_tokens) for i, ids in enumerate(prompts))


def _recall_inputs(options: DemoOptions, workspace: Path) -> DemoInputs | None:
    """The recall model and its prompts; None where some prompt is too short to ask it anything."""
    family = options.model_family
    lengths = request_lengths(options.prompt_tokens, options.requests)
    delta = recall_delta(family, min(lengths))
    vocab_size = recall_vocab_size(family, max(lengths), options.page_size)
    prompts = [
        recall_prompt(
            family,
            length,
            options.page_size,
            options.max_new_tokens,
            options.seed + number,
            vocab_size=vocab_size,
            delta=delta,
        )
        for number, length in enumerate(lengths)
    ]
    made = [prompt for prompt in prompts if prompt is not None]
    if len(made) < len(prompts):
        return None
    checkpoint = workspace / "checkpoint"
    write_recall_checkpoint(checkpoint, family, vocab_size=vocab_size, delta=delta, seed=options.seed)
    requests = _as_requests([prompt.token_ids for prompt in made], options)
    return DemoInputs(checkpoint, "recall", requests, tuple(prompt.answers for prompt in made))


def _file_tokens(path: Path, checkpoint: Path) -> list[int]:
    """A file's tokens by the checkpoint's tokenizer; its bytes where there is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PromptError(f"the prompt file {path} cannot be read: {error}") from error
    if not raw:
        raise PromptError(f"the prompt file {path} is empty; give at least one character")
    if not any((checkpoint / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return list(raw)
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(checkpoint)
            return list(tokenizer.encode(raw.decode("utf-8", errors="replace")))
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"the tokenizer in {checkpoint} could not be loaded: {error}") from error
