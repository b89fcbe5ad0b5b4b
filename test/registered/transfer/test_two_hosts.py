"""The demo across two hosts that share nothing but a network link, and what says that it needs one host."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, terminate, two_hosts, wait_for, why_not_two_hosts

from cpkv.testing.recall_model import write_recall_checkpoint
from cpkv.testing.recall_prompt import recall_delta, recall_vocab_size
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.backends import why_not

register_cpu_ci(est_time=48, suite="transfer")

CPKV = (sys.executable, "-c", "from cpkv.cli.main import run; run()")
FAMILY, TOKENS, PAGE = "glm5", 200, 64
SECRET = {"CPKV_SECRET": secrets.token_hex(16)}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    reason = why_not_two_hosts()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        checkpoint = pair[1].folder / "checkpoint"
        checkpoint.mkdir()
        vocab_size = recall_vocab_size(FAMILY, TOKENS, PAGE)
        write_recall_checkpoint(checkpoint, FAMILY, vocab_size=vocab_size, delta=recall_delta(FAMILY, TOKENS))
        yield pair


class DecodeHost:
    """`cpkv decode` on a host, at a registry that runs there too."""

    def __init__(self, host: Host, transfer: str) -> None:
        self.host = host
        self.registry = host.start(
            (*CPKV, "registry", "--host", host.address, "--port", "0"), f"registry-{transfer}.log", SECRET
        )
        line = wait_for(host, f"registry-{transfer}.log", "registry listens on", self.registry)
        self.registry_address = line.split()[-1]
        self.log = f"decode-{transfer}.log"
        self.decode = host.start(
            (
                *(*CPKV, "decode", "--model", str(host.folder / "checkpoint"), "--host", host.address),
                *("--transfer", transfer, "--registry", self.registry_address),
            ),
            self.log,
            SECRET,
        )
        wait_for(host, self.log, "decode worker listens on", self.decode)

    def __enter__(self) -> DecodeHost:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self.decode, self.registry):
            if process.poll() is None:
                terminate(process)
                process.wait(60)

    def end(self) -> tuple[int, int]:
        """SIGTERM both; their exit statuses."""
        terminate(self.decode)
        status = self.decode.wait(30)
        terminate(self.registry)
        return status, self.registry.wait(30)


def demo(host: Host, registry: str, transfer: str, cp_size: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = (
        *(*CPKV, "demo", "--model-family", FAMILY, "--prompt-tokens", str(TOKENS), "--chunk-size", "100"),
        *(
            "--cp-size",
            str(cp_size),
            "--requests",
            "1",
            "--max-new-tokens",
            "4",
            "--transfer",
            transfer,
            "--host",
            host.address,
        ),
        *("--registry", registry, "--json", *more),
    )
    log = host.folder / "demo.json"
    process = host.start(command, log.name, SECRET)
    process.wait(150)
    printed = log.read_text(encoding="utf-8", errors="replace")
    return subprocess.CompletedProcess(command, process.returncode, printed)


def _folder_is_hidden(host: Host, other: Path) -> bool:
    listed = subprocess.run(host.command(("ls", str(other))), capture_output=True, text=True, check=True)
    return listed.stdout == ""


@pytest.mark.parametrize(("transfer", "view"), [("mooncake", "auto"), ("tcp", "mixed")])
def test_the_demo_across_two_hosts(hosts: tuple[Host, Host], transfer: str, view: str) -> None:
    """Prefill on one, decode and registry on the other: answers right, every bit as replicated, as transformers."""
    reason = why_not(transfer)
    if reason is not None:
        pytest.skip(reason)
    prefill, decode = hosts
    assert _folder_is_hidden(prefill, decode.folder)
    assert _folder_is_hidden(decode, prefill.folder)
    with DecodeHost(decode, transfer) as server:
        ended = demo(prefill, server.registry_address, transfer, 2, "--verify-transfer", "--kv-view", view)
        assert ended.returncode == 0, ended.stdout[-2000:]
        report = json.loads(ended.stdout.splitlines()[-1])
        assert report["bitwise_equal_replicated"]
        assert report["tokens_equal"]
        assert report["recall_right"] == report["recall_asked"] > 0
        assert server.end() == (0, 0)


def test_shared_memory_takes_one_host(hosts: tuple[Host, Host]) -> None:
    """And says which hosts, and what works instead."""
    prefill, decode = hosts
    with DecodeHost(decode, "shm") as server:
        ended = demo(prefill, server.registry_address, "shm", 1)
        assert ended.returncode == 2
        assert "runs in another network namespace of this host" in ended.stdout, ended.stdout[-2000:]
        assert "use --transfer tcp or mooncake" in ended.stdout
        assert server.end() == (0, 0)
