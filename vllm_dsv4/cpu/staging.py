"""The staging buffers of the CPU path: one per kind, shared by all layers."""

from __future__ import annotations

import math

import torch

from vllm_dsv4.cpu.index_plan import RowCopy, staging_rows_needed
from vllm_dsv4.ring.geometry import (
    FP8_DS_MLA_DATA_BYTES,
    FP8_DS_MLA_SCALE_BYTES,
    RingGeometry,
    RingKind,
    RingShape,
)
from vllm_dsv4.ring.layer import state_view


class Staging:
    """Rows of one step's prefill chunks, in the block layout of the rings (one block, one slot's
    rows). Valid from the moment a layer fills it until the next layer does."""

    def __init__(
        self, geometry: RingGeometry, max_num_batched_tokens: int, max_num_seqs: int
    ) -> None:
        self._buffers = {
            kind: torch.zeros(
                _buffer_shape(geometry, kind, max_num_batched_tokens, max_num_seqs),
                dtype=torch.uint8,
            )
            for kind in _staged(geometry)
        }

    def buffer(self, kind: RingKind) -> torch.Tensor:
        """uint8 ``[blocks, slot_bytes]``."""
        return self._buffers[kind]


def staging_bytes(geometry: RingGeometry, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes that ``Staging`` will hold."""
    return sum(
        math.prod(_buffer_shape(geometry, kind, max_num_batched_tokens, max_num_seqs))
        for kind in _staged(geometry)
    )


def _staged(geometry: RingGeometry) -> list[RingKind]:
    """Kinds whose rows have places by position."""
    return [kind for kind in geometry.layers_of_kind if not geometry.folds(kind)]


def _buffer_shape(
    geometry: RingGeometry, kind: RingKind, max_num_batched_tokens: int, max_num_seqs: int
) -> tuple[int, int]:
    """Blocks, and bytes of a block."""
    shape = geometry.shape(kind)
    rows = staging_rows_needed(kind.window, max_num_batched_tokens, max_num_seqs)
    return -(-rows // shape.rows), shape.slot_bytes


def copy_rows(source: torch.Tensor, target: torch.Tensor, shape: RingShape, copy: RowCopy) -> None:
    """Copy rows between two buffers of ``shape`` (uint8 ``[blocks, slot_bytes]``).

    A window row is two pieces of its block, data and scales; a state row is one.
    """
    if copy.source.numel() == 0:
        return
    for rows_from, rows_to in zip(_pieces(source, shape), _pieces(target, shape), strict=True):
        rows_to[copy.target_place] = rows_from[copy.source_place]


def _pieces(buffer: torch.Tensor, shape: RingShape) -> list[torch.Tensor]:
    """Views ``[blocks, rows, words]`` that together hold every byte of every row."""
    if shape.kind is not RingKind.SWA:
        return [state_view(buffer, shape.rows, shape.row_bytes)]
    words = buffer.view(torch.int64)
    data = FP8_DS_MLA_DATA_BYTES // 8
    scale = FP8_DS_MLA_SCALE_BYTES // 8
    split = shape.rows * data
    return [
        words[:, :split].unflatten(1, (shape.rows, data)),
        words[:, split : split + shape.rows * scale].unflatten(1, (shape.rows, scale)),
    ]
