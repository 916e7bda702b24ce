"""Key caches as the kernels take them: a buffer of slots, the rows in each, and their type."""

from dataclasses import dataclass

import torch

from . import fp8_ds_mla, tiles

ROW_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)

ALIGNMENT = 16
"""Bytes: buffers start at, and slots are strided by, a multiple of it, for 16-byte loads."""


@dataclass(frozen=True)
class KeyCache:
    """Key rows in slots: the rings of a layer, or the blocks of a paged cache.

    ``buffer`` is ``[slots, >= slot bytes]`` uint8 with unit byte stride and any slot stride.
    ``dtype`` is bfloat16 (rows of 512 values) or an fp8 type (rows in ``fp8_ds_mla``).
    """

    buffer: torch.Tensor
    rows: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in ROW_DTYPES:
            known = ", ".join(str(dtype) for dtype in ROW_DTYPES)
            raise ValueError(f"key rows are one of {known}, not {self.dtype}")
        if self.buffer.dtype != torch.uint8 or self.buffer.dim() != 2:
            raise ValueError(
                "a key cache is a uint8 tensor [slots, bytes], not "
                f"{self.buffer.dtype} of shape {tuple(self.buffer.shape)}"
            )
        if self.buffer.stride(1) != 1 or self.buffer.shape[1] < self.slot_bytes:
            raise ValueError(
                f"a slot of {self.rows} rows of {self.dtype} is {self.slot_bytes} adjacent bytes; "
                f"the buffer has shape {tuple(self.buffer.shape)}, strides {self.buffer.stride()}"
            )
        if self.stride % ALIGNMENT or self.buffer.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"slots must start at multiples of {ALIGNMENT} bytes; the slot stride is "
                f"{self.stride} and the buffer is at {self.buffer.data_ptr():#x}"
            )

    @classmethod
    def of(cls, cache: torch.Tensor, dtype: torch.dtype) -> "KeyCache":
        """From ``[slots, rows, 512]`` bf16 or ``[slots, rows, 584]`` uint8, sharing its memory."""
        rows = cache.shape[1]
        return cls(cache.view(torch.uint8).flatten(1), rows, dtype)

    @property
    def stride(self) -> int:
        """Bytes from a slot to the next."""
        return self.buffer.stride(0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, scales included."""
        return row_bytes(self.dtype)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's rows, without padding."""
        return self.rows * self.row_bytes

    @property
    def is_fp8(self) -> bool:
        return self.dtype != torch.bfloat16

    def load_rows(self, slot: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Reference: row ``row[i]`` of slot ``slot[i]``, as ``[n, 512]`` float32."""
        if self.is_fp8:
            return fp8_ds_mla.load_rows(self.buffer, self.rows, slot, row, self.dtype)
        return self._bf16_rows()[slot.long(), row.long()].float()

    def store_rows(self, slot: torch.Tensor, row: torch.Tensor, keys: torch.Tensor) -> None:
        """Reference: writes ``keys [n, 512]``, rounded to the row type."""
        if self.is_fp8:
            fp8_ds_mla.store_rows(self.buffer, self.rows, slot, row, keys, self.dtype)
        else:
            self._bf16_rows()[slot.long(), row.long()] = keys.to(torch.bfloat16)

    def _bf16_rows(self) -> torch.Tensor:
        values = self.buffer[:, : self.slot_bytes].view(torch.bfloat16)
        return values.unflatten(1, (self.rows, fp8_ds_mla.HEAD_DIM))


@dataclass(frozen=True)
class CompressedKeys:
    """Compressed rows that each token attends to.

    ``indices [tokens, most]`` int32 are rows of ``cache`` counted through its blocks
    (``block * cache.rows + row``); a negative one is skipped. Of token ``t``'s, the first
    ``lengths[t]`` (int32) are read, whatever stands behind them.
    """

    cache: KeyCache
    indices: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        if self.cache.dtype == torch.float8_e4m3fnuz:
            raise ValueError("compressed rows are bfloat16 or float8_e4m3fn on every card")
        check_int("indices", self.indices, 2, (torch.int32,))
        check_int("lengths", self.lengths, 1, (torch.int32,))
        if len(self.indices) != len(self.lengths):
            raise ValueError(f"{len(self.indices)} rows of indices, {len(self.lengths)} lengths")


def row_bytes(dtype: torch.dtype) -> int:
    """Bytes of a key row of ``dtype``, scales included."""
    return 2 * fp8_ds_mla.HEAD_DIM if dtype == torch.bfloat16 else fp8_ds_mla.ROW_BYTES


def row_format(dtype: torch.dtype, ring_dtype: torch.dtype) -> int:
    """The number by which kernels know rows of ``dtype`` beside rings of ``ring_dtype``.

    A card whose rings are e4m3fnuz has no conversion from e4m3fn, the type of compressed rows.
    """
    if dtype == torch.float8_e4m3fn and ring_dtype == torch.float8_e4m3fnuz:
        return tiles.E4M3FN_BY_BITS.value
    return {
        torch.bfloat16: tiles.BF16.value,
        torch.float8_e4m3fn: tiles.E4M3FN.value,
        torch.float8_e4m3fnuz: tiles.E4M3FNUZ.value,
    }[dtype]


def check_int(name: str, tensor: torch.Tensor, dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises ValueError unless ``tensor`` has ``dim`` dimensions, dense rows and a good type."""
    if tensor.dim() != dim or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} must have {dim} dimensions and be one of {dtypes}, not "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be adjacent numbers, not {tensor.stride(-1)} apart")


