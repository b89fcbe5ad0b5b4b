"""Partitions are disjoint, cover everything, are balanced, and are the same for everyone who asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.testing.registration import register_cpu_ci
from runner.discovery import Registration, TestFile
from runner.selection import Entry, partition, select

register_cpu_ci(est_time=4, suite="unit")

SIZES = range(1, 8)
TIMES = st.lists(st.integers(1, 400), min_size=1, max_size=40)


def entries(times: list[int]) -> list[Entry]:
    return [Entry(f"unit/test_{number}.py", Registration("cpu", time, "unit")) for number, time in enumerate(times)]


@given(times=TIMES, size=st.sampled_from(SIZES), order=st.randoms())
def test_partitions_are_disjoint_cover_everything_and_ignore_the_order(times, size, order) -> None:
    asked = entries(times)
    parts = partition(asked, size)
    assert len(parts) == size
    assert sorted(entry.path for part in parts for entry in part) == sorted(entry.path for entry in asked)
    shuffled = list(asked)
    order.shuffle(shuffled)
    assert partition(shuffled, size) == parts


@given(times=TIMES, size=st.sampled_from(SIZES))
def test_partitions_differ_by_at_most_the_longest_file(times, size) -> None:
    loads = [sum(entry.registration.est_time for entry in part) for part in partition(entries(times), size)]
    assert max(loads) - min(loads) <= max(times)


def test_the_longest_file_is_dealt_first_and_by_its_time() -> None:
    loads = [sum(entry.registration.est_time for entry in part) for part in partition(entries([1, 1, 4, 1, 1]), 2)]
    assert loads == [4, 4]


def test_a_file_for_two_kinds_of_hardware_stays_in_one_partition() -> None:
    both = [
        Entry(path, Registration(hw, 5, "kernels", num_gpus=hw != "cpu"))
        for path in ("a", "b", "c")
        for hw in ("cpu", "cuda")
    ]
    for size in SIZES:
        homes = [{entry.path for entry in part} for part in partition(both, size)]
        assert sum(len(home) for home in homes) == 3


def test_selection_by_hardware_suite_and_night() -> None:
    day, night = Registration("cpu", 1, "unit"), Registration("cpu", 1, "unit", nightly=True)
    gpu = Registration("cuda", 1, "kernels", num_gpus=1)
    files = [TestFile("day", (day,)), TestFile("night", (night,)), TestFile("both", (day, gpu))]
    by_day = select(files, ["cpu"], [], nightly=False)
    assert [entry.path for entry in by_day.entries] == ["day", "both"]
    assert [entry.path for entry in by_day.nightly_only] == ["night"]
    assert [entry.path for entry in by_day.other_hardware] == ["both"]
    assert [entry.path for entry in select(files, ["cpu"], [], nightly=True).entries] == ["day", "night", "both"]
    assert [entry.path for entry in select(files, ["cuda", "cpu"], ["kernels"], nightly=False).entries] == ["both"]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_listed_partitions_cover_what_is_listed_whole(checkout, size: int) -> None:
    for number in range(5):
        register = f'register_cpu_ci(est_time={number + 1}, suite="unit")'
        checkout.test(f"unit/test_{number}.py", register=register)
    checkout.test("unit/test_off.py", register='register_cpu_ci(est_time=9, suite="unit", disabled="why")')
    whole = listed(checkout)
    assert whole == [f"test/registered/unit/test_{number}.py" for number in range(5)]
    parts = [listed(checkout, "--partition-id", str(i), "--partition-size", str(size)) for i in range(size)]
    assert sorted(path for part in parts for path in part) == whole
    assert parts[0] == listed(checkout, "--partition-id", "0", "--partition-size", str(size))


def listed(checkout, *options: str) -> list[str]:
    ended = checkout.run("--list", *options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--partition-id", "2", "--partition-size", "2"], "none of 0 to 1"),
        (["--partition-size", "0"], "count from 1"),
        (["--jobs", "0"], "count from 1"),
        (["--timeout-per-file", "0"], "above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(checkout, options: list[str], reason: str) -> None:
    checkout.test("unit/test_one.py")
    ended = checkout.run(*options)
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr


def test_nothing_found_is_a_failure_and_an_empty_partition_is_none(checkout) -> None:
    assert checkout.run().returncode == 2
    checkout.test("unit/test_one.py")
    nothing = checkout.run("--suite", "kernels")
    assert nothing.returncode == 2
    assert "no test file is registered for cpu and suite kernels" in nothing.stdout
    assert checkout.run("--partition-id", "1", "--partition-size", "2").returncode == 0
