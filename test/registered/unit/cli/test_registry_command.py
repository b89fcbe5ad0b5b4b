"""`cpkv registry`: what it prints and logs, how it ends, what it refuses, and where its secret may come from."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cpkv.cli.addresses import MAX_SECRET_BYTES, parse_address, read_secret
from cpkv.cli.main import make_app
from cpkv.errors import ConfigError
from cpkv.protocol.directory import Lease, WorkerRecord
from cpkv.protocol.registry_messages import FromRegistry, RegisterWorker
from cpkv.testing.ports import closed_port, taken_port
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.channel import connect
from cpkv.transfer.registry import RegistryServer
from cpkv.transfer.registry_client import RegistryClient

register_cpu_ci(est_time=4, suite="unit")

# Frozen: a flag that is added, renamed or dropped, or another default, is a change of the command that people use.
FLAGS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "lease": 15.0,
    "secret_file": None,
    "at": None,
    "list_workers": False,
    "json_output": False,
}
SECRET = "a secret of this test"
LONG_S = 15.0
CODE = """
import sys
for name in ("torch", "transformers", "safetensors", "mooncake"):
    sys.modules[name] = None  # an import of it fails
from cpkv.cli.main import run
sys.argv = ["cpkv", *sys.argv[1:]]
run()
"""


class RunningRegistry:
    """The command in a process of its own, without torch."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LONG_S)[0], "it did not say where it listens"
        self.line = process.stdout.readline()
        self.port = int(self.line.rpartition(":")[2])

    def end(self, *signals: signal.Signals) -> tuple[int, str, str]:
        """Its status, and what else it printed and logged."""
        for number in signals:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, out, err


@contextmanager
def running(folder: Path, *words: str) -> Iterator[RunningRegistry]:
    secret = folder / "secret"
    secret.write_text(f"{SECRET}\n")
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "registry", "--secret-file", str(secret), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Its line has to come through a pipe while it runs.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    with process:
        try:
            yield RunningRegistry(process)
        finally:
            process.kill()


def worker(name: str = "decode-0", *, draining: bool = False) -> WorkerRecord:
    return WorkerRecord(
        name=name, role="decode", instance="one", host="127.0.0.1", port=7000, pool=None, draining=draining
    )


def test_flags_and_their_defaults() -> None:
    parameters = get_command(make_app()).commands["registry"].params  # type: ignore[attr-defined]
    assert {parameter.name: parameter.default for parameter in parameters} == FLAGS
    assert not [option for parameter in parameters for option in parameter.opts if option == "--secret"]


def test_help_can_be_read_on_80_columns() -> None:
    shown = CliRunner().invoke(make_app(), ["registry", "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and max(map(len, text.splitlines())) <= 80
    for word in ("--host", "--lease", "--secret-file", "CPKV_SECRET", "HOST:PORT", "cpkv registry --port 7400"):
        assert word in text


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)])
def test_signals_end_it_cleanly_with_workers_connected(tmp_path: Path, signals: tuple[signal.Signals, ...]) -> None:
    with running(tmp_path) as registry:
        assert registry.line == f"registry listens on 127.0.0.1:{registry.port}\n"
        client = RegistryClient("127.0.0.1", registry.port, worker(), secret=SECRET)
        try:
            client.wait_registered(LONG_S)
            status, out, err = registry.end(*signals)
        finally:
            client.close()
    assert (status, out) == (0, "")
    assert re.fullmatch(r"\S+ \S+ INFO cpkv\S+: decode-0 joins: decode at 127.0.0.1:7000, instance one\n", err)


def test_it_logs_who_leaves_and_who_is_not_heard_of(tmp_path: Path) -> None:
    with running(tmp_path, "--lease", "0.5") as registry:
        client = RegistryClient("127.0.0.1", registry.port, worker("a"), secret=SECRET)
        client.wait_registered(LONG_S)
        client.close()
        with closing(connect("127.0.0.1", registry.port, FromRegistry, "the registry", secret=SECRET)) as channel:
            channel.send(RegisterWorker(worker("b")))
            assert channel.receive(LONG_S) == Lease(0.5)
        assert registry.process.stderr is not None
        lines = [registry.process.stderr.readline() for _ in range(4)]
        assert registry.end(signal.SIGTERM)[0] == 0
    ends = ("a joins: decode", "a leaves", "b joins: decode", "b was not heard of for 0.5 s and is dropped")
    assert [words in line for words, line in zip(ends, lines, strict=True)] == [True] * 4


def test_the_same_port_can_be_taken_again_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as registry:
        port = registry.port
        client = RegistryClient("127.0.0.1", port, worker(), secret=SECRET)
        try:
            client.wait_registered(LONG_S)
            registry.end(signal.SIGKILL)
            with running(tmp_path, "--port", str(port)) as again:
                assert again.port == port
                client.wait_for("decode", 1, LONG_S)
        finally:
            client.close()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, cpkv: Any) -> Iterator[RegistryServer]:
    """One in this process, which the variable has the secret of."""
    monkeypatch.setenv("CPKV_SECRET", SECRET)
    server = RegistryServer(secret=SECRET)
    server.start()
    yield server
    server.close()


