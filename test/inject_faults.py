"""Serves requests over worker processes while they are killed, stopped and their clients go, and checks what must hold.

    python test/inject_faults.py --transfer tcp --requests 40 --kills-prefill 3 --kills-decode 3 --aborts 20 --seed 7
    python test/inject_faults.py --transfer mooncake --requests 40 --stops 1 --stop-s 5 --engine
    python test/inject_faults.py --transfer all --requests 2000 ...         each back end that can run here

Prints a table; the exit status is 0 only if nothing happened that must not. A failure tells the command that replays
it, and the last events of every worker. Moments are drawn from the seed; how processes interleave is not.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import get_args

from cpkv.config.names import TransferName
from cpkv.testing.faults.engine_run import EngineFaultRun
from cpkv.testing.faults.harness import inject_faults
from cpkv.testing.faults.options import FaultOptions
from cpkv.transfer.backends import why_not

BETWEEN_PROCESSES = [name for name in get_args(TransferName) if name != "inprocess"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfer", default="tcp", choices=["all", *BETWEEN_PROCESSES])
    parser.add_argument("--engine", action="store_true", help="the real engine with a tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kills-prefill", type=int, default=0)
    parser.add_argument("--kills-decode", type=int, default=0)
    parser.add_argument("--aborts", type=int, default=0)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--stop-s", type=float, default=5.0, help="how long a stopped worker stays so")
    parser.add_argument("--hiccups", type=int, default=0, help="workers stopped for a moment, that nobody may miss")
    parser.add_argument("--cut-offs", type=int, default=0, help="ranks that come back after they were replaced")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--decode-owners", type=int, default=1)
    parser.add_argument("--lease-s", type=float, default=3.0)
    parser.add_argument("--transfer-timeout-s", type=float, default=8.0)
    parser.add_argument("--verify", action="store_true", help="compare a digest of every page")
    parser.add_argument("--keep", action="store_true", help="keep the logs of a good run too")
    return parser.parse_args()


def run(transfer: TransferName, arguments: argparse.Namespace) -> bool:
    """Run one back end; whether nothing was wrong."""
    reason = why_not(transfer)
    if reason is not None:
        print(f"{transfer}: skipped: {reason}")
        return True
    named = {field.name: getattr(arguments, field.name) for field in fields(FaultOptions) if field.name in arguments}
    options = FaultOptions(**{**named, "transfer": transfer})
    workspace = Path(tempfile.mkdtemp(prefix="cpkv-faults-"))
    words = [word for word in sys.argv if word not in ("--transfer", arguments.transfer)]
    replay = shlex.join(["python", *words[:1], "--transfer", transfer, *words[1:]])
    if arguments.engine:
        report = EngineFaultRun(options, workspace, replay).run()
    else:
        report = inject_faults(options, workspace, replay)
    print(report.text(), flush=True)
    if report.violations or arguments.keep:
        print(f"logs: {workspace}")
    else:
        shutil.rmtree(workspace)
    return not report.violations


def main() -> int:
    arguments = parse()
    names = BETWEEN_PROCESSES if arguments.transfer == "all" else [arguments.transfer]
    outcomes = [run(name, arguments) for name in names]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
