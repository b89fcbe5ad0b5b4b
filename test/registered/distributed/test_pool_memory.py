"""What a rank's pool really takes, by the kernel's account: 1/N of a replicated pool, and the scratch of the plan.

Rank processes map all pools, read every page through the unified range, and report the proportional set size (Pss) of
their mappings: a page that n processes have mapped counts 1/n in each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.row_format import RowFormat
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=7, suite="distributed")

PAGES = 96
RANK = """
import json, sys
from pathlib import Path
import torch
from cpkv.comm.gloo import GlooCommunicator
from cpkv.layout.pool_geometry import PoolGeometry, index_slots
from cpkv.layout.row_format import RowFormat
from cpkv.pool.page_pool import PagePool
from cpkv.pool.unified_pool import UnifiedPool

rank, size, pages, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
torch.set_num_threads(1)
comm = GlooCommunicator.join(rank, size, folder / "rendezvous")
geometry = PoolGeometry(RowFormat("bfloat16", 512, 64, "fp8", 128), 64, index_slots([True, False, True, True]))


def pss(begin, end):
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first < end and last > begin
        elif inside and head == "Pss:":
            total += int(line.split()[1]) * 1024
    return total


def pss_of_process():
    return int(Path("/proc/self/smaps_rollup").read_text().partition("Pss:")[2].split()[0]) * 1024


def pss_of(*tensors):
    return sum(pss(tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in tensors)


pool = UnifiedPool.open(geometry, pages // size + 1, rank=rank, cp_size=size, chunk_tokens=512, secret="s",
                        folder=folder, fence=comm.barrier)
pool.latent.fill_(rank), pool.index.fill_(rank)
comm.barrier("written")
seen = int(pool.all_latent_rows(0)[: pool.tail_row].max()), int(pool.all_index_blocks(0).max())
comm.barrier("read")
shared = pss_of(pool.all_latent_rows(0)[: pool.tail_row], pool.all_index_blocks(0))
comm.barrier("measured")
# Anonymous memory has no mapping of its own to look at, so the whole process is weighed before and after.
before = pss_of_process()
replicated = PagePool(geometry, pages + 1, poison=True)
print(json.dumps({"seen": seen, "shared": shared, "own": pool.allocated_bytes,
                  "replicated": pss_of_process() - before}))
comm.close()
"""


@pytest.mark.parametrize("cp_size", [2, 4])
def test_a_rank_holds_its_share_of_a_replicated_pool(tmp_path: Path, cp_size: int) -> None:
    """Within 5% of 1/N, trash page included, however much the others read."""
    words = [str(cp_size), str(PAGES), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(cp_size)
    ]
    ended = [rank.communicate(timeout=50) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(err for _, err in ended)
    reports = [json.loads(out) for out, _ in ended]
    geometry = PoolGeometry(RowFormat("bfloat16", 512, 64, "fp8", 128), 64, index_slots([True, False, True, True]))
    share = geometry.pool_bytes(PAGES // cp_size + 1)
    for report in reports:
        assert report["seen"] == [cp_size - 1, cp_size - 1], "a rank did not read the others' pages"
        assert report["own"] == share
        assert report["replicated"] == pytest.approx(geometry.pool_bytes(PAGES + 1), rel=0.05)
        # One trash page more than the 1/N of a pool that would hold none.
        assert report["shared"] == pytest.approx(share, rel=0.05)
        assert report["shared"] <= 1.05 * report["replicated"] / cp_size + geometry.page_bytes
