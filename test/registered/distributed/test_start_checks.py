"""Start-up checks through the Python API: what cannot work is refused with its cause, and nothing is left running."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cpkv.config.settings import EngineSettings
from cpkv.engine import cluster as cluster_module
from cpkv.engine import worker_set
from cpkv.engine.cluster import Cluster, check_equal_facts
from cpkv.engine.commands import StartDecode, WorkerReady
from cpkv.engine.decode_worker import DecodeWorker
from cpkv.engine.pool_description import describe_pool
from cpkv.engine.prefill import PrefillScheduler
from cpkv.engine.rank_worker import RankWorker
from cpkv.engine.request import Request
from cpkv.errors import ConfigError, CpkvError, HandshakeError, PromptError, ProtocolError, TransferError
from cpkv.model.checkpoint import prepare_weights, read_config
from cpkv.model.shape import ModelShape
from cpkv.protocol.messages import (
    AbortTransfer,
    Done,
    Failed,
    FromDecode,
    Hello,
    OpenTransfer,
    PoolDescription,
    ReleaseRequest,
    Sampling,
    SenderDescription,
    TransferOpened,
    Welcome,
)
from cpkv.protocol.sealing import GREETING_BYTES
from cpkv.testing.checkpoints import write_hot_checkpoint
from cpkv.testing.ports import closed_port, taken_port
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.channel import connect
from cpkv.transfer.decode_link import DecodeLink
from cpkv.transfer.inprocess import InProcessBackend, InProcessFabric
from cpkv.transfer.mooncake import MooncakeBackend

register_cpu_ci(est_time=9, suite="distributed")

SOON_S = 10.0
SETTINGS = EngineSettings(num_pages=16, enable_cp_shared_kv=True, cp_size=2, page_size=16, transfer="inprocess")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hot_checkpoint(tmp_path_factory.mktemp("hot"), "glm5")


@pytest.fixture
def start(workspace: Path, checkpoint: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a cluster of threads, with some settings changed; ends it with the test."""
    running: list[Cluster] = []

    def make(*, decode_port: int = 0, decode_cp_size: int = 1, decode_pages: int = 16, **changes: Any) -> Cluster:
        settings = msgspec.structs.replace(SETTINGS, **changes)
        running.append(
            Cluster(
                settings,
                checkpoint,
                decode_pages=decode_pages,
                decode_port=decode_port,
                decode_cp_size=decode_cp_size,
            )
        )
        return running[-1]

    yield make
    for cluster in running:
        cluster.close()


def test_a_port_in_use(start: Callable[..., Cluster]) -> None:
    with taken_port() as port:
        started = time.monotonic()
        with pytest.raises(TransferError, match=f"cannot listen on 127.0.0.1:{port}: .*in use; give a free port"):
            start(decode_port=port)
        assert time.monotonic() - started < SOON_S


def test_a_port_that_is_taken_while_workers_start(start: Callable[..., Cluster], monkeypatch: Any) -> None:
    monkeypatch.setattr(cluster_module, "listen", lambda host, port: socket.socket())
    with taken_port() as port:
        with pytest.raises(TransferError, match=f"decode worker: cannot listen on 127.0.0.1:{port}"):
            start(decode_port=port)


def test_a_port_that_is_free_is_taken(start: Callable[..., Cluster]) -> None:
    port = closed_port()
    cluster = start(decode_port=port)
    assert cluster.decode_address == ("127.0.0.1", port)
    assert cluster.open_pool(True) > 0


