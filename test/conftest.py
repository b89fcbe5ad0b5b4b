"""Settings for every test: hypothesis has no deadline, and in CI draws the same examples every time.

No test may leave a process, a segment of shared memory, a workspace or a worker thread behind.
"""

from __future__ import annotations

import os

try:
    import hypothesis
except ImportError:
    # Machines with a GPU and no package registry run the tests that do without it.
    hypothesis = None  # type: ignore[assignment]

pytest_plugins = ["cpkv.testing.fixtures"]

if hypothesis is not None:
    # Another process on the machine must not fail a test, so nothing depends on the time an example takes.
    lenient = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("dev", deadline=None, suppress_health_check=lenient)
    hypothesis.settings.register_profile(
        "ci", deadline=None, derandomize=True, database=None, print_blob=True, suppress_health_check=lenient
    )
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")
