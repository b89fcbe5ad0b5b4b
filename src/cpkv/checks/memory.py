"""Memory that pools and engines take: files in memory, the group's limit, and /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from cpkv.checks.files import ReadText, read_text
from cpkv.checks.result import MIB, CheckResult, mebibytes

MEMFD, GROUP, SHM_FOLDER = "memory files", "memory limit", "/dev/shm"
# A worker without a pool takes about a quarter of a GiB, most of it torch.
LITTLE_BYTES, ENOUGH_BYTES = 256 * MIB, 2048 * MIB
# Docker gives 64 MiB unless told otherwise, which NCCL and UCX outgrow with a few ranks.
SHM_ENOUGH_BYTES = 256 * MIB
_NO_LIMIT = 1 << 60


class _Version(NamedTuple):
    name: str
    root: str
    limit: str
    usage: str
    cached: str


_V1 = _Version(
    "cgroup v1", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _Version("cgroup v2", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


class _Group(NamedTuple):
    """A group's limit, and what its processes can still take."""

    limit: int
    free: int


def check_memory_files(why_not: Callable[[], str | None] | None = None) -> CheckResult:
    """Create a file in memory, seal it, map it: what the unified view and the shm back end stand on."""
    reason = (why_not or _why_not_unified)()
    if reason is None:
        return CheckResult(MEMFD, "ok", "created, sealed and mapped")
    return CheckResult(MEMFD, "warning", reason, "use another view than unified, and another --transfer than shm")


def _why_not_unified() -> str | None:
    # Here and not at the top: it needs torch.
    from cpkv.pool.sealed_segment import why_not_unified

    return why_not_unified()


def check_memory_limit(read: ReadText = read_text) -> CheckResult:
    """What the machine and the limits of this process's control groups, old kind or new, still give."""
    available = _available_bytes(read("/proc/meminfo"))
    version, path = _own_group(read("/proc/self/cgroup"))
    groups = list(_limited_groups(version, path, read))
    if groups:
        tightest = min(groups, key=lambda group: group.free)
        available = min(available, tightest.free)
        figure = f"{mebibytes(available)} free of {mebibytes(tightest.limit)} ({version.name})"
    else:
        figure = f"{mebibytes(available)} free, no limit ({version.name})"
    if available >= ENOUGH_BYTES:
        return CheckResult(GROUP, "ok", figure)
    remedy = f"free memory, or raise the container's limit by {mebibytes(ENOUGH_BYTES - available)} and the pools' size"
    return CheckResult(GROUP, "failed" if available < LITTLE_BYTES else "warning", figure, remedy)


def check_shm_folder(statvfs: Callable[[str], os.statvfs_result] = os.statvfs) -> CheckResult:
    """NCCL and UCX keep their buffers between processes of one host there; pools do not."""
    try:
        status = statvfs("/dev/shm")
    except OSError as error:
        return CheckResult(SHM_FOLDER, "warning", f"not there ({error})", "mount a tmpfs at /dev/shm")
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    figure = f"{mebibytes(free)} free of {mebibytes(size)}"
    if free >= SHM_ENOUGH_BYTES:
        return CheckResult(SHM_FOLDER, "ok", figure)
    remedy = f"make it {mebibytes(size - free + SHM_ENOUGH_BYTES)} or larger (`--shm-size` of the container)"
    return CheckResult(SHM_FOLDER, "warning", figure, remedy)


def _available_bytes(meminfo: str) -> int:
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def _own_group(lines: str) -> tuple[_Version, str]:
    """Which kind limits memory here, and the path of this process's group below its root."""
    groups = [line.split(":", 2) for line in lines.splitlines() if line.count(":") >= 2]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            return _V1, path
    return _V2, next((path for _, controllers, path in groups if controllers == ""), "/")


def _limited_groups(version: _Version, path: str, read: ReadText) -> Iterator[_Group]:
    """This process's group and those above it, where they have a limit."""
    inner = PurePosixPath("/") / path
    for group in (inner, *inner.parents):
        folder = version.root + str(group).rstrip("/")
        try:
            limit, usage = read(f"{folder}/{version.limit}").strip(), read(f"{folder}/{version.usage}").strip()
        except OSError:
            # The root of the new kind has no limit, and a container does not see the groups above its own.
            continue
        if limit == "max" or int(limit) >= _NO_LIMIT:
            continue
        counts = dict(line.split() for line in read(f"{folder}/memory.stat").splitlines())
        # What is only a cache of files is given up before anything fails.
        yield _Group(int(limit), max(0, int(limit) - int(usage) + int(counts.get(version.cached, 0))))
