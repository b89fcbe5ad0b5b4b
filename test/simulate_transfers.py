"""Many random schedules of simulated transfers; see `cpkv.testing.transfer_world`.

    python test/simulate_transfers.py --schedules 100000 --seed 1 --jobs 2
    python test/simulate_transfers.py --schedules 1 --seed 4711       replays the schedule of that seed

Schedule number i has seed SEED + i. A schedule that breaks an invariant is told with its seed, the last events and the
command that replays it, and ends the run. At the end: how often what happened.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from cpkv.testing.hostile_fabric import Fault
from cpkv.testing.transfer_schedule import run_schedule

BLOCK = 250


def run_block(first: int, count: int) -> tuple[dict[str, int], int, str]:
    """Counts over some schedules, how many there were, and what the first broken invariant says."""
    counts: Counter[str] = Counter()
    for done, seed in enumerate(range(first, first + count)):
        try:
            counts.update(run_schedule(seed))
        except Fault as fault:
            replay = f"python test/simulate_transfers.py --schedules 1 --seed {seed}"
            return dict(counts), done + 1, f"{fault}\nreplay it: {replay}"
    return dict(counts), count, ""


def main() -> int:
    """1 if an invariant was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    started = time.monotonic()
    counts: Counter[str] = Counter()
    done, fault = 0, ""
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        last = options.seed + options.schedules
        blocks = [pool.submit(run_block, first, min(BLOCK, last - first)) for first in range(options.seed, last, BLOCK)]
        for block in as_completed(blocks):
            some, count, fault = block.result()
            counts.update(some)
            done += count
            if sys.stderr.isatty():
                print(f"\r{done:,} of {options.schedules:,}", end="", file=sys.stderr, flush=True)
            if fault:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.monotonic() - started
    for what, count in sorted(counts.items()):
        print(f"{count:12,}  {what}")
    print(f"{done:,} schedules in {seconds:.0f} s, {done / seconds:.0f} a second with {options.jobs} jobs")
    if fault:
        print(f"\n{fault}")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
