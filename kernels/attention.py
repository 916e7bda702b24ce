"""What decode and prefill are given alike: queries, ring, compressed rows, sink and rotation.

Each is checked in one place and spelled out once in the kernels' words, for a launch and for a
compilation without a card.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton

from . import tiles
from .caches import (
    CompressedKeys,
    KeyCache,
    check_cos_sin,
    check_int,
    check_queries,
    check_sink,
    row_format,
)
from .launch import block_k

BLOCK_H = 16
"""Heads of a program."""


def check_attention(
    queries: torch.Tensor,
    ring: KeyCache,
    positions: torch.Tensor,
    *,
    window: int,
    sink: torch.Tensor | None,
    compressed: CompressedKeys | None,
    inverse_rope: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Raises ValueError for what neither kernel can take."""
    check_queries(queries, out)
    num_tokens, num_heads, _ = queries.shape
    check_int("positions", positions, 1, (torch.int32, torch.int64))
    if window > ring.rows:
        raise ValueError(f"a ring of {ring.rows} rows does not hold a window of {window}")
    check_sink(sink, num_heads)
    check_cos_sin(inverse_rope)
    if compressed is not None and len(compressed.indices) != num_tokens:
        raise ValueError(f"{num_tokens} tokens, indices for {len(compressed.indices)}")


def attention_arguments(
    queries: torch.Tensor,
    ring: KeyCache,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int,
    sink: torch.Tensor | None,
    compressed: CompressedKeys | None,
    inverse_rope: torch.Tensor | None,
    out: torch.Tensor,
) -> dict[str, Any]:
    """The arguments that both kernels have, by name."""
    history = None if compressed is None else compressed.cache
    return {
        "q_ptr": queries,
        "ring_ptr": ring.buffer,
        "positions_ptr": positions,
        "compressed_ptr": None if history is None else history.buffer,
        "indices_ptr": None if compressed is None else compressed.indices,
        "lengths_ptr": None if compressed is None else compressed.lengths,
        "sink_ptr": sink,
        "cos_sin_ptr": inverse_rope,
        "out_ptr": out,
        "q_stride_t": queries.stride(0),
        "q_stride_h": queries.stride(1),
        "ring_stride": ring.stride,
        "compressed_stride": 0 if history is None else history.stride,
        "indices_stride": 0 if compressed is None else compressed.indices.stride(0),
        "cos_sin_stride": 0 if inverse_rope is None else inverse_rope.stride(0),
        "out_stride_t": out.stride(0),
        "out_stride_h": out.stride(1),
        "num_heads": queries.shape[1],
        "qk_scale": scale * tiles.LOG2_E.value,
        "WINDOW": window,
        "RING_ROWS": ring.rows,
        "RING_FORMAT": row_format(ring.dtype, ring.dtype),
        "HAS_COMPRESSED": compressed is not None,
        "COMPRESSED_ROWS": 1 if history is None else history.rows,
        "COMPRESSED_FORMAT": 0 if history is None else row_format(history.dtype, ring.dtype),
        "HAS_SINK": sink is not None,
        "ROTATE": inverse_rope is not None,
        "BLOCK_H": BLOCK_H,
        "BLOCK_K": block_k(ring.dtype),
    }


def isa_types(kernel: triton.JITFunction, **others: str) -> Mapping[str, str]:
    """Types of the run-time arguments of ``kernel``; ``others``: those that only it has."""
    return {
        "q_ptr": "*bf16:16",
        "ring_ptr": "*u8:16",
        "slots_ptr": "*i32:16",
        "positions_ptr": "*i64:16",
        "compressed_ptr": "*u8:16",
        "indices_ptr": "*i32:16",
        "lengths_ptr": "*i32:16",
        "sink_ptr": "*fp32:16",
        "out_ptr": "*bf16:16",
        "num_heads": "i32:16",
        "qk_scale": "fp32",
        **{name: "i32:16" for name in kernel.arg_names if "_stride" in name},
        **others,
    }


def isa_constants(ring_dtype: torch.dtype, has_compressed: bool, rotate: bool) -> dict[str, Any]:
    """A released model's shapes, for rows of ``ring_dtype``."""
    compressed_dtype = torch.bfloat16 if ring_dtype == torch.bfloat16 else torch.float8_e4m3fn
    return {
        "WINDOW": 128,
        "RING_ROWS": 128,
        "RING_FORMAT": row_format(ring_dtype, ring_dtype),
        "HAS_COMPRESSED": has_compressed,
        "COMPRESSED_ROWS": 64,
        "COMPRESSED_FORMAT": row_format(compressed_dtype, ring_dtype),
        "HAS_SINK": True,
        "ROTATE": rotate,
        "BLOCK_H": BLOCK_H,
        "BLOCK_K": block_k(ring_dtype),
    }
