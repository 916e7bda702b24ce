"""Joins the partial results of the shares that a token's keys were cut in."""

import torch
import triton
import triton.language as tl

from . import fp8_ds_mla, tiles
from .variants import KernelVariant

NUM_WARPS = 2

_HEAD_DIM = tl.constexpr(fp8_ds_mla.HEAD_DIM)


@triton.jit
def join_kernel(
    part_m_ptr,  # [T, NUM_SPLITS, H] float32
    part_l_ptr,  # [T, NUM_SPLITS, H] float32
    part_a_ptr,  # [T, NUM_SPLITS, H, 512] float32, unwritten where part_l is 0
    sink_ptr,  # [H] float32
    positions_ptr,  # [T] int32 or int64
    cos_sin_ptr,  # [P, 64] float32
    out_ptr,  # [T, H, 512] bf16
    cos_sin_stride,
    out_stride_t,
    out_stride_h,
    num_heads,
    HAS_SINK: tl.constexpr,
    ROTATE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    o_split = tl.arange(0, SPLITS_PADDED)
    m_split = (o_split < NUM_SPLITS)[:, None]

    # [S, 1]
    o_part = (i_t * NUM_SPLITS + o_split)[:, None] * num_heads + i_head[None, :]
    b_m = tl.load(part_m_ptr + o_part, mask=m_split, other=tiles.NO_SCORE)
    b_l = tl.load(part_l_ptr + o_part, mask=m_split, other=0.0)
    b_top = tl.max(b_m, axis=0)
    b_total = tl.sum(b_l * tl.exp2(b_m - b_top[None, :]), axis=0)

    o_value = 128 * tl.arange(0, 4)[:, None, None] + tl.arange(0, 128)[None, None, :]
    b_a = tl.zeros((4, 1, 128), tl.float32)
    for i_split in tl.static_range(NUM_SPLITS):
        o_one = (i_t * NUM_SPLITS + i_split) * num_heads + i_head
        m_written = (tl.load(part_l_ptr + o_one) > 0.0)[None, :, None]
        p_part = (part_a_ptr + o_one * _HEAD_DIM)[None, :, None] + o_value
        b_weight = tl.exp2(tl.load(part_m_ptr + o_one) - b_top)[None, :, None]
        b_a += tl.load(p_part, mask=m_written, other=0.0) * b_weight

    b_a *= tiles.fold_sink(b_top, b_total, sink_ptr, i_head, HAS_SINK)[None, :, None]
    if ROTATE:
        position = tl.load(positions_ptr + i_t, volatile=True).to(tl.int64)
        b_a = tiles.rotate_back(b_a, cos_sin_ptr + tl.maximum(position, 0) * cos_sin_stride)
    p_out = out_ptr + i_t * out_stride_t + i_head * out_stride_h
    tiles.store_rows(p_out, i_head < num_heads, b_a)


def join(
    part_m: torch.Tensor,
    part_l: torch.Tensor,
    part_a: torch.Tensor,
    positions: torch.Tensor,
    *,
    sink: torch.Tensor | None,
    inverse_rope: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Writes every row of ``out [tokens, heads, 512]`` bf16 from its shares.

    Args:
        part_m: ``[tokens, shares, heads]`` float32, largest score in units of log2.
        part_l: ``[tokens, shares, heads]`` float32, sum of the weights relative to it.
        part_a: ``[tokens, shares, heads, 512]`` float32, sum of the weighted values; not read where
            ``part_l`` is zero.
        positions, sink, inverse_rope: as ``decode`` takes them.
    """
    num_tokens, num_splits, num_heads = part_m.shape
    join_kernel[(num_tokens, num_heads)](
        part_m,
        part_l,
        part_a,
        sink,
        positions,
        inverse_rope,
        out,
        0 if inverse_rope is None else inverse_rope.stride(0),
        out.stride(0),
        out.stride(1),
        num_heads,
        HAS_SINK=sink is not None,
        ROTATE=inverse_rope is not None,
        NUM_SPLITS=num_splits,
        SPLITS_PADDED=triton.next_power_of_2(num_splits),
        num_warps=NUM_WARPS,
    )


def isa_variants() -> list[KernelVariant]:
    """Eight shares, with and without the inverse rotation."""
    types = {
        "part_m_ptr": "*fp32:16",
        "part_l_ptr": "*fp32:16",
        "part_a_ptr": "*fp32:16",
        "sink_ptr": "*fp32:16",
        "positions_ptr": "*i64:16",
        "cos_sin_ptr": "*fp32:16",
        "out_ptr": "*bf16:16",
        "cos_sin_stride": "i32:16",
        "out_stride_t": "i32:16",
        "out_stride_h": "i32:16",
        "num_heads": "i32:16",
    }
    return [
        KernelVariant(
            kernel=join_kernel,
            name="8 shares, rotated back" if rotate else "8 shares",
            types=types,
            constants={
                "HAS_SINK": True,
                "ROTATE": rotate,
                "NUM_SPLITS": 8,
                "SPLITS_PADDED": 8,
            },
            num_warps=NUM_WARPS,
            min_workgroups_per_cu=2,
            shape="join, 8 shares",
        )
        for rotate in (False, True)
    ]
