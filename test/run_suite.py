"""Run the registered tests: `python test/run_suite.py --help`. The parts are in `test/runner/`."""

from __future__ import annotations

import sys

from runner.main import main

if __name__ == "__main__":
    sys.exit(main())
