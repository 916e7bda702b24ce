"""Where a token lives: ``(slot, position) -> row``. Every path uses these two lines."""

from __future__ import annotations

from typing import Any, TypeAlias

from vllm_dsv4.ring.geometry import SWA_WINDOW

Index: TypeAlias = Any
"""An ``int`` or an int64 tensor; every formula here works on both, element by element."""

NULL_SLOT = 0
"""Padding rows and dummy batches point here. It is never lent and never read by a live row."""


def row_in_slot(position: Index, rows: int) -> Index:
    """Row within the slot of the token at ``position`` (tokens from the sequence's start)."""
    return position % rows


def flat_row(slot: Index, position: Index, rows: int) -> Index:
    """Row counted from the start of a layer's ring. Give int64 tensors: it passes 2**31 early."""
    return slot * rows + row_in_slot(position, rows)


def oldest_readable(ratio: int, next_position: Index) -> Index:
    """Oldest position that a query at ``next_position`` or later may still read.

    Args:
        ratio: 0 for the window (SWA keys), 4 or 128 for compressor state of that ratio.
        next_position: int or int64 tensor; position of the next token.

    A closing C4 group reads itself and the group before it; a closing C128 group itself.
    The result may be negative: such positions do not exist.
    """
    if ratio == 0:
        return next_position - (SWA_WINDOW - 1)
    open_group = next_position // ratio * ratio
    return open_group - ratio if ratio == 4 else open_group
