"""Ranks hand each other descriptors; whoever differs, lies, stays silent or is gone is refused by its rank.

Ranks are threads here, each with its own sockets; rank 2 of 3 is the one that does wrong.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpkv.errors import ConfigError, CpkvError, HandshakeError, ProtocolError, TransferError, WorkerDiedError
from cpkv.pool import descriptor_exchange
from cpkv.pool.descriptor_exchange import exchange_descriptors
from cpkv.pool.sealed_segment import RangeShape, create_segment, seal_segment
from cpkv.pool.segment_hello import EXCHANGE_VERSION, SegmentDescription
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

SHAPES = (RangeShape.of("latent", 5000, 100), RangeShape.of("index", 132 * 64, 132 * 64))
CP_SIZE = 3
BAD = 2
Rank = Callable[[int, Path, Callable[[str], None]], Any]


def describe(rank: int, **changes: Any) -> SegmentDescription:
    ours = SegmentDescription(EXCHANGE_VERSION, "secret", rank, CP_SIZE, "host a", SHAPES, {"page_size": "64"})
    return msgspec.structs.replace(ours, **changes)


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def segments() -> list[int]:
    found = [create_segment(shape, poison=False) for shape in SHAPES]
    for descriptor in found:
        seal_segment(descriptor)
    return found


def identities(descriptors: list[int]) -> list[tuple[int, int]]:
    return [(os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino) for descriptor in descriptors]


def take_part(
    rank: int,
    folder: Path,
    fence: Callable[[str], None],
    *,
    own: Callable[[], list[int]] = segments,
    claimed: int | None = None,
    timeout_s: float = 10.0,
    **changes: Any,
) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]]:
    """Exchange as a rank does; the files that went in, and those that came out by rank."""
    descriptors = own()
    try:
        by_rank = exchange_descriptors(
            rank,
            CP_SIZE,
            folder,
            describe(rank if claimed is None else claimed, **changes),
            descriptors,
            fence,
            timeout_s,
        )
        outcome = identities(descriptors), [identities(found) for found in by_rank]
        for owner, found in enumerate(by_rank):
            for descriptor in found:
                if owner != rank:
                    assert not os.get_inheritable(descriptor)
                    os.close(descriptor)
        return outcome
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def run_ranks(folder: Path, bad: Rank = take_part, good: Rank = take_part) -> list[Any]:
    """What each of three ranks returned or raised."""
    barrier = threading.Barrier(CP_SIZE)

    def run(rank: int) -> Any:
        try:
            return (bad if rank == BAD else good)(rank, folder, lambda label: print(label, barrier.wait(10)))
        except CpkvError as error:
            # A traceback would hold sockets and descriptors.
            return error.with_traceback(None)

    with ThreadPoolExecutor(CP_SIZE) as pool:
        outcomes = list(pool.map(run, range(CP_SIZE)))
    assert list(folder.iterdir()) == [], "a socket is left"
    return outcomes


def check_refused(outcomes: list[Any], kind: type[CpkvError], *words: str) -> None:
    for rank in range(BAD):
        assert type(outcomes[rank]) is kind, outcomes[rank]
        for word in (f"rank {BAD}", *words):
            assert word in str(outcomes[rank])


def test_every_rank_gets_the_files_of_every_rank(tmp_path: Path) -> None:
    """The folder's path is longer than a socket's path may be."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    outcomes = run_ranks(folder)
    sent = [own for own, _ in outcomes]
    assert len({file for files in sent for file in files}) == CP_SIZE * len(SHAPES)
    assert all(received == sent for _, received in outcomes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 7}, ["version is 7 there and 1 here"]),
        ({"secret": "other"}, ["secret"]),
        ({"host": "host b"}, ["host is host b there and host a here"]),
        ({"cp_size": 4}, ["cp_size is 4 there and 3 here"]),
        (
            {"geometry": {"page_size": "32", "extra": "1"}},
            ["geometry page_size is 32 there and 64 here", "geometry extra is 1 there and absent here"],
        ),
        (
            {"shapes": (SHAPES[0], RangeShape.of("index", 132 * 32, 132 * 32))},
            ["range 1 unit_bytes is 4224 there and 8448 here", "range 1 used_bytes is 4224 there and 8448 here"],
        ),
        ({"shapes": SHAPES[:1]}, ["number of ranges is 1 there and 2 here"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_rank_that_describes_other_memory_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    def bad(rank: int, folder: Path, fence: Callable[[str], None]) -> Any:
        return take_part(rank, folder, fence, **changes)

    outcomes = run_ranks(tmp_path, bad)
    check_refused(outcomes, HandshakeError, *words)
    assert type(outcomes[BAD]) is HandshakeError


def test_a_rank_that_calls_itself_by_another_rank_is_refused(tmp_path: Path) -> None:
    outcomes = run_ranks(tmp_path, lambda *args: take_part(*args, claimed=0))
    # Rank 1 hears rank 0 twice, in whatever order; rank 0 hears its own rank.
    assert "rank 0" in str(outcomes[1]) and "twice" in str(outcomes[1])
    assert "only ranks [1, 2] are expected" in str(outcomes[0])


def unsealed() -> list[int]:
    return [create_segment(shape, poison=False) for shape in SHAPES]


def truncated() -> list[int]:
    latent, index = unsealed()
    os.ftruncate(latent, SHAPES[0].segment_bytes // 2)
    seal_segment(latent)
    return [latent, index]


def sparse() -> list[int]:
    descriptor = os.memfd_create("cpkv-sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SHAPES[0].segment_bytes)
    seal_segment(descriptor)
    return [descriptor, *one_index()]


def one_index() -> list[int]:
    index = create_segment(SHAPES[1], poison=False)
    seal_segment(index)
    return [index]


def half_sealed() -> list[int]:
    latent = create_segment(SHAPES[0], poison=False)
    fcntl.fcntl(latent, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return [latent, *one_index()]


def plain_file() -> list[int]:
    return [os.open(__file__, os.O_RDONLY), *one_index()]


def pipe() -> list[int]:
    reader, writer = os.pipe()
    os.close(writer)
    return [reader, *one_index()]


def too_few() -> list[int]:
    return one_index()


def far_too_many() -> list[int]:
    return [descriptor for _ in range(20) for descriptor in one_index()]


def swapped() -> list[int]:
    return segments()[::-1]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (truncated, [f"has {SHAPES[0].segment_bytes // 2} bytes instead of {SHAPES[0].segment_bytes}"]),
        (unsealed, ["not sealed: F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE, F_SEAL_SEAL missing"]),
        (half_sealed, ["not sealed: F_SEAL_FUTURE_WRITE missing"]),
        (sparse, ["0 of its"]),
        (plain_file, ["file on a disk"]),
        (pipe, ["no memory file"]),
        (swapped, ["instead of"]),
        (too_few, ["1 descriptors came, not 2"]),
        (far_too_many, ["descriptors came, not 2"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_must_not_be_mapped_is_refused(tmp_path: Path, own: Callable[[], list[int]], words: list[str]) -> None:
    """A file that is shorter than it should be would end a reader with SIGBUS, long after the start."""
    assert SHAPES[0].segment_bytes != SHAPES[1].segment_bytes

    def bad(rank: int, folder: Path, fence: Callable[[str], None]) -> Any:
        return take_part(rank, folder, fence, own=own)

    check_refused(run_ranks(tmp_path, bad), HandshakeError, *words)


def caller(rank: int, folder: Path, fence: Callable[[str], None], frame: bytes) -> None:
    """Listens and sends bytes of its own making to ranks 0 and 1, then closes."""
    path = folder / f"pool-{rank}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(CP_SIZE)
        fence("pool sockets listen")
        for peer in range(BAD):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(str(folder / f"pool-{peer}.sock"))
                connection.sendall(frame)
        fence("the others have finished")
    path.unlink()


@pytest.mark.parametrize(
    ("frame", "kind", "words"),
    [
        (b"", WorkerDiedError, ["closed its socket"]),
        (b"\0\0\0\x09half", WorkerDiedError, ["closed its socket"]),
        (b"\xff\xff\xff\xff", ProtocolError, ["4294967295 bytes is longer than 65536"]),
        (b"\0\0\0\x02\xc1\xc1", ProtocolError, ["malformed"]),
        (b"\0\0\0\x02\x80\x80", ProtocolError, ["malformed"]),
    ],
)
def test_a_peer_that_closes_or_sends_rubbish_is_named(
    tmp_path: Path, frame: bytes, kind: type[CpkvError], words: list[str]
) -> None:
    def good(rank: int, folder: Path, fence: Callable[[str], None]) -> Any:
        try:
            return take_part(rank, folder, fence)
        finally:
            fence("the others have finished")

    outcomes = run_ranks(tmp_path, lambda rank, where, fence: caller(rank, where, fence, frame), good)
    check_refused(outcomes, kind, *words)


@pytest.mark.parametrize("connects", [False, True], ids=["never calls", "calls and says nothing"])
def test_a_silent_rank_is_named_within_the_limit(tmp_path: Path, connects: bool) -> None:
    def silent(rank: int, folder: Path, fence: Callable[[str], None]) -> None:
        path = folder / f"pool-{rank}.sock"
        callers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(BAD)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(CP_SIZE)
            fence("pool sockets listen")
            for peer, connection in enumerate(callers):
                if connects:
                    connection.connect(str(folder / f"pool-{peer}.sock"))
            fence("the others have finished")
        for connection in callers:
            connection.close()
        path.unlink()

    def good(rank: int, folder: Path, fence: Callable[[str], None]) -> Any:
        try:
            return take_part(rank, folder, fence, timeout_s=0.3)
        finally:
            fence("the others have finished")

    check_refused(run_ranks(tmp_path, silent, good), TransferError, "within 0.3 s")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    outcomes = run_ranks(tmp_path, lambda rank, folder, fence: fence("pool sockets listen"))
    check_refused(outcomes, WorkerDiedError, "pool-2.sock", "another host")


@pytest.mark.parametrize("end", ["calling", "called"])
def test_another_user_is_refused_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """The caller looks before it sends secret and memory, the called before it believes a hello."""
    real = descriptor_exchange._credentials

    def credentials(connection: socket.socket) -> tuple[int, int]:
        pid, uid = real(connection)
        # Only who listens has a name.
        seen_by = "calling" if connection.getpeername() else "called"
        return pid, uid + (seen_by == end)

    monkeypatch.setattr(descriptor_exchange, "_credentials", credentials)
    word = {"calling": "which rank", "called": "called, and we run as"}[end]
    for outcome in run_ranks(tmp_path):
        assert type(outcome) is HandshakeError and word in str(outcome) and "user" in str(outcome)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pool-0.sock").touch()
    with pytest.raises(ConfigError, match=r"rank 0 cannot listen .*folder of its own"):
        take_part(0, tmp_path, lambda label: None)
    assert (tmp_path / "pool-0.sock").exists(), "another run's socket was removed"


def test_a_description_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="65536 are allowed"):
        take_part(0, tmp_path, lambda label: None, geometry={"much": "x" * 70000})
