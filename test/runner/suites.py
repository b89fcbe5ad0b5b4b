"""The suites: one per folder of `test/registered/`."""

from __future__ import annotations

from dataclasses import dataclass

HARDWARE = ("cpu", "cuda", "amd", "npu")


@dataclass(frozen=True)
class Suite:
    """A folder of `test/registered/` and how its files may run beside others.

    `workers`: a test starts processes of its own, each with one thread, and may take a minute. Files whose tests keep
    to one process have a core of their own instead. `slow`: a test may take a minute. `exclusive`: a file runs alone
    with all cores, since it measures.
    """

    name: str
    what: str
    workers: bool = False
    exclusive: bool = False
    slow: bool = False

    @property
    def seconds_per_test(self) -> float:
        """The longest that one test of this suite should take."""
        return 60.0 if self.workers or self.exclusive or self.slow else 20.0


SUITES = {
    suite.name: suite
    for suite in (
        Suite("unit", "a component alone"),
        Suite("kernels", "kernel correctness against the reference"),
        Suite("models", "a model's correctness, on up to two GPUs", slow=True),
        Suite("4-gpu-models", "a model's correctness on four GPUs", workers=True),
        Suite("8-gpu-models", "a model's correctness on eight GPUs", workers=True),
        Suite("openai_server", "the HTTP server with running workers", workers=True),
        Suite("distributed", "ranks as processes", workers=True),
        Suite("transfer", "prefill and decode workers that send pages", workers=True),
        Suite("spec", "speculative decoding with running workers", workers=True),
        Suite("benchmark", "speed, accuracy, stress", exclusive=True),
        Suite("amd", "what only an AMD device has", workers=True),
        Suite("ascend", "what only an Ascend device has", workers=True),
    )
}