def test_list_is_a_table_or_json(cpkv: Any, registry: RegistryServer) -> None:
    at = f"127.0.0.1:{registry.port}"
    assert json.loads(cpkv("registry", "--at", at, "--list", "--json")[1]) == {"registry": at, "workers": []}
    workers = (worker("b", draining=True), worker("a"))
    clients = [RegistryClient("127.0.0.1", registry.port, each, secret=SECRET) for each in workers]
    try:
        for client in clients:
            client.wait_registered(LONG_S)
        status, table, err = cpkv("registry", "--at", at, "--list")
        told = json.loads(cpkv("registry", "--at", at, "--list", "--json")[1])
    finally:
        for client in clients:
            client.close()
    assert (status, err) == (0, "")
    assert f"2 workers at the registry {at}" in table
    rows = [
        re.split(r" +", line.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").strip()) for line in table.splitlines()
    ]
    assert ["a", "decode", "127.0.0.1:7000", "takes", "requests", "one", "-"] in rows
    assert ["b", "decode", "127.0.0.1:7000", "draining", "one", "-"] in rows
    assert told["registry"] == at and [found["name"] for found in told["workers"]] == ["a", "b"]
    assert told["workers"][1] == {
        "name": "b",
        "role": "decode",
        "instance": "one",
        "host": "127.0.0.1",
        "port": 7000,
        "pool": None,
        "draining": True,
    }


def test_list_says_what_is_wrong(cpkv: Any, registry: RegistryServer, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another secret than that")
    at = f"127.0.0.1:{registry.port}"
    status, out, err = cpkv("registry", "--at", at, "--list", "--secret-file", str(tmp_path / "other"))
    assert (status, out) == (2, "") and f"the registry at {at} failed: the secret is not that" in err
    nobody = f"127.0.0.1:{closed_port()}"
    status, out, err = cpkv("registry", "--at", nobody, "--list")
    assert (status, out) == (2, "") and f"the registry at {nobody} is not there" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0 is not a loopback address, and beyond this host a connection needs a secret"),
        (("--at", "10.0.0.1:7400", "--list"), "10.0.0.1 is not a loopback address"),
        (("--host", "192.0.2.7", "--secret-file", "FOLDER/good"), "cannot listen on 192.0.2.7:0"),
        (("--secret-file", "FOLDER/short"), "the secret has 5 characters, 16 are the least"),
        (("--secret-file", "FOLDER/none"), "the secret file FOLDER/none cannot be read"),
        (("--port", "65536"), "--port is 65536; give 1 to 65535, or 0 to take a free one"),
        (("--port", "-1"), "--port is -1"),
        (("--lease", "0"), "the lease is 0.0 s; it must be from 0.1 to 3600.0 s"),
        (("--lease", "nan"), "the lease is nan s"),
        (("--list",), "give --at HOST:PORT too"),
        (("--json",), "give --at HOST:PORT too"),
        (("--at", "127.0.0.1:7400"), "nothing was asked of it; give --list too"),
        (("--at", "7400", "--list"), "--at is '7400'; write it as HOST:PORT"),
    ],
)
def test_odd_input_ends_with_status_2_and_one_line(
    cpkv: Any, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "good").write_text(SECRET)
    (tmp_path / "short").write_text("short")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    status, out, err = cpkv("registry", *(word.replace("FOLDER", str(tmp_path)) for word in words))
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and told.replace("FOLDER", str(tmp_path)) in err
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked


def test_a_port_that_is_taken_ends_it_with_the_remedy(cpkv: Any) -> None:
    with taken_port() as port:
        status, out, err = cpkv("registry", "--port", str(port))
    assert (status, out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port}" in err and "give a free port, or 0 to take any" in err


# The secret.


def test_a_secret_comes_from_the_file_else_from_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"  {SECRET}\n")
    assert read_secret(path, {"CPKV_SECRET": "of the environment"}) == SECRET
    assert read_secret(None, {"CPKV_SECRET": "of the environment"}) == "of the environment"
    assert read_secret(None, {}) == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"s" * (MAX_SECRET_BYTES + 1), "is too large; write one line of at most 4096 bytes"),
        (b"\xff" * 20, "cannot be read"),
    ],
)
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"the secret file .* {says}"):
        read_secret(path, {})


def test_a_variable_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="CPKV_SECRET holds characters that are no text"):
        read_secret(None, {"CPKV_SECRET": "\udcff" * 20})


def test_addresses() -> None:
    assert parse_address("127.0.0.1:7400", "--at") == ("127.0.0.1", 7400)
    assert parse_address("registry.example:65535", "--at") == ("registry.example", 65535)
    for text in ("", ":", "host", "host:", ":7400", "host:0", "host:65536", "host:7a", "host:-1", "host:\u0663"):
        with pytest.raises(ConfigError, match="write it as HOST:PORT"):
            parse_address(text, "--at")
