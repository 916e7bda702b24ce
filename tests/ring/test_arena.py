"""The rings' memory is what the planner counted, down to the last row."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4.ring.addressing import flat_row
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import SNAPSHOT_KINDS, RingGeometry, RingKind
from vllm_dsv4.ring.layer import state_view


def geometry(**kwargs: int) -> RingGeometry:
    sizes = {"lookahead": 1, "max_model_len": 4096, "num_slots": 3, "num_snapshots": 2} | kwargs
    return RingGeometry(layer_ratios=(0, 4, 128, 4), **sizes)


@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_the_arena_holds_exactly_the_bytes_that_were_planned(lookahead: int) -> None:
    sizes = geometry(lookahead=lookahead)
    assert RingArena(sizes, "cpu").nbytes == sizes.total_bytes


def test_the_last_row_of_the_last_slot_of_every_ring_can_be_written() -> None:
    arena = RingArena(geometry(), "cpu")
    for kind, layers in arena.geometry.layers_of_kind.items():
        shape = arena.geometry.shape(kind)
        for _ in range(layers):
            ring = arena.take_layer(kind)
            rows = ring[:, : shape.rows * shape.row_bytes].unflatten(1, (shape.rows, -1))
            rows[-1, -1] = 1
            assert int(ring.count_nonzero()) == shape.row_bytes
    arena.check_all_taken()


def test_a_layer_too_many_or_too_few_is_an_error() -> None:
    arena = RingArena(geometry(), "cpu")
    arena.take_layer(RingKind.C128)
    with pytest.raises(RuntimeError, match="layer 2 asks for a c128 ring"):
        arena.take_layer(RingKind.C128)
    with pytest.raises(RuntimeError, match="rings without a layer"):
        arena.check_all_taken()


def test_poison_is_nan_in_every_format_and_stays_in_its_slot() -> None:
    arena = RingArena(geometry(), "cpu")
    arena.poison_slot(2)
    for kind, buffer in arena.buffers.items():
        shape = arena.geometry.shape(kind)
        assert int(buffer[:, [0, 1, 3]].count_nonzero()) == 0, kind
        if kind is not RingKind.SWA:
            state = state_view(buffer[0], shape.rows, shape.row_bytes)
            assert state[2].isnan().all(), kind
    swa = arena.buffers[RingKind.SWA][0, 2]
    assert swa.view(torch.float8_e4m3fn).isnan().all()
    assert swa.view(torch.bfloat16).isnan().all()


def test_a_snapshot_copies_windows_and_c4_state_of_one_slot() -> None:
    arena = RingArena(geometry(), "cpu")
    arena.poison_slot(1)
    snapshot = arena.geometry.num_slots + 1
    arena.copy_slot(1, snapshot)
    for kind, buffer in arena.buffers.items():
        if kind in SNAPSHOT_KINDS:
            assert torch.equal(buffer[:, snapshot], buffer[:, 1]), kind
            assert int(buffer[:, snapshot + 1].count_nonzero()) == 0, kind
        else:
            assert buffer.shape[1] == arena.geometry.num_slots + 1, kind


def test_addresses_are_64_bit() -> None:
    """A row far past 2**31 keeps its number; int32 slots must be widened first."""
    slots = torch.tensor([20_000_000], dtype=torch.int32).to(torch.int64)
    assert flat_row(slots, torch.tensor([129]), 128).item() == 20_000_000 * 128 + 1
