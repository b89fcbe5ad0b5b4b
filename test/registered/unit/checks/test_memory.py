"""Memory: files in memory, control groups of both kinds at any depth, and /dev/shm, from files that the test writes."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from cpkv.checks.memory import check_memory_files, check_memory_limit, check_shm_folder
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

MIB = 1 << 20
V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


def machine(files: dict[str, str], available_mib: int, groups: str) -> Callable[[str], str]:
    """A reader of these files and no others."""
    there = files | {
        "/proc/meminfo": f"MemTotal:  99999999 kB\nMemAvailable:  {available_mib * 1024} kB\nSwapFree: 0 kB\n",
        "/proc/self/cgroup": groups,
    }

    def read(path: str) -> str:
        if path not in there:
            raise FileNotFoundError(path)
        return there[path]

    return read


def group_v2(folder: str, limit: object, current: int, cached: int) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{current}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def group_v1(folder: str, limit: int, usage: int, cached: int) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"cache 7\ninactive_file 1\ntotal_inactive_file {cached}\n",
    }


def test_without_a_limit_the_machine_counts() -> None:
    groups = "0::/user.slice\n"
    found = check_memory_limit(machine({}, 9000, groups))
    assert (found.state, found.figure, found.remedy) == ("ok", "9,000 MiB free, no limit (cgroup v2)", "")
    files = group_v2(f"{V2}/user.slice", "max", 1, 0)
    assert check_memory_limit(machine(files, 9000, groups)).figure == "9,000 MiB free, no limit (cgroup v2)"
    unlimited = group_v1(V1, 9223372036854771712, 1, 0)
    assert check_memory_limit(machine(unlimited, 9000, "4:memory:/\n")).figure.endswith("no limit (cgroup v1)")


def test_caches_of_files_count_as_free_and_the_tightest_group_above_decides() -> None:
    files = group_v2(f"{V2}/pod/box", 8000 * MIB, 3000 * MIB, 500 * MIB)
    groups = "0::/pod/box\n"
    found = check_memory_limit(machine(files, 9000, groups))
    assert (found.state, found.figure) == ("ok", "5,500 MiB free of 8,000 MiB (cgroup v2)")
    files |= group_v2(f"{V2}/pod", 10_000 * MIB, 9000 * MIB, 0)
    found = check_memory_limit(machine(files, 9000, groups))
    assert (found.state, found.figure) == ("warning", "1,000 MiB free of 10,000 MiB (cgroup v2)")
    assert "by 1,048 MiB" in found.remedy
    found = check_memory_limit(machine(files, 200, groups))
    assert found.state == "failed" and found.figure.startswith("200 MiB free"), "the machine has less than the group"


def test_the_old_kind_is_read_where_it_limits_memory() -> None:
    groups = "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/x\n0::/y\n"
    files = group_v1(f"{V1}/docker/abc", 4096 * MIB, 1096 * MIB, 96 * MIB)
    files |= group_v2(f"{V2}/y", 1, 1, 0)
    found = check_memory_limit(machine(files, 9000, groups))
    assert (found.state, found.figure) == ("ok", "3,096 MiB free of 4,096 MiB (cgroup v1)")
    inside = machine(group_v1(V1, 4096 * MIB, 4096 * MIB, 0), 9000, "4:memory:/docker/abc\n")
    assert check_memory_limit(inside).figure == "0 MiB free of 4,096 MiB (cgroup v1)", "a container sees its root alone"


def test_this_machine_has_an_answer() -> None:
    assert "MiB free" in check_memory_limit().figure
    assert check_shm_folder().name == "/dev/shm"
    assert check_memory_files().figure


def test_memory_files_that_cannot_be_made_are_a_warning_with_the_reason() -> None:
    assert check_memory_files(lambda: None).state == "ok"
    found = check_memory_files(lambda: "this system gives no memory files")
    assert (found.state, found.figure) == ("warning", "this system gives no memory files") and "unified" in found.remedy


@pytest.mark.parametrize(("free_mib", "state"), [(256, "ok"), (255, "warning"), (0, "warning")])
def test_shm_folder(free_mib: int, state: str) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        assert path == "/dev/shm"
        blocks = 512 * MIB // 4096
        return os.statvfs_result((1, 4096, blocks, 0, free_mib * MIB // 4096, 0, 0, 0, 0, 255))

    found = check_shm_folder(statvfs)
    assert (found.state, found.figure) == (state, f"{free_mib} MiB free of 512 MiB")
    assert (f"{512 - free_mib + 256} MiB" in found.remedy) == (state == "warning")


def test_no_shm_folder_is_a_warning() -> None:
    def statvfs(path: str) -> os.statvfs_result:
        raise FileNotFoundError(2, "No such file or directory", path)

    found = check_shm_folder(statvfs)
    assert found.state == "warning" and "No such file" in found.figure and "tmpfs" in found.remedy
