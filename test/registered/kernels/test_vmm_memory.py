"""All ranks' pools in one range of a GPU: every rank reads every byte, writes only its own, and gives all back.

Ranks are processes where the driver must keep them apart, and threads elsewhere. On a machine with several GPUs they
are spread over them.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cpkv.errors import ConfigError, CpkvError, HandshakeError
from cpkv.layout.pool_geometry import PoolGeometry
from cpkv.layout.row_format import RowFormat
from cpkv.ops.words import select_rows
from cpkv.pool.sealed_segment import RangeShape
from cpkv.pool.unified_memory import SealedMemory, UnifiedRange, open_unified_pools
from cpkv.pool.unified_pool import UnifiedPool
from cpkv.pool.vmm_memory import VmmMapping, VmmMemory, why_not_vmm
from cpkv.testing.bits import assert_same_bits, first_difference
from cpkv.testing.registration import register_cuda_ci

register_cuda_ci(est_time=25, suite="kernels", num_gpus=1)

CP_SIZE = 4


def shapes(page_bytes: int) -> tuple[RangeShape, RangeShape]:
    """Segments that are not full, of a row that is no power of two."""
    return (
        RangeShape.of("latent", 656 * 5001, 656, 656 * 100, page_bytes),
        RangeShape.of("index", 132 * 64 * 301, 132 * 64, page_bytes=page_bytes),
    )


def written_by(rank: int, shape: RangeShape) -> torch.Tensor:
    seed = 10 * rank + len(shape.name)
    return torch.randint(0, 256, (shape.used_bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank % torch.cuda.device_count())


# What a rank does that is a process of its own.


def fence(label: str) -> None:
    print(label, flush=True)
    if sys.stdin.readline() != label + "\n":
        raise SystemExit("another rank has gone")


def open_and_write(rank: int, cp_size: int, folder: Path) -> tuple[UnifiedRange, UnifiedRange]:
    memory = VmmMemory(device_of(rank))
    ranges = open_unified_pools(
        rank, cp_size, shapes(memory.page_bytes), {}, "secret", folder, fence, True, memory=memory
    )
    for part in ranges:
        assert bool((part.memory == 0xFF).all()), "not poisoned"
    fence("poison was seen")
    for part in ranges:
        part.own.copy_(written_by(rank, part.shape))
    ranges[0].tail.fill_(rank + 1)
    torch.cuda.synchronize(device_of(rank))
    fence("written")
    return ranges


def read_all(rank: int, folder: Path) -> dict[str, str]:
    """By what was looked at, what is wrong; empty when nothing is."""
    seen = {}
    for part in open_and_write(rank, CP_SIZE, folder):
        shape, unit = part.shape, part.shape.unit_bytes
        written = [written_by(owner, shape) for owner in range(CP_SIZE)]
        for owner in range(CP_SIZE):
            seen[f"{shape.name} segment {owner}"] = first_difference(part.segment(owner).cpu(), written[owner])
        rows = part.memory[: part.memory.numel() // unit * unit].view(-1, unit)
        per_segment, used = shape.segment_bytes // unit, shape.used_bytes // unit
        numbers = torch.cat([owner * per_segment + torch.arange(used) for owner in range(CP_SIZE)])
        order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(rank))
        found = torch.empty(len(order), unit, dtype=torch.uint8, device=rows.device)
        select_rows(rows, numbers[order].to(rows.device), found)
        wanted = torch.cat([content.view(-1, unit) for content in written])[order]
        seen[f"{shape.name} rows"] = first_difference(found.cpu(), wanted)
        for owner in range(CP_SIZE):
            unused = part.memory[owner * shape.segment_bytes + shape.used_bytes : (owner + 1) * shape.segment_bytes]
            seen[f"{shape.name} unused {owner}"] = "" if bool((unused == 0xFF).all()) else "written"
        seen[f"{shape.name} device"] = "" if part.memory.device == device_of(rank) else str(part.memory.device)
    return seen


def read_tail(rank: int, folder: Path) -> dict[str, str]:
    latent, index = open_and_write(rank, CP_SIZE, folder)
    rows = latent.memory.view(-1, 656)
    first = CP_SIZE * latent.shape.segment_bytes // 656
    at = torch.arange(first, len(rows), device=rows.device)
    values = rows.index_select(0, at).unique().tolist()
    return {
        "tail": "" if bool((latent.tail == rank + 1).all()) else "another rank's",
        "tail by rows": "" if values == [rank + 1] else str(values),
        "no tail": "" if index.tail.numel() == 0 else "there is one",
    }


def write_into_another(rank: int, folder: Path) -> dict[str, str]:
    """Rank 1 writes where rank 0 alone may; rank 0 looks after rank 1 has ended."""
    latent, _ = open_and_write(rank, 2, folder)
    if rank == 1:
        latent.segment(0)[5] = 9
        torch.cuda.synchronize(device_of(rank))
        return {"write": "it was let through"}
    fence("rank 1 has ended")
    written = [written_by(owner, latent.shape) for owner in range(2)]
    return {f"segment {owner}": first_difference(latent.segment(owner).cpu(), written[owner]) for owner in range(2)}


TASKS: dict[str, Callable[[int, Path], dict[str, str]]] = {
    task.__name__: task for task in (read_all, read_tail, write_into_another)
}


# What the test does with them.


class Ranks:
    """Processes that run one task, in step."""

    def __init__(self, task: Callable[[int, Path], dict[str, str]], cp_size: int, folder: Path) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, task.__name__, str(rank), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(folder / f"errors-{rank}").open("w"),
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(cp_size)
        ]
        self._folder = folder

    def errors(self, rank: int) -> str:
        return (self._folder / f"errors-{rank}").read_text()

    def say(self, rank: int) -> str:
        stream = self.processes[rank].stdout
        assert stream
        return stream.readline().strip()

    def hear(self, rank: int, label: str) -> None:
        stream = self.processes[rank].stdin
        assert stream
        stream.write(label + "\n")
        stream.flush()

    def step_until(self, last: str) -> None:
        """Lead all ranks through their fences up to the one with this label."""
        label = ""
        while label != last:
            said = [self.say(rank) for rank in range(len(self.processes))]
            label = said[0]
            wrong = "\n".join(self.errors(rank) for rank in range(len(said)) if said[rank] != label or not label)
            assert not wrong and label, f"{said}\n{wrong}"
            for rank in range(len(self.processes)):
                self.hear(rank, label)

    def result(self, rank: int) -> dict[str, str]:
        answer = self.say(rank)
        assert answer, self.errors(rank)
        return json.loads(answer)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Callable[[int, Path], dict[str, str]], int], Ranks]]:
    started: list[Ranks] = []

    def start(task: Callable[[int, Path], dict[str, str]], cp_size: int) -> Ranks:
        started.append(Ranks(task, cp_size, tmp_path))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def run_threads(work: Callable[[int, Callable[[str], None]], Any], cp_size: int) -> list[Any]:
    """What each rank returned or raised, ranks as threads of this process."""
    barrier = threading.Barrier(cp_size)

    def run(rank: int) -> Any:
        try:
            return work(rank, lambda label: print(label, barrier.wait(30)))
        except (CpkvError, threading.BrokenBarrierError) as error:
            barrier.abort()
            return error.with_traceback(None)

    with ThreadPoolExecutor(cp_size) as pool:
        return list(pool.map(run, range(cp_size)))


def open_threads(folder: Path, memories: Sequence[VmmMemory | SealedMemory]) -> list[Any]:
    def work(rank: int, fence: Callable[[str], None]) -> Any:
        memory = memories[rank]
        return open_unified_pools(
            rank, len(memories), shapes(memory.page_bytes), {}, "secret", folder, fence, False, memory=memory
        )

    return run_threads(work, len(memories))


def free_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.parametrize("task", [read_all, read_tail])
def test_four_processes_see_each_other_and_their_own_tail(start: Any, task: Any) -> None:
    ranks = start(task, CP_SIZE)
    ranks.step_until("written")
    for rank in range(CP_SIZE):
        result = ranks.result(rank)
        assert len(result) >= 3 and not any(result.values()), f"rank {rank}: {result}"


def test_a_write_into_another_rank_is_refused_and_harms_only_the_writer(start: Any) -> None:
    ranks = start(write_into_another, 2)
    ranks.step_until("written")
    said = ranks.say(1)
    assert ranks.processes[1].wait(60) != 0 and not said, said
    assert "CUDA error" in ranks.errors(1)
    assert ranks.say(0) == "rank 1 has ended", ranks.errors(0)
    ranks.hear(0, "rank 1 has ended")
    assert ranks.result(0) == {"segment 0": "", "segment 1": ""}


@pytest.mark.parametrize("last", ["memory", "own", "view"])
def test_memory_comes_back_when_the_last_tensor_goes(tmp_path: Path, last: str) -> None:
    # The first round loads kernels, which take memory for good.
    open_threads(tmp_path, [VmmMemory("cuda:0")])
    before, descriptors = free_bytes(), len(os.listdir("/proc/self/fd"))
    [(latent, index)] = open_threads(tmp_path, [VmmMemory("cuda:0")])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    held = sum(part.memory.numel() for part in (latent, index))
    assert free_bytes() <= before - held
    latent.own[-1] = 7
    kept = {"memory": latent.memory, "own": latent.own, "view": latent.own.view(torch.int16)[-3:].view(-1, 1)}[last]
    latent_bytes = latent.memory.numel()
    del latent, index
    assert before - held < free_bytes() <= before - latent_bytes
    if last != "memory":
        assert int(kept.reshape(-1).view(torch.uint8)[-1]) == 7
    del kept
    assert free_bytes() == before


class Liar(VmmMemory):
    """Sends another descriptor than that of its segment."""

    def __init__(self, kind: str) -> None:
        super().__init__(device_of(1))
        self.kind = kind

    def create(self, shape: RangeShape, rank: int, cp_size: int, *, poison: bool) -> tuple[VmmMapping, int]:
        mapping, descriptor = super().create(shape, rank, cp_size, poison=poison)
        os.close(descriptor)
        if self.kind == "memory file":
            return mapping, os.memfd_create("stranger")
        if self.kind == "file":
            return mapping, os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
        with self._driver.allocation(self.page_bytes, shared=True) as short:
            return mapping, self._driver.export(short)


@pytest.mark.parametrize("kind", ["memory file", "file", "too short"])
def test_what_cannot_be_mapped_is_refused_by_rank_and_cause(tmp_path: Path, kind: str) -> None:
    """Rank 1 lies, rank 0 refuses; nothing stays taken and the GPU stays usable."""
    # The first round loads kernels and, on another GPU, the driver; both take memory and descriptors for good.
    open_threads(tmp_path, [VmmMemory(device_of(rank)) for rank in range(2)])
    before, descriptors = free_bytes(), len(os.listdir("/proc/self/fd"))
    outcomes = open_threads(tmp_path, [VmmMemory("cuda:0"), Liar(kind)])
    assert type(outcomes[0]) is HandshakeError, outcomes
    assert "rank 1 is refused by rank 0" in str(outcomes[0]) and "CUDA_ERROR" in str(outcomes[0])
    assert "latent segment" in str(outcomes[0])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert free_bytes() == before
    assert int(torch.ones(9, device="cuda:0").sum()) == 9


def test_ranks_with_other_kinds_of_memory_are_refused(tmp_path: Path) -> None:
    outcomes = open_threads(tmp_path, [VmmMemory("cuda:0"), SealedMemory()])
    assert isinstance(outcomes[0], HandshakeError) and isinstance(outcomes[1], HandshakeError)
    assert "range 0 page_bytes is 4096 there and 2097152 here" in str(outcomes[0])


def test_a_pool_that_the_gpu_cannot_hold_is_refused(tmp_path: Path) -> None:
    assert why_not_vmm("cuda") is None
    memory = VmmMemory("cuda")
    free, total = torch.cuda.mem_get_info(0)
    shape = RangeShape.of("latent", total, 656, 0, memory.page_bytes)
    with pytest.raises(ConfigError, match=r"needs \d+ bytes and \d+ bytes of cuda:0 are free; lower --num-pages"):
        memory.check(0, 1, shape.segment_bytes)
    with pytest.raises(ConfigError, match=r"latent pool of rank 0 needs .*CUDA_ERROR_OUT_OF_MEMORY.*--num-pages"):
        memory.create(shape, 0, 1, poison=False)
    assert torch.cuda.mem_get_info(0)[0] == free


def test_there_is_no_other_gpu() -> None:
    count = torch.cuda.device_count()
    assert why_not_vmm(f"cuda:{count}") == f"there is no cuda:{count}: this process sees {count} GPUs"


def test_a_pool_of_pages_on_the_gpu_is_read_by_every_rank(tmp_path: Path) -> None:
    geometry = PoolGeometry(RowFormat("bfloat16", 512, 64, "fp8", 128), 64, (0, -1, 1))

    def work(rank: int, fence: Callable[[str], None]) -> UnifiedPool:
        return UnifiedPool.open(
            geometry,
            5,
            rank=rank,
            cp_size=2,
            chunk_tokens=128,
            secret="secret",
            folder=tmp_path,
            fence=fence,
            poison=True,
            device=device_of(rank),
        )

    pools = run_threads(work, 2)
    for rank, pool in enumerate(pools):
        pool.latent_rows(1)[:64] = rank + 1
        pool.index_blocks(2)[0] = rank + 11
        pool.tail_rows(1, 128).fill_(rank + 21)
        torch.cuda.synchronize(pool.latent.device)
    for rank, pool in enumerate(pools):
        rows, blocks = pool.all_latent_rows(1), pool.all_index_blocks(2)
        for owner in range(2):
            at = owner * pool.segment_rows
            assert_same_bits(rows[at : at + 64].cpu(), torch.full_like(rows[:64], owner + 1).cpu(), f"rank {owner}")
            assert blocks[owner * pool.segment_blocks].unique().tolist() == [owner + 11]
        assert rows[pool.tail_row : pool.tail_row + 128].unique().tolist() == [rank + 21]
        assert pool.latent[1:].unique().tolist() == [0xFF]


if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))), flush=True)
