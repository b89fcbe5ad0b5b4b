"""What is particular to Mooncake: a peer that does not answer at first, refusals, and the environment."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cpkv.errors import ConfigError, TransferError
from cpkv.testing.backends import PeerProcess, peer_processes, poll_to_the_end
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer import mooncake
from cpkv.transfer.backend import Peer, Region, Run
from cpkv.transfer.mooncake import MooncakeBackend, prepare_environment

register_cpu_ci(est_time=6, suite="transfer")


@pytest.fixture
def spawn() -> Iterator[Callable[[int], PeerProcess]]:
    needs_mooncake()
    with peer_processes("mooncake") as start:
        yield start


def needs_mooncake() -> None:
    if reason := MooncakeBackend.why_not():
        pytest.skip(reason)


def filled(num_bytes: int) -> tuple[np.ndarray, Region]:
    source = np.random.default_rng(1).integers(0, 255, num_bytes, np.uint8)
    return source, Region(source.ctypes.data, num_bytes)


def test_a_peer_that_is_stopped_at_first_contact_never_blocks_a_poll(spawn: Callable[[int], PeerProcess]) -> None:
    size = 1 << 20
    receiver, (source, region) = spawn(size), filled(size)
    with MooncakeBackend(transfer_timeout_s=5) as sender:
        sender.register(region)
        runs = [Run(region.address, receiver.region.address, size)]
        receiver.stop()
        state, cause, longest = poll_to_the_end(sender, sender.submit(receiver.peer, runs), 10)
        assert state == "failed" and "has not answered for 2.5 s" in cause
        assert longest < 1
        second = sender.submit(receiver.peer, runs)
        assert sender.poll(second).state == "pending", "each transfer waits its own time for an answer"
        receiver.go_on()
        assert sender.wait(second, 10).state == "done", "it answers again"
    assert receiver.holds(source)


def test_a_start_without_a_free_port_is_a_typed_error_and_no_crash() -> None:
    needs_mooncake()
    taken = ports_in_a_row(4)
    first = taken[0].getsockname()[1]
    program = "from cpkv.transfer.mooncake import MooncakeBackend as B\ntry: B()\nexcept Exception as e: print(repr(e))"
    ports = {"MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(first + 3)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | ports, capture_output=True, text=True, timeout=20
    )
    for taken_port in taken:
        taken_port.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TransferError(")
    assert f"did not start on 127.0.0.1 (code -1), most likely since no port from {first} to {first + 3}" in done.stdout


def ports_in_a_row(count: int) -> list[socket.socket]:
    """Listening sockets on neighbouring ports in the range that the engine accepts."""
    for first in range(10000, 14000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, one in enumerate(sockets):
                one.bind(("0.0.0.0", first + i))
                one.listen()
        except OSError:
            for one in sockets:
                one.close()
        else:
            return sockets
    raise AssertionError("no free ports in a row")


class FakeEngine:
    """Answers with the codes it is given; checking a handle that has ended is an error, as it crashes the real one."""

    def __init__(self, initialize: int = 0, submit: tuple[int, ...] = (), check: tuple[int, ...] = ()) -> None:
        self._initialize, self._submit, self._check = initialize, list(submit), list(check)
        self.used_after_failure = False
        self._ended: set[int] = set()

    def initialize(self, *_: str) -> int:
        return self._initialize

    def transfer_submit_write(self, *_: Any) -> int:
        return self._submit.pop(0)

    def transfer_check_status(self, handle: int) -> int:
        assert handle not in self._ended, "a handle was checked after its end"
        code = self._check.pop(0)
        if code in (1, -1):
            self._ended.add(handle)
        return code

    def get_rpc_port(self) -> int:
        self.used_after_failure = self._initialize != 0
        return 15000

    def register_memory(self, *_: Any) -> int:
        return 0

    def unregister_memory(self, *_: Any) -> int:
        return 0


def on_fake(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, **options: int) -> MooncakeBackend:
    monkeypatch.setattr(mooncake, "_engine_class", lambda: lambda: engine)
    monkeypatch.setattr(MooncakeBackend, "_contact", lambda self, session_id, since: True)
    return MooncakeBackend(**options)


def test_an_engine_that_did_not_initialize_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(initialize=-1)
    with pytest.raises(TransferError, match=r"did not start on 127.0.0.1 \(code -1\).*MC_MIN_RPC_PORT"):
        on_fake(monkeypatch, engine)
    assert not engine.used_after_failure


@pytest.mark.parametrize("nothing", [0, -1, (1 << 64) - 1])
def test_a_write_that_was_not_taken_is_never_checked(monkeypatch: pytest.MonkeyPatch, nothing: int) -> None:
    backend = on_fake(monkeypatch, FakeEngine(submit=(nothing,)))
    backend.register(Region(4096, 64))
    transfer = backend.submit(Peer("peer:1", (Region(4096, 64),)), [Run(4096, 4096, 64)])
    assert "did not take a write for peer peer:1" in backend.poll(transfer).cause


def test_a_timeout_code_stops_new_runs_but_the_write_stays_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = on_fake(monkeypatch, FakeEngine(submit=(77, 78), check=(0, 1, -2, 0, -1)), max_outstanding_per_peer=1)
    backend.register(Region(4096, 64))
    runs = [Run(4096, 4096, 8), Run(4112, 4112, 8), Run(4128, 4128, 8)]
    transfer = backend.submit(Peer("peer:1", (Region(4096, 64),)), runs)
    for _ in range(4):
        assert backend.poll(transfer).state == "pending" and backend.outstanding() == 1
    status = backend.poll(transfer)
    assert status.state == "failed" and "timeout (code -2)" in status.cause and "0x1010" in status.cause


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"not installed.*pip install 'cpkv\[mooncake\]'"),
        (
            ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory"),
            "libibverbs.so.1.*apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4",
        ),
        (ImportError("libcudart.so.12: cannot open shared object file"), "CUDA build.*uninstall"),
    ],
)
def test_a_failed_import_is_explained_and_there_is_no_fallback(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, says: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(mooncake, "_engine_class", fail)
    monkeypatch.setattr(mooncake, "_installed_wheels", dict)
    with pytest.raises(TransferError, match=says) as refusal:
        MooncakeBackend()
    assert MooncakeBackend.why_not() == str(refusal.value)


def test_log_dir_two_wheels_and_an_old_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"mooncake-transfer-engine-non-cuda": "0.3.12"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(mooncake, "_engine_class", lambda: None)
    assert "non-cuda 0.3.12 is installed, and versions before 0.3.13.post1" in str(MooncakeBackend.why_not())
    for good in ("0.3.13.post1", "0.3.14", "0.10.0"):
        versions["mooncake-transfer-engine-non-cuda"] = good
        assert MooncakeBackend.why_not() is None
    versions["mooncake-transfer-engine"] = "0.3.13.post1"
    assert "are both installed" in str(MooncakeBackend.why_not())
    monkeypatch.setenv("MC_LOG_DIR", "")
    assert str(MooncakeBackend.why_not()).startswith("MC_LOG_DIR is set")


def test_the_environment_is_set_below_the_timeout_and_the_operator_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {"MC_LOG_LEVEL": "INFO"}
    monkeypatch.setattr(os, "environ", environ)
    prepare_environment()
    assert environ == {
        "MC_LOG_LEVEL": "INFO",
        "MC_FORCE_TCP": "1",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
    }
    prepare_environment(20)
    assert environ["MC_TRANSFER_TIMEOUT"] == "20" and environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "10"
    prepare_environment(90)
    assert environ["MC_TRANSFER_TIMEOUT"] == "20", "the first engine of the process decides"
    environ.clear()
    environ |= {"MC_TRANSFER_TIMEOUT": "6", "MC_TCP_STATUS_TIMEOUT_SEC": "1"}
    prepare_environment(40)
    assert environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "3", "below the timeout that the operator gave"
    assert environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "1"


def test_bad_options_are_refused() -> None:
    needs_mooncake()
    with pytest.raises(ConfigError, match=r"transfer_timeout_s is 4.9.*5 or more"):
        MooncakeBackend(transfer_timeout_s=4.9)
    with pytest.raises(TransferError, match="host 'no.such.host.invalid' does not resolve"):
        MooncakeBackend(host="no.such.host.invalid")
