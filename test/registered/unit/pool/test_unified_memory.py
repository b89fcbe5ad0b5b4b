"""All ranks' pools in one range: every rank reads every byte, writes only its own, and nothing is left afterwards."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpkv.errors import ConfigError, CpkvError, HandshakeError
from cpkv.pool import sealed_segment, unified_memory
from cpkv.pool.sealed_segment import (
    RangeShape,
    available_bytes,
    create_segment,
    host_identity,
    round_segment,
    seal_segment,
    why_not_unified,
)
from cpkv.pool.unified_memory import RangeMapping, UnifiedRange, open_unified_pools
from cpkv.testing.bits import assert_same_bits
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=9, suite="unit")

UNITS = [1152, 656, 132 * 64, 100]
SHAPES = (RangeShape.of("latent", 1152 * 33, 1152, tail_bytes=5000), RangeShape.of("index", 132 * 64 * 3, 132 * 64))


def open_all(
    folder: Path,
    cp_size: int,
    shapes: Callable[[int], tuple[RangeShape, RangeShape]] = lambda rank: SHAPES,
    poison: bool = False,
) -> list[Any]:
    """Both ranges of each rank, ranks as threads; or what a rank raised."""
    barrier = threading.Barrier(cp_size)

    def run(rank: int) -> Any:
        try:
            return open_unified_pools(
                rank,
                cp_size,
                shapes(rank),
                {},
                "secret",
                folder,
                lambda label: print(label, barrier.wait(10)),
                poison,
                10.0,
            )
        except (CpkvError, threading.BrokenBarrierError) as error:
            barrier.abort()
            return error.with_traceback(None)

    with ThreadPoolExecutor(cp_size) as pool:
        return list(pool.map(run, range(cp_size)))


def maps_of(tensor: torch.Tensor) -> list[tuple[str, str]]:
    """(rights, name) of each mapping that a tensor touches, in order."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        first, last = (int(word, 16) for word in addresses.split("-"))
        if first < end and last > start:
            found.append((rights, "".join(name)))
    return found


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_every_rank_reads_what_every_rank_has_written(tmp_path: Path, cp_size: int) -> None:
    ranks = open_all(tmp_path, cp_size)
    assert list(tmp_path.iterdir()) == []
    for part, shape in enumerate(SHAPES):
        written = [random_bytes(shape.used_bytes, 10 * part + rank) for rank in range(cp_size)]
        for rank, ranges in enumerate(ranks):
            assert ranges[part].own.numel() == shape.used_bytes
            ranges[part].own.copy_(written[rank])
        for rank, ranges in enumerate(ranks):
            memory = ranges[part].memory
            assert memory.dtype == torch.uint8 and memory.numel() == shape.total_bytes(cp_size)
            for owner in range(cp_size):
                start = owner * shape.segment_bytes
                seen = memory[start : start + shape.segment_bytes]
                assert_same_bits(seen[: shape.used_bytes], written[owner], f"rank {owner}'s bytes at rank {rank}")
                assert not bool(seen[shape.used_bytes :].any())
                assert_same_bits(ranges[part].segment(owner), written[owner], f"rank {owner}'s segment")


def test_only_the_own_segment_and_the_tail_are_writable(tmp_path: Path) -> None:
    """By the rights of each mapping; s is shared, p is private."""
    ranks = open_all(tmp_path, 4)
    for rank, (latent, index) in enumerate(ranks):
        wanted = ["rw-s" if owner == rank else "r--s" for owner in range(4)]
        assert [rights for rights, _ in maps_of(index.memory)] == wanted
        assert [rights for rights, _ in maps_of(latent.memory)] == [*wanted, "rw-p"]
        assert all(name == "/memfd:cpkv-index (deleted)" for _, name in maps_of(index.memory))


def test_the_tail_is_private_and_in_the_same_range(tmp_path: Path) -> None:
    ranks = open_all(tmp_path, 3)
    for rank, (latent, index) in enumerate(ranks):
        assert latent.tail.numel() == round_segment(5000, 1152)
        assert latent.tail.data_ptr() == latent.memory.data_ptr() + 3 * SHAPES[0].segment_bytes
        assert index.tail.numel() == 0
        latent.tail.fill_(rank + 1)
    for rank, (latent, _) in enumerate(ranks):
        assert bool((latent.tail == rank + 1).all())
        assert not bool(latent.memory[: 3 * SHAPES[0].segment_bytes].any())


def test_poison_fills_segments_and_tails(tmp_path: Path) -> None:
    for ranges in open_all(tmp_path, 2, poison=True):
        for part in ranges:
            assert bool((part.memory == 0xFF).all())


