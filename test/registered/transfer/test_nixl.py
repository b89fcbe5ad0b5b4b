"""What is particular to NIXL: silent peers and the agent's rebuild, metadata that changes, refusals, its logger."""

from __future__ import annotations

import importlib.metadata
import logging
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cpkv.errors import ConfigError, TransferError
from cpkv.testing.backends import PeerProcess, peer_processes, pieces
from cpkv.testing.registration import register_cpu_ci
from cpkv.testing.waiting import eventually
from cpkv.transfer import nixl
from cpkv.transfer.backend import Peer, Region, Run, TransferStatus
from cpkv.transfer.nixl import NixlBackend

register_cpu_ci(est_time=11, suite="transfer")

Spawn = Callable[[int], PeerProcess]


@pytest.fixture
def spawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawn]:
    """Peers over TCP: on one host UCX would write into the memory of a process without that process."""
    needs_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")
    with peer_processes("nixl") as start:
        yield start


def needs_nixl() -> None:
    if reason := NixlBackend.why_not():
        pytest.skip(reason)


def filled(num_bytes: int, value: int) -> tuple[np.ndarray, Region]:
    source = np.full(num_bytes, value, np.uint8)
    return source, Region(source.ctypes.data, num_bytes)


def whole(source: Region, receiver: PeerProcess) -> list[Run]:
    return [Run(source.address, receiver.region.address, source.length)]


def polled_to_the_end(backend: NixlBackend, transfer: int, limit_s: float) -> tuple[TransferStatus, float]:
    """The last status, and how long it took."""
    begun = time.monotonic()
    status = backend.wait(transfer, limit_s)
    return status, time.monotonic() - begun


def test_a_stopped_peer_fails_in_bounded_time_and_is_written_to_no_more(spawn: Spawn) -> None:
    size = 12 << 20
    victim, other, (source, region) = spawn(size), spawn(size), filled(size, 1)
    with NixlBackend(transfer_timeout_s=1) as sender:
        sender.register(region)
        first = sender.submit(victim.peer, [Run(region.address, victim.region.address, 4096)])
        assert sender.wait(first, 10).state == "done"
        victim.stop()
        stuck = sender.submit(victim.peer, whole(region, victim))
        while not sender._pending[stuck].cause:
            assert sender.poll(stuck).state == "pending"
        assert "no write has ended for" in sender._pending[stuck].cause and sender.outstanding() > 0
        with pytest.raises(TransferError, match="still read by 1 pending transfers"):
            sender.unregister(region)
        status, took = polled_to_the_end(sender, stuck, 10)
        assert status.state == "failed" and "the peer has stopped or is cut off" in status.cause and took < 5
        assert victim.peer.session_id in status.cause and sender.outstanding() == 0 and sender._agents == 2
        source[:] = 2
        victim.go_on()
        assert 2 not in victim.values(), "what was reported as failed read its source later"
        for receiver in (other, victim):
            again = sender.submit(receiver.peer, whole(region, receiver))
            assert sender.wait(again, 15).state == "done"
            assert receiver.holds(source)


def test_a_rebuild_waits_for_the_writes_of_peers_that_answer(spawn: Spawn) -> None:
    size = 8 << 20
    victim, other, (_, region) = spawn(size), spawn(size), filled(size, 1)
    with NixlBackend(max_outstanding_per_peer=2, transfer_timeout_s=1) as sender:
        sender.register(region)
        for receiver in (victim, other):
            first = sender.submit(receiver.peer, [Run(region.address, receiver.region.address, 4096)])
            assert sender.wait(first, 10).state == "done"
        victim.stop()
        stuck = sender.submit(victim.peer, whole(region, victim))
        good: deque[int] = deque()
        begun = time.monotonic()
        while sender.poll(stuck).state == "pending":
            assert time.monotonic() - begun < 10, "peers that answer put the rebuild off for ever"
            while len(good) < 4 or sender.poll(good[-4]).state != "pending":
                good.append(sender.submit(other.peer, pieces(region, other.region, 1 << 16)))
        assert sender.drain(15) and {sender.poll(transfer).state for transfer in good} == {"done"}
        assert sender._agents == 2


