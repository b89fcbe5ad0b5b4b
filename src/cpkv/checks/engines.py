"""Every back end, each tried in a process of its own with a bound on its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from cpkv.checks.engine_trial import Trial
from cpkv.checks.result import CheckResult, State
from cpkv.config.names import TransferName
from cpkv.errors import ConfigError

BACK_ENDS: tuple[TransferName, ...] = ("tcp", "shm", "mooncake", "nixl")
TRIAL_LIMIT_S = 45.0
_LAST_WORDS = 300

Command = Callable[[TransferName, str], Sequence[str]]


def back_ends(names: Sequence[str]) -> tuple[TransferName, ...]:
    """The back ends of these names.

    Raises:
        ConfigError: a name is that of no back end between processes.
    """
    if unknown := [name for name in names if name not in BACK_ENDS]:
        raise ConfigError(f"--transfer is {unknown[0]!r}, which is no back end; there are {', '.join(BACK_ENDS)}")
    return tuple(name for name in BACK_ENDS if name in names)


def engine_name(name: TransferName) -> str:
    """Name of the check of a back end."""
    return f"transfer {name}"


def trial_command(name: TransferName, host: str) -> Sequence[str]:
    """The program that tries a back end."""
    return [sys.executable, "-m", "cpkv.checks.engine_trial", name, host]


def check_engine(
    name: TransferName,
    host: str,
    *,
    wanted: bool,
    limit_s: float = TRIAL_LIMIT_S,
    command: Command = trial_command,
) -> CheckResult:
    """Register memory and move 1 MiB between two engines.

    Args:
        name: the back end.
        host: address that the engines listen on.
        wanted: it was asked for by name, so that it is a failure when it is not installed.
        limit_s: after this many seconds the trial is killed.
        command: the program that prints a `Trial`.
    """
    process = subprocess.Popen(
        command(name, host),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        cause = f"the engine hung: no answer within {limit_s:g} s"
        return CheckResult(engine_name(name), "failed", cause, "use another --transfer; its own log may say more")
    finally:
        _end(process)
    try:
        trial = msgspec.json.decode(printed, type=Trial)
    except (msgspec.DecodeError, ValueError):
        words = said.decode(errors="replace").strip()[-_LAST_WORDS:] or "it said nothing"
        cause = f"its process ended with status {process.returncode} before it answered; {words}"
        return CheckResult(engine_name(name), "failed", cause, "use another --transfer")
    return _result(name, trial, wanted)


def _result(name: TransferName, trial: Trial, wanted: bool) -> CheckResult:
    if trial.outcome == "moved":
        return CheckResult(engine_name(name), "ok", f"1 MiB moved and compared in {1e3 * trial.seconds:.1f} ms")
    if trial.outcome == "cannot":
        # The reason ends with what to do, behind its last semicolon.
        reason, _, remedy = trial.cause.rpartition("; ")
        if not reason:
            reason, remedy = trial.cause, "use another --transfer"
        state: State = "failed" if wanted else "warning"
        return CheckResult(engine_name(name), state, reason, remedy)
    return CheckResult(engine_name(name), "failed", trial.cause, "use another --transfer, or see to the cause")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started; its pipes close."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
