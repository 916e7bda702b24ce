"""What a compressor is made of: its shape, its weights, and the rings that hold open groups.

A layer's compressor turns each ``ratio`` tokens into one compressed row. With ratio 4 a group also
takes in the tokens of the group before it (two windows overlap), so a token carries two halves: the
first for the next group, the second for its own. With ratio 128 it carries one.
"""

from dataclasses import dataclass

import torch

from .fp8_ds_mla import HEAD_DIM, ROPE_DIM
from .indexer_cache import INDEXER_DIM


@dataclass(frozen=True)
class CompressorShape:
    """Tokens in a group, and values in a compressed row: 512 for attention, 128 for the indexer.

    Raises ValueError for another ratio than 4 or 128, or another head.
    """

    ratio: int
    head: int

    def __post_init__(self) -> None:
        if self.ratio not in (4, 128) or self.head not in (INDEXER_DIM, HEAD_DIM):
            raise ValueError(
                "a compressor has ratio 4 or 128 and a head of 128 or 512 values, "
                f"not {self.ratio} and {self.head}"
            )

    @property
    def overlaps(self) -> bool:
        """Whether a group also takes in the tokens of the group before it."""
        return self.ratio == 4

    @property
    def window(self) -> int:
        """Tokens that a group takes in: the rows a state ring needs, without speculation."""
        return 2 * self.ratio if self.overlaps else self.ratio

    @property
    def width(self) -> int:
        """Keys (and scores) that a token carries."""
        return 2 * self.head if self.overlaps else self.head

    def __str__(self) -> str:
        return f"C{self.ratio}, {'indexer' if self.head == INDEXER_DIM else 'attention'}"


MODEL_SHAPES = (
    CompressorShape(4, HEAD_DIM),
    CompressorShape(4, INDEXER_DIM),
    CompressorShape(128, HEAD_DIM),
)
"""The compressors that DeepSeek-V4 has."""


@dataclass(frozen=True)
class CompressorWeights:
    """``bias`` float32 ``[ratio, width]`` is added to the scores of a group's tokens in order.

    ``norm`` is ``[head]`` of any float type, ``eps`` the term under its root. ``cos_sin`` is
    float32 ``[positions, 64]``: 32 cosines, then 32 sines.

    Raises ValueError for tensors of another dtype, shape or stride.
    """

    shape: CompressorShape
    bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    cos_sin: torch.Tensor

    def __post_init__(self) -> None:
        expected = (self.shape.ratio, self.shape.width)
        is_dense = self.bias.is_contiguous() and self.norm.is_contiguous()
        if self.bias.dtype != torch.float32 or self.bias.shape != expected or not is_dense:
            raise ValueError(
                f"the bias is contiguous float32 {expected}, not {self.bias.dtype} of shape "
                f"{tuple(self.bias.shape)}"
            )
        if self.norm.shape != (self.shape.head,):
            raise ValueError(f"the norm is [{self.shape.head}], not {tuple(self.norm.shape)}")
        fits = self.cos_sin.shape[1:] == (ROPE_DIM,) and self.cos_sin.stride(1) == 1
        if self.cos_sin.dtype != torch.float32 or not fits:
            raise ValueError(
                f"cos_sin is float32 [positions, {ROPE_DIM}] with unit stride, not "
                f"{self.cos_sin.dtype} of shape {tuple(self.cos_sin.shape)}"
            )


@dataclass(frozen=True)
class StateRing:
    """Raw keys and biased scores of every slot's latest tokens.

    Token at position ``p`` lies in row ``p % rows`` of its slot: float32 ``[2 * width]``, ``width``
    keys, then ``width`` scores with the bias added. ``buffer`` is float32
    ``[slots, >= rows * 2 * width]`` with unit stride, of any slot stride.

    Raises ValueError for fewer rows than a group takes in, another buffer, a slot stride that is no
    multiple of 16 values, or a base that is none of 16 bytes.
    """

    buffer: torch.Tensor
    rows: int
    shape: CompressorShape

    def __post_init__(self) -> None:
        if self.rows < self.shape.window:
            raise ValueError(f"a state ring needs {self.shape.window} rows, not {self.rows}")
        fits = self.buffer.dim() == 2 and self.buffer.stride(1) == 1
        if self.buffer.dtype != torch.float32 or not fits or self.buffer.shape[1] < self.slot_width:
            raise ValueError(
                f"a state ring of {self.rows} rows is float32 [slots, >= {self.slot_width}] with "
                f"unit stride, not {self.buffer.dtype} of shape {tuple(self.buffer.shape)} and "
                f"strides {self.buffer.stride()}"
            )
        if self.stride % 16 or self.buffer.data_ptr() % 16:
            raise ValueError(
                "slots must lie a multiple of 16 values apart, from a multiple of 16 bytes, not "
                f"{self.stride} apart from {self.buffer.data_ptr():#x}"
            )

    @property
    def stride(self) -> int:
        """float32 values from a slot to the next."""
        return self.buffer.stride(0)

    @property
    def slot_width(self) -> int:
        """float32 values that a slot's rows take, without padding."""
        return self.rows * 2 * self.shape.width

    def rows_view(self) -> torch.Tensor:
        """``[slots, rows, 2, width]``, keys before scores, sharing the buffer's memory."""
        rows = self.buffer[:, : self.slot_width]
        return rows.unflatten(1, (self.rows, 2, self.shape.width))