def test_silence_while_this_process_was_stopped_is_not_the_peers(spawn: Spawn) -> None:
    receiver, (_, region) = spawn(16 << 20), filled(16 << 20, 1)
    with NixlBackend() as sender:
        sender.register(region)
        first = sender.submit(receiver.peer, [Run(region.address, receiver.region.address, 4096)])
        assert sender.wait(first, 10).state == "done"
        receiver.stop()
        transfer = sender.submit(receiver.peer, whole(region, receiver))

        def let_pass(seconds: float) -> None:
            for write in sender._writes.values():
                write.started -= seconds
            sender._remotes[receiver.peer.session_id].progress -= seconds
            sender._awake -= seconds

        sender._pumped -= 60
        let_pass(60)
        assert sender.poll(transfer).state == "pending" and sender._pending[transfer].cause == ""
        let_pass(7)
        assert sender.poll(transfer).state == "pending" and "no write has ended" in sender._pending[transfer].cause
        receiver.go_on()
        status = sender.wait(transfer, 10)
        assert status.state == "failed" and "no write has ended" in status.cause and sender._agents == 1


def test_a_peer_that_is_stopped_at_first_contact_is_not_waited_for_longer(
    spawn: Spawn,
) -> None:
    receiver, (source, region) = spawn(1 << 20), filled(1 << 20, 1)
    with NixlBackend(transfer_timeout_s=1) as sender:
        sender.register(region)
        receiver.stop()
        status, took = polled_to_the_end(sender, sender.submit(receiver.peer, whole(region, receiver)), 10)
        assert "has not answered for 0.5 s: it is stopped or cut off" in status.cause and took < 5
        second = sender.submit(receiver.peer, whole(region, receiver))
        assert sender.poll(second).state == "pending", "each transfer waits its own time for an answer"
        receiver.go_on()
        assert sender.wait(second, 10).state == "done", "it answers again"
    assert receiver.holds(source)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NixlBackend, NixlBackend]]:
    """A sender and a receiver in this process, over TCP, where UCX itself would let any write through."""
    needs_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")
    with NixlBackend() as sender, NixlBackend() as receiver:
        yield sender, receiver


