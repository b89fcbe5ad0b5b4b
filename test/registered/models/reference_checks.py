"""How a prefill is compared with the float64 reference, and in float32 with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from covering import PAGE, Case
from torch.overrides import TorchFunctionMode

from cpkv.config.names import LatentDtype
from cpkv.model.dsa_model import DsaModel
from cpkv.testing.checkpoints import TinyShape
from cpkv.testing.oracle import TransformersOracle
from cpkv.testing.ranks import PrefillTrace, ThreadedRanks
from cpkv.testing.reference import ReferenceResult

FLOAT64_TOLERANCE = 1e-9
# float32: of the logits' deviation where the chosen sets are equal, absolute where they are replayed.
SAME_SETS_TOLERANCE = 5e-5
REPLAYED_TOLERANCE = 1e-4
SCORE_TOLERANCE = 1e-5
DECIDED_MARGIN = 1e-2
FUTURE = -1e30
# Near-ties are decided otherwise now and then in longer prompts and with fewer heads.
SAME_SETS_TOKENS, SAME_SETS_HEADS = 1000, 16


def pages_of(lengths: Sequence[int], page_size: int, cp_size: int) -> int:
    """Logical pages that hold prompts of these lengths, reserved ones included, a multiple of cp_size."""
    pages = sum(-(-length // page_size) for length in lengths)
    return (-(-pages // cp_size) + 1) * cp_size


def sets_must_be_equal(case: Case) -> bool:
    """Whether float32 leaves no near-tie: a prompt that is not long, and enough index heads."""
    return case.tokens <= SAME_SETS_TOKENS and case.index_heads >= SAME_SETS_HEADS


def prefill_case(case: Case, model: DsaModel, prompt: list[int], dtype: LatentDtype) -> PrefillTrace:
    """Run one case on a shared pool, as request "r"; the ranks' collectives must be equal."""
    ranks = ThreadedRanks(
        model,
        model.shape.geometry(PAGE, dtype, dtype),
        cp_size=case.cp_size,
        shared=True,
        num_pages=pages_of([len(prompt)], PAGE, case.cp_size),
    )
    trace = ranks.prefill({"r": prompt}, chunk_size=case.chunk_size, strategy=case.strategy)  # type: ignore[arg-type]
    assert_same_collectives(ranks)
    return trace


def assert_same_collectives(ranks: ThreadedRanks) -> None:
    """Every rank took part in the same collectives, in the same order, with the same shapes."""
    ahead = [comm.prefetch.sequence for comm in ranks.comms]
    for what, sequences in (("collectives", ranks.sequences), ("prefetches", ahead)):
        for rank, sequence in enumerate(sequences):
            assert sequence == sequences[0], f"the {what} of rank {rank} differ from those of rank 0"


def choice_rows(trace: PrefillTrace, name: str, layer: int, width: int) -> torch.Tensor:
    """A layer's choices in the form that both references use: [tokens, width] sorted, -1 first."""
    chosen = trace.choices[name][layer].sort(dim=-1).values
    assert bool((chosen[:, : chosen.shape[1] - width] == -1).all()), f"layer {layer}: more than {width} keys chosen"
    return chosen[:, chosen.shape[1] - width :]


def assert_same_sets(ours: torch.Tensor, theirs: torch.Tensor, layer: int) -> None:
    """Chosen sets [tokens, width], both sorted."""
    wrong = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, f"layer {layer}: {len(wrong)} of {len(theirs)} chosen sets differ, at positions {wrong[:5]}"


def check_float64(ours: PrefillTrace, name: str, theirs: ReferenceResult) -> None:
    """One request, at every position and in every layer: sets equal, logits within 1e-9, tokens equal."""
    for layer in ours.choices[name]:
        expected = theirs.indices[layer].long()
        assert_same_sets(choice_rows(ours, name, layer, expected.shape[1]), expected, layer)
    difference = float((ours.logits[name] - theirs.logits).abs().max())
    print(f"logits {difference:.2e}")
    assert difference <= FLOAT64_TOLERANCE, f"logits differ by {difference:.3g}"
    assert torch.equal(ours.logits[name].argmax(-1), theirs.logits.argmax(-1)), "greedy tokens differ"
    last = float((ours.last_logits[name] - theirs.logits[-1]).abs().max())
    assert last <= FLOAT64_TOLERANCE, f"the reported last logits differ by {last:.3g}"