@pytest.mark.parametrize("unit_bytes", UNITS)
def test_segments_start_at_whole_rows(tmp_path: Path, unit_bytes: int) -> None:
    """Row numbers run through: row k of rank r is row r * rows per segment + k of the whole."""
    shape = RangeShape.of("latent", unit_bytes * 7, unit_bytes, tail_bytes=unit_bytes)
    assert shape.segment_bytes % unit_bytes == 0 and shape.segment_bytes % mmap.PAGESIZE == 0
    assert shape.used_bytes <= shape.segment_bytes < shape.used_bytes + unit_bytes * mmap.PAGESIZE
    ranks = open_all(tmp_path, 3, lambda rank: (shape, SHAPES[1]))
    rows_per_segment = shape.segment_bytes // unit_bytes
    for rank, (latent, _) in enumerate(ranks):
        latent.own.view(-1, unit_bytes)[4] = rank + 1
        latent.tail.view(-1, unit_bytes)[0] = 9
    for latent, _ in ranks:
        rows = latent.memory.view(-1, unit_bytes)
        chosen = torch.tensor([owner * rows_per_segment + 4 for owner in range(3)] + [3 * rows_per_segment])
        assert rows.index_select(0, chosen).unique(dim=1).flatten().tolist() == [1, 2, 3, 9]
        assert len(rows.any(dim=1).nonzero()) == 4


@pytest.mark.parametrize("num_bytes", [1, 99, 4096, 102400, 102401])
def test_round_segment_is_the_smallest_that_fits(num_bytes: int) -> None:
    wanted = next(
        size for size in range(num_bytes, num_bytes + 200000) if size % 100 == 0 and size % mmap.PAGESIZE == 0
    )
    assert round_segment(num_bytes, 100) == wanted
    assert round_segment(0, 100) == 0


@pytest.mark.parametrize("last", ["memory", "own", "view"])
def test_a_range_is_mapped_as_long_as_a_tensor_lives(tmp_path: Path, last: str) -> None:
    """And every descriptor is closed as soon as the ranges are mapped."""
    descriptors = len(os.listdir("/proc/self/fd"))
    [(latent, index)] = open_all(tmp_path, 1)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    latent.own[-1] = 7
    start = latent.memory.data_ptr()
    kept = {"memory": latent.memory, "own": latent.own, "view": latent.own.view(torch.int32)[-3:].view(-1, 1)}[last]
    del latent, index
    gc.collect()
    assert any("memfd:cpkv-latent" in name for _, name in maps_of(kept)), "unmapped under a living tensor"
    assert not any("memfd:cpkv-index" in line for line in Path("/proc/self/maps").read_text().splitlines())
    if last != "memory":
        assert int(kept.view(torch.uint8).flatten()[-1]) == 7
    del kept
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:cpkv" not in maps
    assert f"{start:x}-" not in maps


