"""Which checks a machine gets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cpkv.checks import gpus, limits, memory, network
from cpkv.checks.engines import BACK_ENDS, check_engine, engine_name
from cpkv.checks.result import Check
from cpkv.config.names import TransferName


def machine_checks(host: str | None, transfers: Sequence[TransferName], ports: Sequence[int]) -> tuple[Check, ...]:
    """All checks, those that take longest last.

    Args:
        host: address under which peers are to reach this machine; None for loopback alone.
        transfers: back ends that must run; empty tries all of them, and one that cannot run is then only a warning.
        ports: must be free at `host`.
    """
    address = host or network.LOOPBACK
    checks = [
        Check(limits.MEMLOCK, limits.check_memlock),
        Check(limits.OPEN_FILES, limits.check_open_files),
        Check(memory.MEMFD, memory.check_memory_files),
        Check(memory.GROUP, memory.check_memory_limit),
        Check(memory.SHM_FOLDER, memory.check_shm_folder),
        Check(gpus.GPUS, gpus.check_gpus),
    ]
    for one in dict.fromkeys((network.LOOPBACK, address)):
        checks.append(Check(network.reach_name(one), partial(network.check_reach, one)))
    for port in ports:
        checks.append(Check(network.port_name(address, port), partial(network.check_port, address, port)))
    chosen = transfers or BACK_ENDS
    if "mooncake" in chosen:
        checks.append(Check(network.ENGINE_PORTS, network.check_engine_ports))
    for name in chosen:
        checks.append(Check(engine_name(name), partial(check_engine, name, address, wanted=bool(transfers))))
    return tuple(checks)
