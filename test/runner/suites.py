"""The suites: one per folder of `test/registered/`."""

from __future__ import annotations

from dataclasses import dataclass

HARDWARE = ("cpu", "cuda", "amd", "npu")


@dataclass(frozen=True)
class Suite:
    """A folder of `test/registered/` and how its files may run beside others.

    `workers`: a test starts processes of its own, at least as many as there are cores, and watches their time. Such a
    file runs alone, each process with one thread. `exclusive`: a file runs alone with all cores, since it measures.
    `slow`: a test may take a minute, and files run side by side.
    """

    name: str
    what: str
    workers: bool = False
    exclusive: bool = False
    slow: bool = False

    @property
    def alone(self) -> bool:
        """Whether a file of this suite runs with no other file beside it."""
        return self.workers or self.exclusive

    @property
    def seconds_per_test(self) -> float:
        """The longest that one test of this suite should take."""
        return 60.0 if self.alone or self.slow else 20.0


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
        Suite("transfer", "prefill and decode workers that send pages, two processes mostly", slow=True),
        Suite("spec", "speculative decoding with running workers", workers=True),
        Suite("benchmark", "speed, accuracy, stress", exclusive=True),
        Suite("amd", "what only an AMD device has", workers=True),
        Suite("ascend", "what only an Ascend device has", workers=True),
    )
}