def test_the_owner_alone_writes_and_nobody_changes_the_size() -> None:
    shape = SHAPES[0]
    descriptor = create_segment(shape, poison=False)
    mapping = RangeMapping(shape, 0, 1)
    try:
        mapping.map_segment(0, descriptor)
        seal_segment(descriptor)
        own = UnifiedRange(mapping).own
        own.fill_(3)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, shape.segment_bytes)
        with mmap.mmap(descriptor, shape.segment_bytes, prot=mmap.PROT_READ) as seen:
            assert seen[: shape.used_bytes] == b"\3" * shape.used_bytes
        for size in (0, shape.segment_bytes - 1, shape.segment_bytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        # A mapping that is read-only stays so.
        with pytest.raises(ConfigError, match="not permitted"):
            RangeMapping(shape, 0, 1).map_segment(0, descriptor)
    finally:
        os.close(descriptor)


def test_a_pool_that_the_machine_cannot_hold_is_refused_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank alone would fit; those of the host together do not. The pools are small, lest a failure take all."""
    assert 0 < available_bytes() < 1 << 50
    needed = 4 * sum(shape.segment_bytes + shape.rounded_tail_bytes for shape in SHAPES)
    monkeypatch.setattr(sealed_segment, "available_bytes", lambda: needed - 1)
    outcomes = open_all(tmp_path, 4)
    refused = [str(outcome) for outcome in outcomes if isinstance(outcome, ConfigError)]
    assert len(refused) + sum(isinstance(outcome, threading.BrokenBarrierError) for outcome in outcomes) == 4
    assert refused and f"needs {needed} bytes" in refused[0] and f"{needed - 1} bytes are available" in refused[0]
    assert "lower --num-pages" in refused[0]
    monkeypatch.setattr(sealed_segment, "available_bytes", lambda: needed)
    assert all(isinstance(outcome, tuple) for outcome in open_all(tmp_path, 4))
    monkeypatch.setattr(sealed_segment, "available_bytes", lambda: SHAPES[0].segment_bytes - 1)
    with pytest.raises(ConfigError, match=f"needs {SHAPES[0].segment_bytes} bytes .*lower --num-pages"):
        create_segment(SHAPES[0], poison=False)


def test_when_another_rank_fails_everything_is_unmapped_at_once(tmp_path: Path) -> None:
    """Not only when the error, whose traceback holds the mappings, is forgotten."""

    def fence(label: str) -> None:
        if label == "pools are mapped":
            assert "memfd:cpkv-latent" in Path("/proc/self/maps").read_text()
            raise HandshakeError("rank 1 has refused")

    with pytest.raises(HandshakeError, match="rank 1") as caught:
        open_unified_pools(0, 1, SHAPES, {}, "secret", tmp_path, fence, False)
    assert caught.tb is not None
    assert "memfd:cpkv" not in Path("/proc/self/maps").read_text()
    assert not any("memfd:cpkv" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_memory_that_fails_to_come_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    # The trial passes, the pool does not.
    monkeypatch.setattr(unified_memory, "why_not_unified", lambda: None)
    monkeypatch.setattr("os.posix_fallocate", refuse)
    [outcome] = open_all(tmp_path, 1)
    assert isinstance(outcome, ConfigError)
    assert f"needs {SHAPES[0].segment_bytes} bytes" in str(outcome) and "lower --num-pages" in str(outcome)


def test_addresses_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rank 0 cannot map .* latent range .*lower --num-pages"):
        RangeMapping(RangeShape.of("latent", 1 << 46, 1152), 0, 8)


def test_ranks_of_other_shapes_are_refused_and_nothing_stays_mapped(tmp_path: Path) -> None:
    other = (RangeShape.of("latent", 1152 * 99, 1152, tail_bytes=5000), SHAPES[1])
    outcomes = open_all(tmp_path, 3, lambda rank: other if rank == 2 else SHAPES)
    for rank in range(2):
        assert isinstance(outcomes[rank], HandshakeError)
        assert "rank 2" in str(outcomes[rank]) and "used_bytes is 114048 there and 38016 here" in str(outcomes[rank])
    assert "memfd:cpkv" not in Path("/proc/self/maps").read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "shape",
    [
        RangeShape("latent", 4096, 1152, 1152, 0),
        RangeShape("latent", 36864, 40000, 1152, 0),
        RangeShape("latent", 36864, 0, 1152, 0),
        RangeShape("latent", 36864, 1152, 0, 0),
        RangeShape("latent", 36864, 1152, 1152, -1),
    ],
)
def test_a_shape_that_is_not_rounded_is_refused(shape: RangeShape) -> None:
    with pytest.raises(ConfigError, match="RangeShape"):
        shape.check()


def test_a_system_that_cannot_share_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_unified() is None
    assert host_identity() == host_identity() != ""
    monkeypatch.setattr(sealed_segment, "NEEDED_SEALS", {"none": fcntl.F_SEAL_SHRINK})
    assert "lets a sealed memory file be written" in str(why_not_unified())
    monkeypatch.setattr(sealed_segment, "NEEDED_SEALS", {"unknown": 0x4000})
    assert "F_SEAL_FUTURE_WRITE" in str(why_not_unified())
    monkeypatch.setattr(sealed_segment, "sys", SimpleNamespace(platform="plan9"))
    assert "needs Linux" in str(why_not_unified())
    [outcome] = open_all(tmp_path, 1)
    assert isinstance(outcome, ConfigError) and "rank 0 cannot use --kv-view unified" in str(outcome)


RANK_PROCESS = """
import sys
from pathlib import Path
import torch
from cpkv.pool.sealed_segment import RangeShape
from cpkv.pool.unified_memory import open_unified_pools

def fence(label):
    print(label, flush=True)
    if sys.stdin.readline() != label + "\\n":
        raise SystemExit("the other rank has gone")

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
shapes = (RangeShape.of("latent", 1152 * 33, 1152, tail_bytes=5000), RangeShape.of("index", 8448, 8448))
latent, index = open_unified_pools(rank, 2, shapes, {"page_size": "64"}, "secret", folder, fence, False)
latent.own.fill_(rank + 1)
index.own.fill_(rank + 11)
fence("written")
seen = [sorted(set(part.segment(owner).tolist())) for part in (latent, index) for owner in range(2)]
fence(str(seen))
if rank == 1:
    latent.segment(0)[5] = 9
print("lives", flush=True)
"""


def test_two_processes_share_and_a_write_into_the_other_ends_the_writer(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROCESS, str(rank), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": ""},
        )
        for rank in range(2)
    ]
    try:
        labels = []
        for _ in range(5):
            said = [rank.stdout.readline() for rank in ranks if rank.stdout]
            assert said[0] == said[1] != "", said
            labels.append(said[0].strip())
            for rank in ranks:
                assert rank.stdin
                rank.stdin.write(said[0])
                rank.stdin.flush()
        assert labels[-2:] == ["written", "[[1], [2], [11], [12]]"]
        outputs = [rank.communicate(timeout=30)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, -11]
        assert outputs == ["lives\n", ""]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe:
                    pipe.close()
