"""Fuzzes the control socket of a server that runs in this process; prints inputs/s, memory and, on failure, the seed.

python test/fuzz_control_socket.py --inputs 100000 --seed 7
"""

from __future__ import annotations

import argparse
import secrets
import sys

from cpkv.testing.control_fuzz import fuzz_control_socket


def main() -> int:
    """Exit status 1 when the server did something wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed when left out")
    options = parser.parse_args()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    try:
        report = fuzz_control_socket(options.inputs, seed, progress=lambda line: print(line, flush=True))
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{count} {name}" for name, count in report.counts.items()))
    print(
        f"ok: {report.inputs} inputs in {report.seconds:.0f} s, {report.inputs / report.seconds:.0f} inputs/s; "
        f"resident memory grew by {report.growth_bytes / 2**20:.1f} MiB after warm-up, to {report.peak_bytes >> 20} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
