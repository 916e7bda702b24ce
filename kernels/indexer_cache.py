"""The indexer's paged keys: blocks of fp8 rows, each with one float32 scale.

A block of ``rows`` rows is ``[rows, 128]`` fp8, then ``[rows]`` float32 scales, powers of two; the
next block begins a block stride further on.
"""

from dataclasses import dataclass

import torch

from .caches import ALIGNMENT
from .fp8_ds_mla import check_fp8_dtype

INDEXER_DIM = 128
SCALE_BYTES = 4


@dataclass(frozen=True)
class IndexerCache:
    """``buffer`` is ``[blocks, >= block bytes]`` uint8 with unit byte stride, of any block stride.

    Raises ValueError for another buffer, a type other than e4m3fn and e4m3fnuz, or blocks that do
    not start at multiples of 16 bytes.
    """

    buffer: torch.Tensor
    rows: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_fp8_dtype(self.dtype)
        fits = self.buffer.dim() == 2 and self.buffer.stride(1) == 1
        if self.buffer.dtype != torch.uint8 or not fits or self.buffer.shape[1] < self.slot_bytes:
            raise ValueError(
                f"an indexer cache of {self.rows} rows a block is uint8 [blocks, >= "
                f"{self.slot_bytes}] with unit stride, not {self.buffer.dtype} of shape "
                f"{tuple(self.buffer.shape)} and strides {self.buffer.stride()}"
            )
        if self.stride % ALIGNMENT or self.buffer.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"blocks must start at multiples of {ALIGNMENT} bytes; the block stride is "
                f"{self.stride} and the buffer is at {self.buffer.data_ptr():#x}"
            )

    @property
    def stride(self) -> int:
        """Bytes from a block to the next."""
        return self.buffer.stride(0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block's rows, without padding."""
        return self.rows * (INDEXER_DIM + SCALE_BYTES)

    def load_rows(self, block: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Reference: row ``row[i]`` of block ``block[i]``, as ``[n, 128]`` float32."""
        block, row = block.long(), row.long()
        scales_at = self.rows * INDEXER_DIM
        values = self.buffer[:, :scales_at].unflatten(1, (self.rows, INDEXER_DIM))
        scales = self.buffer[:, scales_at : self.slot_bytes].unflatten(1, (self.rows, SCALE_BYTES))
        scale = scales[block, row].contiguous().view(torch.float32)
        return values[block, row].contiguous().view(self.dtype).float() * scale
