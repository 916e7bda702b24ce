"""No number of a block table takes a step out of the rings.

vLLM's warm-ups number the blocks of all groups with one counter, so a ring group's rows name slots
that are not there. Here whole layers run such rows between guards: memory before and after every
ring that must not change by a byte. ``tests/cpu/test_index_plan.py`` has the same for the CPU path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rocm import rig
from tests.rocm.rig import Chunk, Rig
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import RingGeometry, RingKind
from vllm_dsv4.ring.row import SlotNumbers, row_columns
from vllm_dsv4.rocm import snapshots
from vllm_dsv4.rocm.step import DeviceStep

SLOTS, SNAPSHOTS = rig.MAX_REQUESTS, 8
FIRST = SLOTS + 1
"""Number of the first snapshot slot."""
PAST, FAR, NEGATIVE = SLOTS + SNAPSHOTS + 1, 29, -3
GUARD_SLOTS = 32
GUARD = 0xA5


class GuardedArena(RingArena):
    """Rings with guard memory on both sides, as wide as any number here would reach."""

    def __init__(self, geometry: RingGeometry, device: torch.device | str) -> None:
        super().__init__(geometry, device)
        self.memories: dict[RingKind, torch.Tensor] = {}
        for kind, buffer in self.buffers.items():
            layers, slots, width = buffer.shape
            memory = torch.full((layers * slots + 2 * GUARD_SLOTS, width), GUARD).byte()
            self.memories[kind] = memory
            inner = memory[GUARD_SLOTS:-GUARD_SLOTS].view(layers, slots, width)
            inner.zero_()
            self.buffers[kind] = inner

    def check_guards(self) -> None:
        for kind, memory in self.memories.items():
            assert (memory[:GUARD_SLOTS] == GUARD).all(), f"bytes before the {kind.value} rings"
            assert (memory[-GUARD_SLOTS:] == GUARD).all(), f"bytes behind the {kind.value} rings"

    def written_slots(self) -> set[int]:
        """Slots that hold anything but zeros, in whatever kind of ring."""
        return {
            slot
            for buffer in self.buffers.values()
            for slot in range(buffer.shape[1])
            if buffer[:, slot].any()
        }

    def clear(self) -> None:
        for buffer in self.buffers.values():
            buffer.zero_()


class GuardedRig(Rig):
    """A rig whose rings lie between guards, all zero before every step."""

    arena: GuardedArena

    def step(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        self.arena.clear()
        out = super().step(chunks)
        self.arena.check_guards()
        return out


def pad_heads(queries: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """In place of the operator that rotates queries: where a row lies does not depend on it."""
    padded_heads = arguments[3]
    return torch.nn.functional.pad(queries, (0, 0, 0, padded_heads - queries.shape[1]))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[GuardedRig]]:
    monkeypatch.setenv("VLLM_DSV4_SNAPSHOT_SLOTS", str(SNAPSHOTS))
    with (
        patch.object(rig, "RingArena", GuardedArena),
        patch.object(rig, "rotate_on_the_cpu", pad_heads),
    ):
        yield GuardedRig


@pytest.mark.parametrize("layer", [2, 3], ids=["C4", "C128"])
def test_numbers_that_name_nothing_reach_no_ring(
    tiny, guarded: type[GuardedRig], layer: int
) -> None:
    one = guarded(tiny(), layer, "rocm")
    out = one.step(
        [
            Chunk(0, 254, 3, slot=PAST, target=FIRST),  # a verify step across a boundary
            Chunk(1, 254, 3, slot=NEGATIVE, target=FIRST + 1),
            Chunk(2, 254, 3, slot=FIRST + 2, target=FIRST + 3),
            Chunk(3, 253, 4, slot=FAR, target=FIRST + 4),  # a chunk across one
            Chunk(4, 256, 4, slot=PAST + 1, source=FIRST + 5),  # one that resumes from a hit
            Chunk(5, 256, 4, slot=FIRST + 6, source=FIRST + 7),
        ]
    )
    assert one.arena.written_slots() <= {0}
    assert not any(chunk.any() for chunk in out), "padding has an output"
    one.step(
        [
            Chunk(0, 254, 3, slot=1, target=PAST),
            Chunk(1, 254, 3, slot=2, target=NEGATIVE),
            Chunk(2, 253, 4, slot=3, target=6),
            Chunk(3, 253, 4, slot=4, target=FAR),
            Chunk(4, 256, 4, slot=5, source=PAST),
            Chunk(5, 256, 4, slot=SLOTS, source=NEGATIVE),
        ]
    )
    assert one.arena.written_slots() - {0} == {1, 2, 3, 4, 5, SLOTS}
    one.step(
        [
            Chunk(0, 254, 3, slot=1, target=FIRST),
            Chunk(1, 253, 4, slot=SLOTS, target=SLOTS + SNAPSHOTS),
        ]
    )
    assert one.arena.written_slots() - {0} == {1, SLOTS, FIRST, SLOTS + SNAPSHOTS}


def test_a_request_beside_rows_that_name_nothing_is_answered_as_alone(
    tiny, guarded: type[GuardedRig]
) -> None:
    one = guarded(tiny(), 2, "rocm")
    good = Chunk(5, 0, 5, slot=4)
    (alone,) = one.step([good])
    *_, beside = one.step(
        [
            Chunk(0, 254, 3, slot=PAST, target=4),
            Chunk(1, 256, 4, slot=NEGATIVE, source=4),
            good,
        ]
    )
    torch.testing.assert_close(beside, alone, rtol=0, atol=0.02)


OPERATIONS = 73
"""Device operations by which one step's rows become index tensors, bounds
included: as many as it took before there were any."""


class Launches(TorchDispatchMode):
    """Counts operations that compute, not those that only view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_bounds_cost_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "copy_slots", lambda *_: None)
    device, numbers = torch.device("meta"), SlotNumbers(SLOTS, SNAPSHOTS)
    step = DeviceStep(64, 8, numbers, device)
    geometry = RingGeometry((0, 4, 128), 2, 4096, SLOTS, SNAPSHOTS)
    orders = snapshots.DeviceSnapshots(step, [RingArena(geometry, device)], 256, 64, rounds=1)
    rows = torch.zeros(4, row_columns(4096, 256), dtype=torch.int32, device=device)
    starts = torch.zeros(5, dtype=torch.int32, device=device)
    with Launches() as launches:
        step.refresh(rows, starts, starts[1:], 4)
        orders.refresh(rows, 4)
        orders.restore(rows)
    assert launches.count <= OPERATIONS
