"""Copies of slots: whole rows, only where both ends are named, and nothing else."""

from typing import Any

import pytest
import torch
from vllm_dsv4.kernels.fp8_ds_mla import slot_bytes
from vllm_dsv4.kernels.ring_copy import copy_slots, copy_slots_reference

from tests.kernels.sparse_memory import sparse_zeros


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.uint8, slot_bytes(128)),
        (torch.uint8, slot_bytes(131) + 8),
        (torch.bfloat16, 2 * 512 * 129),
        (torch.float32, 4 * 2 * 256 * 9),
        (torch.uint8, 16),
    ],
)
def test_copies_the_bytes_of_named_slots_only(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    content = torch.randint(256, (8, size + 32), dtype=torch.uint8)  # NaNs of any payload included
    expected = content.clone()
    expected[3, :size], expected[1, :size] = content[5, :size], content[6, :size]
    for copy in (copy_slots, copy_slots_reference):
        memory = content.clone()
        copy(memory[:, :size].view(dtype), slots(5, 0, 6, 7, -1), slots(3, 2, 1, 0, 4))
        assert torch.equal(memory, expected), copy.__name__


def test_no_requests() -> None:
    ring = torch.full((2, 64), 7, dtype=torch.uint8)
    copy_slots(ring, slots(), slots())
    assert (ring == 7).all()


def test_slots_past_four_gib() -> None:
    ring = sparse_zeros(6, slot_bytes(128), 1 << 30, torch.uint8)
    ring[5] = torch.randint(256, (slot_bytes(128),), dtype=torch.uint8)
    copy_slots(ring, slots(5, 3), slots(4, 1))
    assert torch.equal(ring[4], ring[5])
    assert not ring[:4].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": torch.zeros(2, dtype=torch.int64)}, "sources is a contiguous torch.int32"),
        ({"targets": slots(1)}, "2 sources for 1 targets"),
        ({"ring": torch.zeros(3, 72, dtype=torch.uint8)}, "multiples of it, not 72, 72"),
        ({"ring": torch.zeros(3, 72, dtype=torch.uint8)[:, :64]}, "multiples of it, not 64, 72"),
        ({"ring": torch.zeros(64, 3, dtype=torch.uint8).T}, "with unit stride"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "ring": torch.zeros(3, 64, dtype=torch.uint8),
        "sources": slots(1, 2),
        "targets": slots(2, 1),
    }
    with pytest.raises(ValueError, match=message):
        copy_slots(**(arguments | changes))
