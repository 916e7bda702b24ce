"""No number of a block table takes the CPU path's copies and writes out of the rings."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4.cpu.index_plan import StagingPlan
from vllm_dsv4.ring import row
from vllm_dsv4.ring.geometry import RingKind, ring_rows
from vllm_dsv4.ring.step import RingStep, make_step, restores

BLOCK, MAX_LEN = 256, 1024
NUMBERS = row.SlotNumbers(num_slots=4, num_snapshots=6)
LIVE, SNAPSHOTS = range(1, 5), range(5, 11)
OUTSIDE = (11, 511, -1, -7)
KINDS = {0: RingKind.SWA, 4: RingKind.C4_ATTENTION, 128: RingKind.C128}
STARTS, LENGTHS = torch.tensor([254, 254, 250, 256]), torch.tensor([3, 3, 30, 20])
"""Two verify steps and a chunk across a boundary, and a chunk that resumes at it."""


def rows_of(slots: list[int], sources: list[int], targets: list[int]) -> torch.Tensor:
    rows = torch.zeros(4, row.row_columns(MAX_LEN, BLOCK), dtype=torch.int32)
    rows[:, row.SLOT], rows[:, row.SOURCE] = torch.tensor(slots), torch.tensor(sources)
    rows[:, row.HIT_BLOCKS] = STARTS // BLOCK
    rows[:, row.HEAD :] = torch.tensor(targets)[:, None]
    return rows


def step_of(rows: torch.Tensor) -> RingStep:
    query_start = torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)).int()
    ends = (STARTS + LENGTHS).int()
    tokens, decode_tokens = int(query_start[-1]), int(query_start[2])
    return make_step(rows, query_start, ends, tokens, 2, decode_tokens, BLOCK, NUMBERS)


def slots_addressed(step: RingStep, ratio: int) -> tuple[set[int], set[int]]:
    """Slots that a layer reads or writes for its requests, and those that it writes snapshots to.

    Rows that are none (-1 in a list to read) are left out. C128 state is empty at every boundary.
    """
    window = KINDS[ratio].window
    ring = ring_rows(window, lookahead=2, max_model_len=MAX_LEN)
    plan = StagingPlan(step, ratio, window, ring, lookahead=2)
    read = plan.decode_read[plan.decode_read >= 0]
    live = [plan.decode_write, read, plan.ring_to_staging.source, plan.staging_to_ring.target]
    snapshots = [plan.decode_snapshots.target, plan.prefill_snapshots.target]
    found = live, snapshots
    first, second = (
        set(torch.cat(rows).div(ring, rounding_mode="floor").tolist()) for rows in found
    )
    return first, second


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("number", [*OUTSIDE, SNAPSHOTS[2]])
def test_a_row_without_a_lendable_slot_addresses_the_null_slot(ratio: int, number: int) -> None:
    slots = [number, 2, number, number - 1 if number < 0 else number + 1]
    step = step_of(rows_of(slots, [0] * 4, [6, 7, 8, 9]))
    assert step.slots.tolist() == [0, 2, 0, 0]
    live, snapshots = slots_addressed(step, ratio)
    assert live == {0, 2} and snapshots == ({7} if ratio != 128 else set())


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("number", [*OUTSIDE, LIVE[1]])
def test_a_number_that_is_no_snapshots_is_neither_written_nor_restored(
    ratio: int, number: int
) -> None:
    rows = rows_of([1, 2, 3, 4], [number] * 4, [number, 6, number, number])
    live, snapshots = slots_addressed(step_of(rows), ratio)
    assert live == {1, 2, 3, 4} and snapshots == ({6} if ratio != 128 else set())
    sources, slots = restores(rows, STARTS, BLOCK, NUMBERS)
    assert len(sources) == len(slots) == 0


def test_a_snapshot_is_restored_to_a_lendable_slot_only() -> None:
    first = torch.full((4,), BLOCK)
    rows = rows_of([1, 11, -1, 7], [5, 6, 7, 8], [0] * 4)
    rows[:, row.HIT_BLOCKS] = 1
    sources, slots = restores(rows, first, BLOCK, NUMBERS)
    assert sources.tolist() == [5] and slots.tolist() == [1]


def test_without_snapshots_no_number_is_one() -> None:
    numbers = row.SlotNumbers(num_slots=4)
    named = torch.arange(-2, 8)
    assert not numbers.are_snapshots(named).any()
    assert named[numbers.are_lendable(named)].tolist() == [1, 2, 3, 4]


def test_a_chunk_longer_than_its_sequence_finds_no_orders() -> None:
    """As in a dummy batch: its first position would be negative."""
    rows = rows_of([1, 2, 3, 4], [5] * 4, [6, 7, 8, 9])
    query_start = torch.tensor([0, 3, 6, 2000, 2020], dtype=torch.int32)
    ends = torch.zeros(4, dtype=torch.int32)
    step = make_step(rows, query_start, ends, 2020, 2, 6, BLOCK, NUMBERS)
    assert len(step.snapshots.slot) == 0
