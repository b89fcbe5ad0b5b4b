"""What the demo found, as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from cpkv.cache.capacity import allocatable_tokens, capacity_ratio
from cpkv.cli.demo_inputs import DemoInputs
from cpkv.cli.demo_options import DemoOptions
from cpkv.cli.demo_reference import Reference
from cpkv.engine.generation import GenerationResult
from cpkv.layout.placement import PagePlacement

MIB = 1 << 20


@dataclass
class DemoReport:
    """The runs and everything that follows from them."""

    options: DemoOptions
    inputs: DemoInputs
    shared: GenerationResult
    replicated: GenerationResult
    reference: Reference | None
    start_seconds: float
    total_seconds: float

    @property
    def names(self) -> list[str]:
        """Request ids in order."""
        return [request.request_id for request in self.inputs.requests]

    @property
    def recall_asked(self) -> int:
        """Answers that the recall model must give, over all requests."""
        return sum(len(answers) for answers in self.inputs.answers)

    @property
    def recall_right(self) -> int:
        """Answers that it gave."""
        return sum(
            answer == token
            for name, answers in zip(self.names, self.inputs.answers, strict=False)
            for answer, token in zip(answers, self.shared.tokens[name], strict=False)
        )

    @cached_property
    def same_bits(self) -> bool:
        """Shared equals replicated: tokens, logits and decode pool, bit for bit."""
        return self.shared.same_bits(self.replicated)

    @property
    def tokens_equal(self) -> bool:
        """Tokens equal to the replicated run's and, where there is one, to the reference's."""
        ours = [self.shared.tokens[name] for name in self.names]
        same = self.shared.tokens == self.replicated.tokens
        return same and (self.reference is None or ours == self.reference.tokens)

    @cached_property
    def ratio(self) -> float:
        """Allocatable tokens, shared over replicated, for equal bytes on each rank."""
        options = self.options
        assert options.num_pages is not None
        if not options.enable_cp_shared_kv:
            return 1.0
        return capacity_ratio(options.num_pages // options.cp_size, options.page_size, options.cp_size)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that can be allocated in the shared run's pools."""
        options = self.options
        assert options.num_pages is not None
        owners = options.cp_size if options.enable_cp_shared_kv else 1
        return allocatable_tokens(options.num_pages // options.cp_size, PagePlacement(options.page_size, owners))

    @property
    def differences(self) -> list[str]:
        """Why the exit status is 1, in words; empty when all is well."""
        found = []
        if not self.same_bits:
            found.append("the shared run differs from the replicated run in at least one bit")
        if self.recall_right < self.recall_asked:
            found.append(f"the recall model gave {self.recall_right} of {self.recall_asked} answers")
        reference = self.reference
        if reference is not None:
            if not reference.max_logit_diff <= reference.tolerance:
                found.append(
                    f"logits differ from {reference.name} by {reference.max_logit_diff:.3g}, "
                    f"over {reference.tolerance:g}"
                )
            for name, positions in zip(self.names, reference.decided_differently, strict=True):
                if positions:
                    found.append(f"{name}: output tokens {positions} differ from {reference.name} where it is decided")
        return found

    def as_json(self) -> dict[str, Any]:
        """One JSON object; `views`, `sent_*` and `gathered_bytes` are those of the shared run's prefill."""
        counters = self.shared.counters
        reference = self.reference
        return {
            "tokens": [self.shared.tokens[name] for name in self.names],
            "tokens_replicated": [self.replicated.tokens[name] for name in self.names],
            "tokens_reference": reference.tokens if reference else None,
            "tokens_equal": self.tokens_equal,
            "max_logit_diff_reference": reference.max_logit_diff if reference else None,
            "bitwise_equal_replicated": self.same_bits,
            "recall_right": self.recall_right,
            "recall_asked": self.recall_asked,
            "kv_bytes_per_rank": self.shared.kv_bytes_per_rank,
            "kv_bytes_per_rank_replicated": self.replicated.kv_bytes_per_rank,
            "capacity_ratio": self.ratio,
            "scratch_bytes_per_rank": max(counter.scratch_bytes for counter in counters),
            "views": counters[0].batches,
            "gathered_bytes": counters[0].history_bytes,
            "sent_pages_per_rank": self.shared.prefill.sent_pages,
            "sent_bytes_per_rank": self.shared.prefill.sent_bytes,
            "seconds": {
                "start": self.start_seconds,
                "shared": self.shared.seconds,
                "replicated": self.replicated.seconds,
                "total": self.total_seconds,
            },
            "config": msgspec.to_builtins(self.options),
        }


def print_report(report: DemoReport) -> None:
    """The table that people read."""
    table = Table(title=_title(report), show_header=False, title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("value")
    for what, value in _rows(report):
        table.add_row(what, value)
    Console().print(table)


def _title(report: DemoReport) -> str:
    options, requests = report.options, report.inputs.requests
    lengths = ", ".join(str(len(request.token_ids)) for request in requests)
    mode = "one KV copy over the ranks" if options.enable_cp_shared_kv else "no sharing"
    model = options.model or f"{report.inputs.model} model of family {options.model_family}"
    return (
        f"{model}, {options.cp_size} prefill ranks ({options.cp_strategy}, {mode}), 1 decode worker, "
        f"{options.transfer}; prompts of {lengths} tokens"
    )


def _rows(report: DemoReport) -> list[tuple[str, str]]:
    counters = report.shared.counters
    replicated_bytes = report.replicated.kv_bytes_per_rank
    rows = []
    if report.recall_asked:
        rows.append(("answers right", f"{report.recall_right} of {report.recall_asked}"))
    rows.append(("equal to replicated, bit for bit", _yes(report.same_bits) + " (tokens, logits, decode pool)"))
    if report.reference is not None:
        reference = report.reference
        ours = [report.shared.tokens[name] for name in report.names]
        rows.append((f"tokens equal to {reference.name}", _yes(ours == reference.tokens)))
        rows.append(("largest logit difference", f"{reference.max_logit_diff:.2e} (allowed {reference.tolerance:g})"))
    else:
        rows.append(("reference", "none: in bfloat16 and with fp8 no other implementation rounds alike"))
    views = ", ".join(f"{view}: {count}" for view, count in counters[0].batches.items())
    rows += [
        ("KV bytes per rank", f"{_mib(report.shared.kv_bytes_per_rank)} shared, {_mib(replicated_bytes)} replicated"),
        ("capacity for these bytes", f"{report.capacity_tokens} tokens, {report.ratio:g} x those of a replicated pool"),
        ("scratch per rank, peak", _mib(max(counter.scratch_bytes for counter in counters))),
        ("batches by view", views),
        ("history gathered per rank", _mib(counters[0].history_bytes)),
        ("pages sent by rank", ", ".join(map(str, report.shared.prefill.sent_pages))),
        ("bytes sent by rank", ", ".join(_mib(sent) for sent in report.shared.prefill.sent_bytes)),
        ("seconds, shared run", _seconds(report.shared.seconds)),
        ("seconds, replicated run", _seconds(report.replicated.seconds)),
        ("seconds in all", f"{report.total_seconds:.1f} (start {report.start_seconds:.1f})"),
    ]
    return rows


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.2f} MiB"


def _seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
