"""Decode: one query token against its sequence's ring and its compressed rows.

The window is read from the ring by arithmetic: the key of position ``pos`` lies in row
``pos % rows`` of the token's slot, so the 128 newest keys are at most two runs of rows and need no
index list. Compressed rows follow by index. The keys of a token are cut in tiles, the tiles in
``num_splits`` shares; each program attends over one share for 16 heads. A single share is finished
by the program itself, several are joined by ``join``; either way the attention sink is folded in
once and, if asked, RoPE is taken off the output.
"""

import torch
import triton
import triton.language as tl

from . import fp8_ds_mla, tiles
from .attention import (
    BLOCK_H,
    attention_arguments,
    check_attention,
    isa_constants,
    isa_types,
)
from .caches import CompressedKeys, KeyCache, check_int
from .join import join
from .launch import KV_DTYPES, NUM_WARPS, block_k, choose_num_splits, compute_units
from .variants import KernelVariant

_HEAD_DIM = tl.constexpr(fp8_ds_mla.HEAD_DIM)


@triton.jit
def decode_kernel(
    q_ptr,  # [T, H, 512] bf16
    ring_ptr,  # [slots, ring_stride] bytes
    slots_ptr,  # [T] int32
    positions_ptr,  # [T] int32 or int64
    compressed_ptr,  # [blocks, compressed_stride] bytes
    indices_ptr,  # [T, indices_stride] int32
    lengths_ptr,  # [T] int32
    sink_ptr,  # [H] float32
    cos_sin_ptr,  # [P, 64] float32
    out_ptr,  # [T, H, 512] bf16, written where NUM_SPLITS is 1
    part_m_ptr,  # [T, NUM_SPLITS, H] float32
    part_l_ptr,  # [T, NUM_SPLITS, H] float32
    part_a_ptr,  # [T, NUM_SPLITS, H, 512] float32
    q_stride_t,
    q_stride_h,
    ring_stride,
    compressed_stride,
    indices_stride,
    cos_sin_stride,
    out_stride_t,
    out_stride_h,
    num_heads,
    qk_scale,
    WINDOW: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_FORMAT: tl.constexpr,
    HAS_COMPRESSED: tl.constexpr,
    COMPRESSED_ROWS: tl.constexpr,
    COMPRESSED_FORMAT: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ROTATE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    o_head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = o_head < num_heads
    i_head = tl.minimum(o_head, num_heads - 1).to(tl.int64)

    # Volatile: a scalar load may see last step's value when a graph is replayed.
    i_slot = tl.load(slots_ptr + i_t, volatile=True).to(tl.int64)
    position = tl.load(positions_ptr + i_t, volatile=True).to(tl.int64)
    is_live = i_slot > 0
    n_window = tl.where(is_live, tl.minimum(position + 1, WINDOW), 0).to(tl.int32)
    first_row = (tl.maximum(position + 1 - n_window, 0) % RING_ROWS).to(tl.int32)
    window_tiles = tl.cdiv(n_window, BLOCK_K)
    if HAS_COMPRESSED:
        n_compressed = tl.where(is_live, tl.load(lengths_ptr + i_t, volatile=True), 0)
        num_tiles = window_tiles + tl.cdiv(n_compressed, BLOCK_K)
    else:
        num_tiles = window_tiles
    share = tl.cdiv(num_tiles, NUM_SPLITS)
    tile_lo = i_split * share
    tile_hi = tl.minimum(tile_lo + share, num_tiles)

    b_q = tiles.load_rows(q_ptr + i_t * q_stride_t + i_head * q_stride_h)
    b_m = tl.full((BLOCK_H,), tiles.NO_SCORE, tl.float32)
    b_l = tl.zeros((BLOCK_H,), tl.float32)
    b_a = tl.zeros((4, BLOCK_H, 128), tl.float32)

    p_slot = ring_ptr + i_slot * ring_stride
    for i_tile in tl.range(tile_lo, tl.minimum(tile_hi, window_tiles), num_stages=1):
        b_m, b_l, b_a = tiles.attend_ring(
            b_q,
            p_slot,
            first_row,
            n_window,
            i_tile,
            qk_scale,
            b_m,
            b_l,
            b_a,
            RING_ROWS,
            RING_FORMAT,
            BLOCK_K,
        )

    if HAS_COMPRESSED:
        p_indices = indices_ptr + i_t * indices_stride
        for i_tile in tl.range(tl.maximum(tile_lo, window_tiles), tile_hi, num_stages=1):
            b_m, b_l, b_a = tiles.attend_compressed(
                b_q,
                p_indices,
                n_compressed,
                i_tile - window_tiles,
                compressed_ptr,
                compressed_stride,
                qk_scale,
                b_m,
                b_l,
                b_a,
                COMPRESSED_ROWS,
                COMPRESSED_FORMAT,
                BLOCK_K,
            )

    if NUM_SPLITS == 1:
        b_a *= tiles.fold_sink(b_m, b_l, sink_ptr, i_head, HAS_SINK)[None, :, None]
        if ROTATE:
            b_a = tiles.rotate_back(b_a, cos_sin_ptr + tl.maximum(position, 0) * cos_sin_stride)
        tiles.store_rows(out_ptr + i_t * out_stride_t + i_head * out_stride_h, m_head, b_a)
    else:
        o_part = (i_t * NUM_SPLITS + i_split) * num_heads + i_head
        tl.store(part_m_ptr + o_part, b_m, mask=m_head)
        tl.store(part_l_ptr + o_part, b_l, mask=m_head)
        if tile_lo < tile_hi:
            tiles.store_rows(part_a_ptr + o_part * _HEAD_DIM, m_head, b_a)


def decode(
    queries: torch.Tensor,
    ring: KeyCache,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int = 128,
    sink: torch.Tensor | None = None,
    compressed: CompressedKeys | None = None,
    inverse_rope: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of query tokens over their rings and compressed rows, ``[tokens, heads, 512]``.

    Args:
        queries: ``[tokens, heads, 512]`` bf16; several may belong to one sequence.
        ring: the layer's rings; the rows of ``positions`` are already written.
        slots: ``[tokens]`` int32, the ring of each token; 0 marks padding, whose output is zero.
        positions: ``[tokens]`` int32 or int64. Token ``t`` sees the window
            ``positions[t] - window + 1 .. positions[t]``, cut at 0.
        scale: what scores are multiplied by.
        sink: ``[>= heads]`` float32 logits that join each head's softmax without a value.
        compressed: rows that join the same softmax.
        inverse_rope: ``[positions, 64]`` float32, 32 cosines then 32 sines: takes the interleaved
            rotation off the output's last 64 values.
        out: written in place if given; every row is written.
        num_splits: shares of the keys; chosen from the shapes if not given.

    No device value is read on the host. Raises ValueError for what the kernel cannot take.
    """
    out = torch.empty_like(queries) if out is None else out
    check_attention(
        queries, ring, positions, window=window, sink=sink, compressed=compressed,
        inverse_rope=inverse_rope, out=out,
    )  # fmt: skip
    num_tokens, num_heads, _ = queries.shape
    check_int("slots", slots, 1, (torch.int32,))
    if len(slots) != num_tokens or len(positions) != num_tokens:
        raise ValueError(f"{num_tokens} tokens, {len(slots)} slots, {len(positions)} positions")
    if num_tokens == 0:
        return out

    if num_splits is None:
        max_keys = window + (0 if compressed is None else compressed.indices.shape[1])
        num_splits = choose_num_splits(
            num_tokens * triton.cdiv(num_heads, BLOCK_H),
            triton.cdiv(max_keys, block_k(ring.dtype)),
            compute_units(queries.device),
        )
    part_m = part_l = part_a = None
    if num_splits > 1:
        shape = (num_tokens, num_splits, num_heads)
        # Apart, so that both lie where the kernels were compiled to find them, whatever the shape.
        part_m = queries.new_empty(shape, dtype=torch.float32)
        part_l = torch.empty_like(part_m)
        part_a = queries.new_empty((*shape, fp8_ds_mla.HEAD_DIM), dtype=torch.float32)

    arguments = attention_arguments(
        queries, ring, positions, scale=scale, window=window, sink=sink, compressed=compressed,
        inverse_rope=inverse_rope, out=out,
    )  # fmt: skip
    decode_kernel[(num_tokens, num_splits, triton.cdiv(num_heads, BLOCK_H))](
        **arguments,
        slots_ptr=slots,
        part_m_ptr=part_m,
        part_l_ptr=part_l,
        part_a_ptr=part_a,
        NUM_SPLITS=num_splits,
        num_warps=NUM_WARPS,
    )
    if part_m is not None:
        join(part_m, part_l, part_a, positions, sink=sink, inverse_rope=inverse_rope, out=out)
    return out


def isa_variants() -> list[KernelVariant]:
    """The shapes that are launched: formats by card, one share and several, 16 heads and more."""
    types = isa_types(
        decode_kernel,
        cos_sin_ptr="*fp32:16",
        part_m_ptr="*fp32:16",
        part_l_ptr="*fp32:16",
        part_a_ptr="*fp32:16",
    )
    variants = []
    for arch, ring_dtype in KV_DTYPES:
        for has_compressed, num_splits in ((False, 1), (False, 4), (True, 1), (True, 8)):
            rows = "bf16" if ring_dtype == torch.bfloat16 else "fp8"
            source = "window+compressed" if has_compressed else "window"
            ending = "one share" if num_splits == 1 else f"{num_splits} shares"
            variants.append(
                KernelVariant(
                    kernel=decode_kernel,
                    name=f"{rows}, {source}, {ending}",
                    types=types,
                    constants={
                        **isa_constants(ring_dtype, has_compressed, rotate=True),
                        "NUM_SPLITS": num_splits,
                    },
                    num_warps=NUM_WARPS,
                    archs=(arch,),
                    min_workgroups_per_cu=2,
                    refreshed_by_host=True,
                    shape=f"decode, {rows}, {source}",
                )
            )
    return variants