def check_queries(queries: torch.Tensor, out: torch.Tensor) -> None:
    """Raises ValueError unless both are ``[tokens, heads, 512]`` bf16 with adjacent values."""
    for name, tensor in (("queries", queries), ("out", out)):
        if tensor.dtype != torch.bfloat16 or tensor.dim() != 3 or tensor.stride(2) != 1:
            raise ValueError(
                f"{name} must be bfloat16 [tokens, heads, 512] with adjacent values, not "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        if tensor.shape[2] != fp8_ds_mla.HEAD_DIM or tensor.shape != queries.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}")
        if not 1 <= tensor.shape[1] <= 128:
            raise ValueError(f"between 1 and 128 heads are supported, not {tensor.shape[1]}")


def check_rows(name: str, rows: torch.Tensor, num_tokens: int) -> None:
    """Raises ValueError unless ``rows`` is ``[num_tokens, 512]`` bf16 with adjacent values."""
    if rows.dtype != torch.bfloat16 or rows.shape != (num_tokens, fp8_ds_mla.HEAD_DIM):
        raise ValueError(
            f"{name} must be bfloat16 [{num_tokens}, 512], not {rows.dtype} {tuple(rows.shape)}"
        )
    if rows.stride(1) != 1:
        raise ValueError(f"the values of a row of {name} must be adjacent")


def check_sink(sink: torch.Tensor | None, num_heads: int) -> None:
    """Raises ValueError unless ``sink`` is float32 with a value for each head, or absent."""
    if sink is None:
        return
    if sink.dtype != torch.float32 or sink.dim() != 1 or len(sink) < num_heads:
        raise ValueError(f"sink must be float32 [>= {num_heads}], not {sink.dtype} {sink.shape}")
    if sink.stride(0) != 1:
        raise ValueError("the values of sink must be adjacent")


def check_cos_sin(cos_sin: torch.Tensor | None) -> None:
    """Raises ValueError unless ``cos_sin`` is float32 ``[positions, 64]``, or absent."""
    if cos_sin is None:
        return
    if cos_sin.dtype != torch.float32 or cos_sin.dim() != 2 or cos_sin.stride(1) != 1:
        raise ValueError(f"cos_sin must be float32 [positions, 64], not {cos_sin.dtype}")
    if cos_sin.shape[1] != fp8_ds_mla.ROPE_DIM:
        raise ValueError(f"cos_sin must have 32 cosines and 32 sines, not {cos_sin.shape[1]}")
