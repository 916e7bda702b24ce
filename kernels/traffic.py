"""How many bytes one decode token moves, and the fewest that it could."""

from dataclasses import dataclass

import torch
import triton

from .caches import row_bytes
from .decode import BLOCK_H
from .fp8_ds_mla import HEAD_DIM


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes that one token moves between memory and the chip, each counted once."""

    rows: int
    """Key rows that the token sees: window and compressed."""
    indices: int
    """Indices of the compressed rows."""
    step: int
    """The token's slot, position and compressed length."""
    queries: int
    out: int
    partials: int
    """Results of the shares, written and read again; none for one share."""
    requests_per_row: int
    """How often a row is asked of the caches on the chip: once for each 16 heads."""

    @property
    def fewest(self) -> int:
        """Every row that is needed once, queries read and output written."""
        return self.rows + self.queries + self.out

    @property
    def moved(self) -> int:
        return self.fewest + self.indices + self.step + self.partials

    @property
    def excess(self) -> float:
        """Share by which ``moved`` is above the fewest with its indices."""
        return self.moved / (self.fewest + self.indices) - 1.0


def decode_bytes(
    position: int,
    num_compressed: int,
    *,
    num_heads: int,
    ring_dtype: torch.dtype,
    compressed_dtype: torch.dtype,
    window: int = 128,
    num_splits: int = 1,
) -> DecodeBytes:
    """Counts for the token at ``position`` that sees ``num_compressed`` compressed rows."""
    num_window = min(position + 1, window)
    results = num_heads * (HEAD_DIM + 2) * 4 * num_splits
    return DecodeBytes(
        rows=num_window * row_bytes(ring_dtype) + num_compressed * row_bytes(compressed_dtype),
        indices=4 * num_compressed,
        step=4 + 8 + (4 if num_compressed else 0),
        queries=2 * num_heads * HEAD_DIM,
        out=2 * num_heads * HEAD_DIM,
        partials=2 * results if num_splits > 1 else 0,
        requests_per_row=triton.cdiv(num_heads, BLOCK_H),
    )