def test_memory_registered_and_taken_back_after_contact_is_known(
    pair: tuple[NixlBackend, NixlBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    (_, here), (first, there), (second, later) = filled(8192, 7), filled(8192, 0xFF), filled(8192, 0xFF)
    sender.register(here)
    receiver.register(there)
    peer = Peer(receiver.session_id, (there, later))

    def send(region: Region) -> TransferStatus:
        return sender.wait(sender.submit(peer, [Run(here.address, region.address, 8192)]), 10)

    assert send(there).state == "done"
    with monkeypatch.context() as unheard:
        unheard.setattr(receiver._server, "_answer", lambda reader: None)
        receiver.register(later)
    assert send(later).state == "done" and (second == 7).all(), "the sender did not ask"
    receiver.unregister(there)
    # It is told at once, and heard when the network has brought it.
    link = sender._remotes[receiver.session_id].link
    eventually(lambda: (heard := link.metadata()) is not None and heard.regions == (later,), "the sender has heard it")
    first[:] = 0xFF
    refused = send(there)
    assert f"does not register {there}, or not any more" in refused.cause and refused.state == "failed"
    assert (first == 0xFF).all(), "written into memory that was taken back"
    receiver.register(there)
    assert send(there).state == "done" and (first == 7).all(), "registered anew"


def test_a_write_that_straddles_the_end_of_what_the_peer_registered_is_refused(
    pair: tuple[NixlBackend, NixlBackend],
) -> None:
    sender, receiver = pair
    (_, here), (target, there) = filled(8192, 7), filled(8192, 0xFF)
    sender.register(here)
    receiver.register(Region(there.address, 4096))
    lying = Peer(receiver.session_id, (there,))
    runs = [Run(here.address, there.address, 64), Run(here.address, there.address + 4090, 64)]
    status = sender.wait(sender.submit(lying, runs), 10)
    assert "does not register" in status.cause and f"{there.address + 4090:#x}" in status.cause
    assert (target == 0xFF).all()


SENDER = """
import sys
import numpy as np
from cpkv.transfer.backend import Peer, Region, Run
from cpkv.transfer.nixl import NixlBackend
session_id, address, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
source = np.full(size, 7, np.uint8)
with NixlBackend(transfer_timeout_s=4) as sender:
    sender.register(Region(source.ctypes.data, size))
    peer = Peer(session_id, (Region(address, size),))
    assert sender.wait(sender.submit(peer, [Run(source.ctypes.data, address, 4096)]), 20).state == "done"
    pieces = range(65536, size - 65536, 65536)
    runs = [Run(source.ctypes.data + first, address + first, 65000) for first in pieces]
    print(sender.wait(sender.submit(peer, runs), 20).state, flush=True)
"""


def test_nothing_is_written_after_the_receivers_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind 28: by a sender that was stopped in the middle and goes on, by the transports taken by default."""
    needs_nixl()
    monkeypatch.delenv("UCX_TLS", raising=False)
    size = 256 << 20
    memory, region = filled(size, 0)
    with NixlBackend(transfer_timeout_s=4) as receiver:
        receiver.register(region)
        arguments = (receiver.session_id, str(region.address), str(size))
        with subprocess.Popen([sys.executable, "-c", SENDER, *arguments], stdout=subprocess.PIPE, text=True) as sender:
            try:
                eventually(lambda: memory[4 * 65536] == 7, "the transfer has begun")
                sender.send_signal(signal.SIGSTOP)
                receiver.close()
                landed = int(np.count_nonzero(memory))
                assert landed < size // 2, "it was stopped too late to tell"
                sender.send_signal(signal.SIGCONT)
                assert sender.communicate(timeout=30)[0] == "failed\n"
            finally:
                sender.kill()
    assert int(np.count_nonzero(memory)) == landed


@pytest.mark.parametrize(
    ("transports", "refused"),
    [("", True), ("all", True), ("tcp,sm", True), ("^tcp", True), ("^cma", False), ("^sm", False), ("tcp,self", False)],
)
def test_transports_that_write_without_the_receiver_are_refused(
    monkeypatch: pytest.MonkeyPatch, transports: str, refused: bool
) -> None:
    needs_nixl()
    monkeypatch.setenv("UCX_TLS", transports or "shm")
    assert ("(cma); unset UCX_TLS, or set it to '^cma'" in (NixlBackend.why_not() or "")) == refused


def test_close_in_the_middle_reads_nothing_afterwards(spawn: Spawn) -> None:
    size = 24 << 20
    receiver, (source, region) = spawn(size), filled(size, 1)
    sender = NixlBackend()
    sender.register(region)
    transfer = sender.submit(receiver.peer, pieces(region, receiver.region, 1 << 20))
    while sender.outstanding() == 0:
        assert sender.poll(transfer).state == "pending"
    sender.close()
    source[:] = 2
    assert "closed before" in sender.poll(transfer).cause
    assert 2 not in receiver.values()


def test_nothing_is_printed_and_logging_stays_as_it_was() -> None:
    needs_nixl()
    program = (
        "import logging\nfrom cpkv.transfer.nixl import NixlBackend as B\nB().close()\n"
        "assert logging.raiseExceptions and not logging.getLogger('nixl').handlers\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def on_wheels(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        found = versions.get(name.replace("-", "_"))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(nixl, "_module", lambda: logging)


def test_wheels_that_do_not_fit_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "pip uninstall -y nixl nixl-cu12, then pip install 'cpkv[nixl]'"
    on_wheels(monkeypatch, nixl_cu12="1.5.1", nixl_cu13="1.5.1")
    both = str(NixlBackend.why_not())
    assert both.startswith("nixl-cu13 and nixl-cu12 are both installed") and both.endswith(remedy)
    on_wheels(monkeypatch, nixl_cu12="1.5.1")
    other = str(NixlBackend.why_not())
    assert other.startswith("nixl-cu12 is installed and cpkv uses nixl-cu13") and other.endswith(remedy)
    on_wheels(monkeypatch, nixl_cu13="1.4.9")
    assert "nixl-cu13 1.4.9 is installed and cpkv was tried with 1.5.1" in str(NixlBackend.why_not())
    for good in ("1.5.1", "1.10.0"):
        on_wheels(monkeypatch, nixl_cu13=good)
        assert NixlBackend.why_not() is None


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'nixl_cu13'"), r"not installed.*pip install 'cpkv\[nixl\]'"),
        (ImportError("libucp.so.0: cannot open shared object file"), r"cannot be loaded \(libucp.*pip uninstall"),
    ],
)
def test_a_failed_import_is_explained_and_there_is_no_fallback(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, says: str
) -> None:
    def fail() -> None:
        raise error

    on_wheels(monkeypatch)
    monkeypatch.setattr(nixl, "_module", fail)
    with pytest.raises(TransferError, match=says) as refusal:
        NixlBackend()
    assert NixlBackend.why_not() == str(refusal.value)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="transfer_timeout_s is 0; use more than 0"):
        NixlBackend(transfer_timeout_s=0)
    needs_nixl()
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(TransferError, match=f"host '{host}' does not resolve or is no address of this machine"):
            NixlBackend(host=host)