class ChoiceRule(TorchFunctionMode):
    """Sees every score row that an indexer of transformers chooses from, and holds the engine's choice against it.

    Every chosen score must be at least the k-th best less `SCORE_TOLERANCE`, and whatever is better than the k-th best
    by more than that must be chosen.

    Args:
        choices: the engine's, per layer, [tokens, width] with -1 for none.
    """

    def __init__(self, choices: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._choices = choices
        self._layer = 0
        self._done = [0] * len(choices)
        self.largest_miss = 0.0

    @contextmanager
    def around(self, layer: int) -> Iterator[None]:
        """While a layer's indexer runs."""
        self._layer = layer
        with self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at the scores of a top-k; change nothing."""
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            self._check(args[0][0], result.values[0])
        return result

    def _check(self, scores: torch.Tensor, best: torch.Tensor) -> None:
        layer, first = self._layer, self._done[self._layer]
        self._done[layer] = last = first + len(scores)
        chosen = self._choices[layer][first:last].long()
        taken = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool)
        taken = taken.scatter(1, chosen % (scores.shape[1] + 1), True)[:, :-1]
        # The future scores -inf, or the smallest float where the mask was added. A query that sees fewer than k keys
        # takes them all.
        seen, kth = scores > FUTURE, best.amin(-1, keepdim=True)
        assert not bool((taken & ~seen).any()), f"layer {layer}: a key of the future was chosen"
        wanted = seen.sum(1).clamp(max=best.shape[1])
        assert torch.equal(taken.sum(1), wanted), f"layer {layer}: a query chose too few keys"
        too_low = (kth - scores).masked_fill(~(taken & seen), 0).amax()
        too_high = (scores - kth).masked_fill(taken | ~seen, 0).amax()
        miss = max(float(too_low), float(too_high))
        self.largest_miss = max(self.largest_miss, miss)
        assert miss <= SCORE_TOLERANCE, f"layer {layer}: a choice misses the best keys by a score of {miss:.3g}"

    def check_saw_all(self, tokens: int, layers: Sequence[int]) -> None:
        """Fail when an indexer chose without being seen."""
        assert [self._done[layer] for layer in layers] == [tokens] * len(layers)


class RuledOracle:
    """transformers on one checkpoint, whose indexers tell their scores to a `ChoiceRule`."""

    def __init__(self, oracle: TransformersOracle) -> None:
        self._oracle = oracle
        self._rule: ChoiceRule | None = None
        for number, layer in enumerate(oracle.model.model.layers):
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.forward = self._ruled(number, layer.self_attn.indexer.forward)

    def _ruled(self, layer: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def choose(*args: Any, **kwargs: Any) -> torch.Tensor:
            assert self._rule is not None
            with self._rule.around(layer):
                return forward(*args, **kwargs)

        return choose

    def check(self, ours: PrefillTrace, name: str, ids: list[int], *, sets_equal: bool) -> None:
        """One request at every position and in every layer, by the rules for float32.

        Args:
            ours: the engine's prefill.
            name: the request.
            ids: its prompt.
            sets_equal: ask for equal sets; else each choice must be right within a score of 1e-5.
        """
        config = self._oracle.model.config
        width = min(config.index_topk, len(ids))
        replay: list[torch.Tensor] = []
        for layer in range(config.num_hidden_layers):
            own = layer in ours.choices[name]
            replay.append(choice_rows(ours, name, layer, width) if own else replay[-1])
        self._rule = ChoiceRule(replay)
        theirs = self._oracle.trace(ids, chunk_size=128, replay=replay)
        self._rule.check_saw_all(len(ids), list(ours.choices[name]))
        logits, expected = ours.logits[name], theirs.logits
        difference = float((logits - expected).abs().max())
        print(f"logits {difference:.2e} (deviation {float(expected.std()):.2f}), scores {self._rule.largest_miss:.2e}")
        tolerance = REPLAYED_TOLERANCE
        best = expected.topk(2, dim=-1).values
        decided = best[:, 0] - best[:, 1] > DECIDED_MARGIN
        if sets_equal:
            # Where each layer by itself makes the choice that it is given, replaying is running freely.
            for layer in ours.choices[name]:
                assert_same_sets(replay[layer], theirs.indices[layer].long(), layer)
            tolerance = min(tolerance, SAME_SETS_TOLERANCE * float(expected.std()))
            decided = torch.ones_like(decided)
        assert difference <= tolerance, f"logits differ by {difference:.3g}, and {tolerance:.3g} is allowed"
        wrong = ((logits.argmax(-1) != expected.argmax(-1)) & decided).nonzero().flatten().tolist()
        assert not wrong, f"greedy tokens differ at positions {wrong[:5]}"
        last = float((ours.last_logits[name] - expected[-1]).abs().max())
        assert last <= tolerance, f"the reported last logits differ by {last:.3g}"


def check_real_rows(
    hot_model: Callable[..., Any], prompt: Callable[..., Any], oracle: Callable[..., Any], *, tokens: int, topk: int
) -> None:
    """Rows of real size in float32 against transformers, in two chunks; the last queries leave keys out."""
    shape, cp_size, page = replace(TinyShape.real_rows(), index_topk=topk), 3, 64
    _, model = hot_model("deepseek-v32", torch.float32, 4, shape)
    ids = prompt(tokens)
    geometry = model.shape.geometry(page, "float32", "float32")
    pages = pages_of([tokens], page, cp_size)
    ranks = ThreadedRanks(model, geometry, cp_size=cp_size, shared=True, num_pages=pages)
    ours = ranks.prefill({"r": ids}, chunk_size=tokens * 2 // 3, strategy="interleave")
    assert_same_collectives(ranks)
    assert int((ours.choices["r"][0][-1] >= 0).sum()) == topk
    oracle("deepseek-v32", 4, shape).check(ours, "r", ids, sets_equal=False)
