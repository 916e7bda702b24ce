"""Ranks with unequal numbers of tokens exchange them on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_dsv4.cpu.platform import Dsv4CpuPlatform
from vllm_dsv4.fixes.cpu_communicator import GatheringCpuCommunicator

EXCHANGE = """
import json, os, sys
import torch
import torch.distributed as dist
from vllm_dsv4.fixes.cpu_communicator import GatheringCpuCommunicator

folder, ranks = sys.argv[1], 3
SIZES = ([4, 0, 9], [1, 1, 1], [0, 0, 2])

def rows(rank, count, dtype, *shape):
    values = torch.arange(count * max(1, torch.Size(shape).numel())) + 100 * rank
    return values.view(count, *shape).to(dtype)

def serve(rank):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    ours = GatheringCpuCommunicator(
        dist.group.WORLD, device_group=dist.group.WORLD, unique_name="dp:0"
    )
    right = []
    for sizes in SIZES:
        own = sizes[rank]
        kinds = [(torch.bfloat16, 6), (torch.float32, 2), (torch.int64, 3), (torch.int32,)]
        given = [rows(rank, own, *kind) for kind in kinds]
        whole = [
            torch.cat([rows(r, size, *kind) for r, size in enumerate(sizes)]) for kind in kinds
        ]
        found = ours.all_gatherv(given, 0, sizes)
        right += [torch.equal(one, other) for one, other in zip(found, whole, strict=True)]
        right.append(torch.equal(ours.all_gatherv(given[0], 0, sizes), whole[0]))
        parts = [rows(r, sum(sizes), torch.bfloat16, 5) for r in range(ranks)]
        start = sum(sizes[:rank])
        total = torch.stack(parts).float().sum(0).bfloat16()[start : start + own]
        kept = parts[rank].clone()
        right.append(torch.equal(ours.reduce_scatterv(parts[rank], 0, sizes), total))
        right.append(torch.equal(parts[rank], kept))
    even = rows(rank, 2, torch.float32, 3)
    right.append(ours.all_gatherv(even).shape == (6, 3))
    wide = torch.full((2, 6), float(rank + 1))
    right.append(torch.equal(ours.reduce_scatterv(wide), torch.full((2, 2), 6.0)))
    with open(f"{folder}/{rank}.json", "w") as out:
        json.dump(right, out)
    dist.barrier()

children = []
for rank in range(ranks):
    child = os.fork()
    if child == 0:
        serve(rank)
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.mark.parametrize("method", ["all_gatherv", "reduce_scatterv"])
def test_vllm_still_needs_it(method: str) -> None:
    assert getattr(CpuCommunicator, method) is getattr(DeviceCommunicatorBase, method)


def test_the_platform_names_our_communicator() -> None:
    named = resolve_obj_by_qualname(Dsv4CpuPlatform.get_device_communicator_cls())
    assert named is GatheringCpuCommunicator


def test_unequal_shares_are_gathered_and_summed_in_the_order_of_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXCHANGE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(3):
        right = json.loads((tmp_path / f"{rank}.json").read_text())
        assert right == [True] * len(right), rank
