"""Prefill: the query tokens of a step's chunks against older keys, the chunk's keys and history.

A token sees the window that ends at it. What of the window lies before its chunk is read from the
ring, which still holds the keys written before this step; the rest is read from this step's keys.
Where a chunk starts is reckoned on the device, from the token's position and its place in the
chunk. Compressed rows follow by index. One program takes one token and 16 heads.
"""

import torch
import triton
import triton.language as tl

from . import tiles
from .attention import (
    BLOCK_H,
    attention_arguments,
    check_attention,
    isa_constants,
    isa_types,
)
from .caches import CompressedKeys, KeyCache, check_int, check_rows
from .launch import KV_DTYPES, NUM_WARPS
from .variants import KernelVariant


@triton.jit
def prefill_kernel(
    q_ptr,  # [T, H, 512] bf16
    keys_ptr,  # [T, 512] bf16
    ring_ptr,  # [slots, ring_stride] bytes
    slots_ptr,  # [B] int32
    starts_ptr,  # [B + 1] int32
    sequences_ptr,  # [T] int32
    positions_ptr,  # [T] int32 or int64
    compressed_ptr,  # [blocks, compressed_stride] bytes
    indices_ptr,  # [T, indices_stride] int32
    lengths_ptr,  # [T] int32
    sink_ptr,  # [H] float32
    cos_sin_ptr,  # [P, 64] float32
    out_ptr,  # [T, H, 512] bf16
    q_stride_t,
    q_stride_h,
    keys_stride,
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
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i_head = tl.minimum(o_head, num_heads - 1).to(tl.int64)

    # Volatile: a scalar load may see last step's value when a graph is replayed.
    i_seq = tl.load(sequences_ptr + i_t, volatile=True).to(tl.int64)
    in_batch = i_seq >= 0
    i_seq = tl.maximum(i_seq, 0)
    i_slot = tl.load(slots_ptr + i_seq, volatile=True).to(tl.int64)
    chunk_begin = tl.load(starts_ptr + i_seq, volatile=True).to(tl.int64)
    chunk_end = tl.load(starts_ptr + i_seq + 1, volatile=True).to(tl.int64)
    position = tl.load(positions_ptr + i_t, volatile=True).to(tl.int64)
    is_live = in_batch & (i_slot > 0) & (i_t >= chunk_begin) & (i_t < chunk_end)

    # The window [lo, position]; positions from chunk_start on are this step's.
    lo = tl.maximum(position + 1 - WINDOW, 0)
    chunk_start = position - (i_t - chunk_begin)
    n_ring = tl.where(is_live, tl.maximum(chunk_start - lo, 0), 0).to(tl.int32)
    n_chunk = tl.where(is_live, position + 1 - tl.maximum(lo, chunk_start), 0).to(tl.int32)
    first_row = (lo % RING_ROWS).to(tl.int32)

    b_q = tiles.load_rows(q_ptr + i_t * q_stride_t + i_head * q_stride_h)
    b_m = tl.full((BLOCK_H,), tiles.NO_SCORE, tl.float32)
    b_l = tl.zeros((BLOCK_H,), tl.float32)
    b_a = tl.zeros((4, BLOCK_H, 128), tl.float32)

    p_slot = ring_ptr + i_slot * ring_stride
    for i_tile in tl.range(0, tl.cdiv(n_ring, BLOCK_K), num_stages=1):
        b_m, b_l, b_a = tiles.attend_ring(
            b_q,
            p_slot,
            first_row,
            n_ring,
            i_tile,
            qk_scale,
            b_m,
            b_l,
            b_a,
            RING_ROWS,
            RING_FORMAT,
            BLOCK_K,
        )

    for i_tile in tl.range(0, tl.cdiv(n_chunk, BLOCK_K), num_stages=1):
        o_key = i_tile * BLOCK_K + tl.arange(0, BLOCK_K)
        i_key = i_t + 1 - n_chunk + tl.minimum(o_key, n_chunk - 1)
        b_k = tiles.load_rows(keys_ptr + i_key * keys_stride)
        b_m, b_l, b_a = tiles.attend(b_q, b_k, o_key < n_chunk, qk_scale, b_m, b_l, b_a)

    if HAS_COMPRESSED:
        n_compressed = tl.where(is_live, tl.load(lengths_ptr + i_t, volatile=True), 0)
        p_indices = indices_ptr + i_t * indices_stride
        for i_tile in tl.range(0, tl.cdiv(n_compressed, BLOCK_K), num_stages=1):
            b_m, b_l, b_a = tiles.attend_compressed(
                b_q,
                p_indices,
                n_compressed,
                i_tile,
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

    b_a *= tiles.fold_sink(b_m, b_l, sink_ptr, i_head, HAS_SINK)[None, :, None]
    if ROTATE:
        b_a = tiles.rotate_back(b_a, cos_sin_ptr + tl.maximum(position, 0) * cos_sin_stride)
    p_out = out_ptr + i_t * out_stride_t + i_head * out_stride_h
    tiles.store_rows(p_out, o_head < num_heads, b_a)


def prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    ring: KeyCache,
    slots: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int = 128,
    sink: torch.Tensor | None = None,
    compressed: CompressedKeys | None = None,
    inverse_rope: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a ragged batch of chunks, ``[tokens, heads, 512]``, before the ring is written.

    Args:
        queries: ``[tokens, heads, 512]`` bf16.
        keys: ``[tokens, 512]`` bf16, this step's keys, one for each query token. Where the ring is
            fp8, give them rounded as the ring will hold them (``fp8_ds_mla.round_rows``): else a
            key would change its value once it is read from the ring, and with it the result, by
            where a prompt is cut.
        ring: the layer's rings, holding positions before each chunk.
        slots: ``[sequences]`` int32, the ring of each sequence; 0 marks padding.
        starts: ``[sequences + 1]`` int32: tokens ``starts[i] .. starts[i + 1] - 1`` are sequence
            ``i``'s, at consecutive positions.
        sequences: ``[tokens]`` int32, the sequence of each token; negative marks padding, whose
            output is zero, as that of a token past its sequence's end.
        positions: ``[tokens]`` int32 or int64.
        scale, window, sink, compressed, inverse_rope, out: as in ``decode``.

    No device value is read on the host. Raises ValueError for what the kernel cannot take.
    """
    out = torch.empty_like(queries) if out is None else out
    check_attention(
        queries, ring, positions, window=window, sink=sink, compressed=compressed,
        inverse_rope=inverse_rope, out=out,
    )  # fmt: skip
    num_tokens, num_heads, _ = queries.shape
    check_rows("keys", keys, num_tokens)
    check_int("slots", slots, 1, (torch.int32,))
    check_int("starts", starts, 1, (torch.int32,))
    check_int("sequences", sequences, 1, (torch.int32,))
    if len(sequences) != num_tokens or len(positions) != num_tokens:
        raise ValueError(
            f"{num_tokens} tokens, {len(sequences)} sequences, {len(positions)} positions"
        )
    if len(starts) != len(slots) + 1:
        raise ValueError(f"{len(slots)} slots need {len(slots) + 1} starts, not {len(starts)}")
    if num_tokens == 0:
        return out

    arguments = attention_arguments(
        queries, ring, positions, scale=scale, window=window, sink=sink, compressed=compressed,
        inverse_rope=inverse_rope, out=out,
    )  # fmt: skip
    prefill_kernel[(num_tokens, triton.cdiv(num_heads, BLOCK_H))](
        **arguments,
        keys_ptr=keys,
        slots_ptr=slots,
        starts_ptr=starts,
        sequences_ptr=sequences,
        keys_stride=keys.stride(0),
        num_warps=NUM_WARPS,
    )
    return out


def isa_variants() -> list[KernelVariant]:
    """By card and row type, with and without compressed rows."""
    types = isa_types(
        prefill_kernel, keys_ptr="*bf16:16", starts_ptr="*i32:16", sequences_ptr="*i32:16"
    )
    variants = []
    for arch, ring_dtype in KV_DTYPES:
        for has_compressed in (False, True):
            rows = "bf16" if ring_dtype == torch.bfloat16 else "fp8"
            source = "window+compressed" if has_compressed else "window"
            variants.append(
                KernelVariant(
                    kernel=prefill_kernel,
                    name=f"{rows}, {source}",
                    types=types,
                    constants={
                        **isa_constants(ring_dtype, has_compressed, rotate=False),
                        "cos_sin_ptr": None,
                    },
                    num_warps=NUM_WARPS,
                    archs=(arch,),
                    min_workgroups_per_cu=2,
                    refreshed_by_host=True,
                    shape="prefill",
                )
            )
    return variants
