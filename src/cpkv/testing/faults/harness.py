"""A run of the harness from its options."""

from __future__ import annotations

from pathlib import Path

from cpkv.testing.faults.options import DECODE_PAGES, FaultOptions
from cpkv.testing.faults.plan import draw_plan
from cpkv.testing.faults.report import FaultReport
from cpkv.testing.faults.run import FaultRun


def inject_faults(options: FaultOptions, workspace: Path, replay: str = "") -> FaultReport:
    """Run it; logs go to `workspace`, an empty folder."""
    run = FaultRun(
        options.settings(),
        draw_plan(options),
        workspace,
        decode_pages=DECODE_PAGES,
        decode_owners=options.decode_owners,
        replay=replay or repr(options),
    )
    return run.run()
