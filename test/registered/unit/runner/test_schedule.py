"""Files are packed on the devices and cores that are there, and some files run alone."""

from __future__ import annotations

import os
from pathlib import Path

from cpkv.testing.registration import register_cpu_ci
from runner.discovery import Registration, discover
from runner.hardware import Machine, this_machine
from runner.process import Ended
from runner.results import read_result, time_advice
from runner.schedule import Settings, Slots, run_all
from runner.selection import Entry, select

register_cpu_ci(est_time=6, suite="unit")

EIGHT_GPUS = Machine(32, {"cuda": tuple(str(number) for number in range(8))})


def settings(machine: Machine, jobs: int = 2, root: Path = Path(".")) -> Settings:
    return Settings(root=root, machine=machine, jobs=jobs, continue_on_error=True)


def gpu(path: str, count: int, suite: str = "kernels") -> Entry:
    return Entry(path, Registration("cuda", 1, suite, num_gpus=count))


def cpu(path: str, suite: str = "unit", *, alone: bool = False) -> Entry:
    return Entry(path, Registration("cpu", 1, suite, alone=alone))


def test_devices_are_dealt_out_once_and_come_back() -> None:
    slots = Slots(settings(EIGHT_GPUS))
    four, three, two = gpu("four", 4), gpu("three", 3), gpu("two", 2)
    first, second = slots.take(four), slots.take(three)
    assert first is not None and second is not None
    assert sorted(first + second) == [str(number) for number in range(7)]
    assert slots.take(two) is None
    slots.give_back(three, second)
    assert slots.take(two) is not None


def test_cpu_files_take_job_slots_and_leave_the_devices() -> None:
    slots = Slots(settings(EIGHT_GPUS, jobs=2))
    assert slots.take(cpu("a")) == ()
    assert slots.take(cpu("b")) == ()
    assert slots.take(cpu("c")) is None
    assert slots.take(gpu("g", 8)) is not None


def test_files_that_watch_the_time_of_their_workers_run_alone() -> None:
    slots = Slots(settings(EIGHT_GPUS, jobs=4))
    unit, workers = cpu("unit"), cpu("workers", "distributed", alone=True)
    assert slots.take(unit) == ()
    assert slots.take(workers) is None
    slots.give_back(unit, ())
    assert slots.take(workers) == ()
    assert slots.take(unit) is None
    slots.give_back(workers, ())
    assert slots.take(cpu("other workers", "distributed")) == ()
    # On devices, workers have cores enough; only what measures runs alone there.
    assert slots.take(gpu("m", 2, "models")) is not None
    assert slots.take(gpu("n", 2, "models")) is not None
    assert slots.take(gpu("b", 1, "benchmark")) is None


def test_threads_times_jobs_are_the_cores() -> None:
    machine = Machine(8)
    assert settings(machine, jobs=4).threads(cpu("a")) == 2
    assert settings(machine, jobs=16).threads(cpu("a")) == 1
    assert settings(machine, jobs=4).threads(cpu("a", "benchmark")) == 8
    assert settings(machine, jobs=4).threads(cpu("a", "distributed")) == 1


def test_files_of_one_process_side_by_side_share_no_core(checkout) -> None:
    body = (
        "import os\nfrom pathlib import Path\n\n\ndef test_cores():\n"
        "    Path(__file__).with_suffix('.cores').write_text(' '.join(map(str, os.sched_getaffinity(0))))\n"
    )
    for name in ("a", "b", "c", "d"):
        checkout.test(f"unit/test_{name}.py", body)
    checkout.test("distributed/test_alone.py", body, 'register_cpu_ci(est_time=1, suite="distributed", alone=True)')
    checkout.test("distributed/test_workers.py", body, 'register_cpu_ci(est_time=1, suite="distributed")')
    selection = select(discover(checkout.root)[0], ["cpu"], [], nightly=False)
    ours = os.sched_getaffinity(0)
    jobs = min(2, len(ours))
    results = run_all(selection.entries, settings(Machine(len(ours)), jobs, checkout.root), lambda result, log: None)
    assert [result.passed for result in results] == [1] * 6
    seen = {path.stem: set(map(int, path.read_text().split())) for path in checkout.root.rglob("*.cores")}
    assert seen.pop("test_alone") == ours
    assert seen.pop("test_workers") == ours
    assert len(seen) == 4
    assert all(len(cores) == len(ours) // jobs for cores in seen.values())
    assert len(set(map(frozenset, seen.values()))) == jobs


def test_cores_are_split_among_the_slots() -> None:
    groups = settings(Machine(8), jobs=2).core_groups()
    assert len(groups) == 2
    assert not set(groups[0]) & set(groups[1])
    assert settings(Machine(8), jobs=1000).core_groups() == [()] * 1000


def test_each_file_sees_only_the_devices_it_asked_for(checkout) -> None:
    body = (
        "import os\nfrom pathlib import Path\n\n\ndef test_devices():\n"
        "    seen = os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CPKV_TEST_HW'], os.environ['OMP_NUM_THREADS']\n"
        "    Path(__file__).with_suffix('.seen').write_text(' '.join(seen))\n"
    )
    checkout.test("kernels/test_pair.py", body, 'register_cuda_ci(est_time=1, suite="kernels", num_gpus=2)')
    checkout.test("kernels/test_cpu.py", body)
    checkout.test("kernels/test_many.py", body, 'register_cuda_ci(est_time=1, suite="kernels", num_gpus=4)')
    selection = select(discover(checkout.root)[0], ["cpu", "cuda"], [], nightly=False)
    machine = Machine(4, {"cuda": ("5", "7", "6")})
    reported = []
    results = run_all(
        selection.entries, settings(machine, 2, checkout.root), lambda result, log: reported.append((result, log))
    )
    assert [result for result, _ in reported] == results
    assert sum(result.passed for result in results) == 2
    assert [reason for result in results for _, reason in result.skipped] == [
        "needs 4 devices (cuda), this machine has 3"
    ]
    seen = {path.stem: path.read_text().split(" ") for path in checkout.root.rglob("*.seen")}
    assert seen == {"test_pair": ["5,7", "cuda", "2"], "test_cpu": ["", "cpu", "2"]}


def test_the_machine_is_described_without_torch(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "-1")
    machine = this_machine()
    assert machine.devices == {"cuda": ("3", "1"), "amd": (), "npu": ()}
    assert machine.hw == ("cpu", "cuda")
    assert machine.cores >= 1


def test_est_time_is_reported_from_a_factor_of_two_and_two_seconds(tmp_path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuites><testsuite><testcase classname="m" name="test_a" time="1"/></testsuite></testsuites>')

    def advice(stated: float, seconds: float) -> str | None:
        entry = Entry("test_a.py", Registration("cpu", stated, "unit"))
        return time_advice(read_result(entry, Ended(0, seconds), junit))

    assert advice(1, 2.9) is None
    assert advice(10, 19) is None
    assert advice(10, 6) is None
    assert advice(4, 1.9) is not None
    assert str(advice(1, 3.2)).endswith("write est_time=4")
    assert str(advice(300, 123.4)).endswith("write est_time=130")
