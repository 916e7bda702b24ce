"""Deliberate faults in the rows of rings: what a comparison must see to prove anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tests.support.engine import Engine

KEY_BYTES = 448 + 2 * 64
ROWS = slice(40, 48)
"""Eight of a window's 128 rows."""


def _window_rows(engine: Engine) -> torch.Tensor:
    """Data of these rows in every layer: ``[layers, lendable slots, rows, bytes]``."""
    from vllm_dsv4.ring.geometry import RingKind

    arena = engine.model.arena
    rows = arena.geometry.shape(RingKind.SWA).rows
    slots = slice(1, 1 + arena.geometry.num_slots)
    data = arena.buffers[RingKind.SWA][:, slots, : rows * KEY_BYTES]
    return data.unflatten(2, (rows, KEY_BYTES))[:, :, ROWS]


def lose_rows(engine: Engine) -> None:
    """Zero them in every slot."""
    _window_rows(engine).zero_()


def take_rows_of_a_neighbour(engine: Engine) -> None:
    """Give every slot those of the slot before it."""
    rows = _window_rows(engine)
    rows.copy_(rows.roll(1, dims=1))


ROW_FAULTS: dict[str, Callable[[Engine], None]] = {
    "rows lost": lose_rows,
    "a neighbour's rows": take_rows_of_a_neighbour,
}
"""To be done before each step, see ``Engine.before_each_step``."""
