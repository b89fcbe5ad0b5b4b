"""`cpkv decode`: a decode worker that others use, what it tells, and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cpkv.config.settings import EngineSettings
from cpkv.engine.pool_description import describe_pool
from cpkv.errors import TransferError
from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.shape import ModelShape
from cpkv.protocol import messages as m
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.ports import taken_port
from cpkv.testing.registration import register_cpu_ci
from cpkv.testing.waiting import eventually
from cpkv.transfer.decode_link import DecodeLink

register_cpu_ci(est_time=20, suite="distributed")

CPKV = (sys.executable, "-c", "from cpkv.cli.main import run; run()")
PAGE = 16


class Running:
    """`cpkv decode`, and what it has printed so far."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._log = folder / "decode.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                (*CPKV, "decode", "--transfer", "tcp", "--page-size", str(PAGE), *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of a pattern in what it prints."""
        eventually(
            lambda: re.search(pattern, self.printed) is not None or self.process.poll() is not None,
            f"{pattern} is printed",
        )
        found = re.search(pattern, self.printed)
        assert found is not None, self.printed
        return found

    @property
    def port(self) -> int:
        """Where it listens, once it does."""
        return int(self.wait_for(r"decode worker listens on 127.0.0.1:(\d+)\n").group(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hot_checkpoint(tmp_path_factory.mktemp("hot"), "glm5")


@pytest.fixture
def decode(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts `cpkv decode`; it has ended when the test has."""
    running: list[Running] = []

    def start(*arguments: str) -> Running:
        running.append(Running(tmp_path, "--model", str(checkpoint), *arguments))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def hello(checkpoint: Path, tmp_path: Path) -> m.Hello:
    """What a prefill of the same model says."""
    settings = EngineSettings(num_pages=2, page_size=PAGE, transfer="tcp")
    shape = ModelShape.from_config(read_config(checkpoint), settings.latent_norm_eps)
    model = prepare_weights(checkpoint, tmp_path / "weights.safetensors", torch.float32)
    pool = describe_pool(model, shape, shape.geometry(PAGE, "float32", "float32"), settings)
    return m.Hello(pool, m.SenderDescription(rank=-1, cp_size=1, strategy="zigzag", instance="test"))


def announce(name: str, attempt: int) -> m.OpenTransfer:
    return m.OpenTransfer(name, attempt, 20, 4, (0, 0), m.Sampling())


def test_a_demo_uses_it_and_metrics_tell_and_it_drains_on_sigterm(
    decode: Callable[..., Running], cpkv: Callable[..., Any], checkpoint: Path, hello: m.Hello
) -> None:
    """When it drains, open requests may end, new ones are refused with the reason; then it ends with status 0."""
    running = decode("--metrics-port", "0")
    address = running.wait_for(r"metrics at (http://127.0.0.1:\d+/metrics)\n").group(1)
    ended = cpkv(
        *("demo", "--model", str(checkpoint), "--cp-size", "1", "--prompt-tokens", "100", "--chunk-size", "48"),
        *("--page-size", str(PAGE), "--transfer", "tcp", "--decode-at", f"127.0.0.1:{running.port}"),
        *("--max-new-tokens", "3", "--verify-transfer"),
    )
    assert ended.status == 0, ended.err
    with urllib.request.urlopen(address, timeout=10) as answer:
        told = dict(re.findall(r"^(cpkv_\w+) ([\d.]+)$", answer.read().decode(), re.MULTILINE))
    assert {name: float(value) for name, value in told.items()} == {
        "cpkv_transfers_open": 0,
        "cpkv_requests_held": 0,
        "cpkv_pages_free": 1023,
        "cpkv_pages_held": 0,
        "cpkv_pages_quarantined": 0,
        "cpkv_transfers_completed_total": 2,
        "cpkv_transfers_given_up_total": 0,
        "cpkv_transfer_engine_rebuilds_total": 0,
    }
    link = DecodeLink("127.0.0.1", running.port, hello)
    link.ask(announce("open", 1), m.TransferOpened)
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("SIGTERM: no request is taken any more, 1 are open")
    with pytest.raises(TransferError, match="request late is not taken: the decode worker is about to end; send it to"):
        link.ask(announce("late", 2), m.TransferOpened)
    assert running.process.poll() is None
    link.ask(m.AbortTransfer("open", 1, "the client left", writes_may_land=False), m.Done)
    assert running.process.wait(20) == 0
    link.close()


def test_what_does_not_end_in_time_is_cut_off(decode: Callable[..., Running], hello: m.Hello) -> None:
    running = decode("--drain-seconds", "0.5")
    link = DecodeLink("127.0.0.1", running.port, hello)
    link.ask(announce("stuck", 1), m.TransferOpened)
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(20) == 0
    assert "1 requests did not end within 0 s and are cut off" in running.printed.replace("0.5", "0")
    link.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--host", "0.0.0.0"), "secret"),
        (("--num-pages", "1"), "--num-pages is 1; give 2 or more"),
        (("--port", "70000"), "--port is 70000; give 1 to 65535, or 0 to take a free one"),
        (("--metrics-port", "-1"), "--metrics-port is -1; give 1 to 65535, or 0 to take a free one"),
        (("--registry", "nowhere"), "--registry is 'nowhere'; write it as HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    cpkv: Callable[..., Any], checkpoint: Path, arguments: tuple[str, ...], says: str
) -> None:
    ended = cpkv("decode", "--transfer", "tcp", "--model", str(checkpoint), *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert says in ended.err
    assert "Traceback" not in ended.err


def test_a_port_that_is_taken(cpkv: Callable[..., Any], checkpoint: Path) -> None:
    with taken_port() as port:
        ended = cpkv("decode", "--transfer", "tcp", "--model", str(checkpoint), "--port", str(port))
    assert (ended.status, ended.out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port}" in ended.err
    assert "Traceback" not in ended.err