def test_one_range_of_memory_takes_one_host(start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where it was asked for, by the rank that is elsewhere; else another view is taken."""
    real = RankWorker.ready

    def ready(worker: RankWorker) -> WorkerReady:
        answer = real(worker)
        return answer if worker._rank == 0 else msgspec.structs.replace(answer, host="another host")

    monkeypatch.setattr(RankWorker, "ready", ready)
    refused = r"--kv-view unified was given .* ranks \[1\] run on another host than rank 0; use mixed"
    with pytest.raises(ConfigError, match=refused):
        start(kv_view="unified")
    assert start().unified_reason == "ranks [1] run on another host than rank 0"


def test_an_address_that_is_not_ours(start: Callable[..., Cluster]) -> None:
    with pytest.raises(TransferError, match="cannot listen on 203.0.113.7"):
        start(host="203.0.113.7")


def test_a_decode_worker_that_is_not_there(start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_set, "FIRST_CAUSE_GRACE_S", 0.1)
    cluster, port = start(), closed_port()
    started = time.monotonic()
    cluster.decode_address = ("127.0.0.1", port)
    with pytest.raises(TransferError, match=f"the decode worker at 127.0.0.1:{port} is not there"):
        cluster.open_pool(True)
    assert time.monotonic() - started < SOON_S


def test_a_decode_worker_that_never_answers() -> None:
    with taken_port() as port:
        with pytest.raises(TransferError, match=f"handshake with the decode worker at 127.0.0.1:{port} failed"):
            DecodeLink("127.0.0.1", port, Hello(DESCRIPTION, SENDER), timeout_s=0.3)


def test_a_decode_worker_with_cp(start: Callable[..., Cluster]) -> None:
    with pytest.raises(ConfigError, match="cp_size 2; it holds the full layout.*start one decode worker without CP"):
        start(decode_cp_size=2)


def test_settings_are_checked_before_anything_starts(start: Callable[..., Cluster], monkeypatch: Any) -> None:
    monkeypatch.setattr(cluster_module, "WorkerSet", None)
    for changes in (
        {"cp_size": 1},
        {"cp_size": 0},
        {"page_size": 0},
        {"page_size": 4096},
        {"index_dtype": "bfloat16"},
        {"num_pages": 15},
        {"num_pages": 2},
        {"chunk_size": 0},
        {"transfer": "carrier pigeon"},
        {"transfer_timeout_s": float("nan")},
    ):
        with pytest.raises(ConfigError):
            start(**changes)


def test_mooncake_is_never_replaced(start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MooncakeBackend, "why_not", classmethod(lambda cls: "it is not installed; install it"))
    with pytest.raises(TransferError, match="it is not installed; install it"):
        start(transfer="mooncake")


def test_ranks_whose_configurations_differ(start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RankWorker.ready

    def ready(rank: RankWorker) -> WorkerReady:
        facts = honest(rank).facts
        return WorkerReady(facts | ({"torch": "1.0"} if rank._rank == 1 else {}))

    monkeypatch.setattr(RankWorker, "ready", ready)
    with pytest.raises(ConfigError, match=f"rank 1 has torch 1.0 and rank 0 has {torch.__version__}".replace("+", ".")):
        start()


def test_facts_cover_every_setting(start: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(cluster_module, "check_equal_facts", seen.extend)
    start()
    assert len(seen) == 2
    check_equal_facts(seen)
    for name in (*EngineSettings.__struct_fields__, "model", "torch", "python", "threads"):
        with pytest.raises(ConfigError, match=f"rank 1 has {name} other and rank 0 has"):
            check_equal_facts([seen[0], seen[1] | {name: "other"}])


def test_requests_that_cannot_be_served(start: Callable[..., Cluster]) -> None:
    cluster = start()
    cluster.open_pool(True)
    scheduler = PrefillScheduler(cluster, shared=True)
    good = Request("good", (1, 2, 3), 2)
    for bad, words in (
        (Request("bad", (), 2), "request bad has an empty prompt; give at least one token"),
        (Request("bad", (1, 2), 0), "asks for 0 new tokens; ask for 1 or more"),
        (Request("bad", (1, 512), 2), "holds token id 512, and the model knows 0 to 511"),
        (Request("bad", (1, -1), 2), "holds token id -1, and the model knows 0 to 511"),
        (
            Request("bad", (1,) * 225, 2),
            "225 tokens and needs 15 pages, and the prefill pool holds 14 .* raise --num-pages to 18",
        ),
        (Request("bad", (1,), 163840), "1 . 163840 tokens, and the model knows 163840 positions"),
        (good, "two requests have one id"),
    ):
        with pytest.raises(PromptError, match=words):
            scheduler.run([good, bad])
        assert scheduler.allocator.free_pages == scheduler.allocator.capacity_pages
    report = scheduler.run([good])
    assert list(report.first_tokens) == ["good"]
    cluster.ask_decode(ReleaseRequest("good"), object)


@pytest.mark.parametrize("sampling", [Sampling(temperature=-1.0), Sampling(temperature=1.0, top_p=0.0)])
def test_sampling_that_cannot_be_drawn_from(start: Callable[..., Cluster], sampling: Sampling) -> None:
    cluster = start()
    cluster.open_pool(True)
    with pytest.raises(CpkvError):
        PrefillScheduler(cluster, shared=True).run([Request("bad", (1, 2, 3), 2, sampling)])


def test_more_tokens_than_the_decode_worker_holds(start: Callable[..., Cluster]) -> None:
    cluster = start(decode_pages=4)
    cluster.open_pool(True)
    scheduler = PrefillScheduler(cluster, shared=True)
    report = scheduler.run([Request("long", (1,) * 20, 40), Request("short", (1,) * 20, 10)])
    assert list(report.first_tokens) == ["short"]
    refusal = str(report.failures["long"])
    assert re.match(r"decode worker: request long .* needs 4 pages, 3 are free of 3; raise decode_pages to 5", refusal)


def test_a_full_decode_worker_names_its_own_knob(start: Callable[..., Cluster]) -> None:
    cluster = start(decode_pages=4)
    cluster.open_pool(True)
    report = PrefillScheduler(cluster, shared=True).run([Request("long", (1,) * 20, 40)])
    assert "--num-pages" not in str(report.failures["long"])


# The handshake.

DESCRIPTION = PoolDescription(
    protocol_version=2,
    model="",
    num_layers=4,
    index_slots=(0, 1, 2, 3),
    page_size=16,
    latent_row_bytes=320,
    index_row_bytes=128,
    latent_dtype="float32",
    index_dtype="float32",
    norm_eps=1e-5,
    latent_norm_eps=1e-6,
    transfer="inprocess",
)
SENDER = SenderDescription(rank=0, cp_size=2, strategy="zigzag", instance="test")
SECRET = "the secret of this run"


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, PoolDescription]]:
    """A decode worker in a thread of this process: its port, and what it expects."""
    prepared = tmp_path_factory.mktemp("prepared") / "weights.safetensors"
    prepare_weights(checkpoint, prepared, torch.float32)
    start = StartDecode(
        settings=SETTINGS,
        checkpoint=str(checkpoint),
        prepared=str(prepared),
        model="this model",
        secret=SECRET,
        num_pages=8,
        port=0,
        threads=1,
        shuffle_seed=3,
    )
    worker = DecodeWorker(start, lambda: InProcessBackend(InProcessFabric()))
    try:
        port = worker.ready().port
        shape = ModelShape.from_config(read_config(checkpoint), 1e-6)
        yield port, describe_pool("this model", shape, shape.geometry(16, "float32", "float32"), SETTINGS)
    finally:
        worker.close()


def test_equal_pools_are_welcome_whatever_the_split(served: tuple[int, PoolDescription]) -> None:
    port, pool = served
    for sender in (SENDER, SenderDescription(rank=7, cp_size=8, strategy="interleave", instance="test")):
        link = DecodeLink("127.0.0.1", port, Hello(pool, sender), secret=SECRET)
        assert link.welcome.pool == pool
        opened = link.ask(OpenTransfer("r", sender.rank + 1, 5, 1, (0,), Sampling()), TransferOpened)
        (target,) = opened.targets
        assert [region.length for region in target.regions] == [8 * 4 * 16 * 320, 8 * 4 * 16 * 128]
        link.ask(AbortTransfer("r", sender.rank + 1, "a test", writes_may_land=False), Done)
        link.close()


OTHER: dict[str, Any] = {
    "protocol_version": 1,
    "model": "another model",
    "num_layers": 5,
    "index_slots": (0, 1, -1, -1),
    "page_size": 32,
    "latent_row_bytes": 160,
    "index_row_bytes": 36,
    "latent_dtype": "bfloat16",
    "index_dtype": "fp8",
    "norm_eps": 1e-6,
    "latent_norm_eps": 1e-5,
    "transfer": "mooncake",
}


@pytest.mark.parametrize("name", PoolDescription.__struct_fields__)
def test_each_field_that_differs_is_refused(served: tuple[int, PoolDescription], name: str) -> None:
    port, pool = served
    theirs = msgspec.structs.replace(pool, **{name: OTHER[name]})
    with pytest.raises(HandshakeError) as refusal:
        DecodeLink("127.0.0.1", port, Hello(theirs, SENDER), secret=SECRET)
    differing = f"{name}: prefill has {OTHER[name]!r}, decode has {getattr(pool, name)!r}"
    assert f"the pools differ: {differing}; start both workers with the same settings" in str(refusal.value)


def test_every_field_that_differs_is_listed(served: tuple[int, PoolDescription]) -> None:
    port, pool = served
    with pytest.raises(HandshakeError) as refusal:
        DecodeLink("127.0.0.1", port, Hello(msgspec.structs.replace(pool, **OTHER), SENDER), secret=SECRET)
    for name, value in OTHER.items():
        assert f"{name}: prefill has {value!r}" in str(refusal.value)


def test_another_secret_is_refused_and_told_nothing(served: tuple[int, PoolDescription]) -> None:
    port, pool = served
    for guess, words in (
        ("", "this side has no secret and the peer has one"),
        ("the secret of another run", "the secret is not that of this run"),
        (SECRET + " ", "the secret is not that of this run"),
    ):
        with pytest.raises(HandshakeError, match=words) as refusal:
            hello = Hello(msgspec.structs.replace(pool, page_size=32), SENDER)
            DecodeLink("127.0.0.1", port, hello, secret=guess)
        assert "page_size" not in str(refusal.value)


def test_strangers_cannot_disturb_it(served: tuple[int, PoolDescription]) -> None:
    port, pool = served
    friend = DecodeLink("127.0.0.1", port, Hello(pool, SENDER), secret=SECRET)
    for frame in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\0\0\0\x01\xc1", b"\0\0\0\x09\x80\x04}q\0.xxx"):
        with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as stranger:
            stranger.sendall(frame)
            # What it has not read yet makes it reset the connection.
            with contextlib.suppress(ConnectionResetError):
                told = b"".join(iter(lambda stranger=stranger: stranger.recv(4096), b""))
                assert len(told) <= GREETING_BYTES, f"{frame!r} was told more than a greeting"
    early = connect("127.0.0.1", port, FromDecode, "the decode worker", secret=SECRET)
    early.send(ReleaseRequest("someone else's"))
    refusal = early.receive(SOON_S)
    assert isinstance(refusal, Failed)
    assert (refusal.kind, refusal.where) == ("ProtocolError", "decode worker")
    assert "came before the handshake; send Hello first" in refusal.message
    early.close()
    with pytest.raises(ProtocolError, match="request nothing is not open here"):
        friend.ask(ReleaseRequest("nothing"), Welcome)
    friend.close()
