"""What the attention kernels share on chip: loading a tile of key rows, and one softmax step.

A key row of 512 values is both K and V. A tile is held as four pieces of 128 values,
``[4, keys, 128]``, and both products are batched over the pieces: the compiler gives each of four
groups of lanes one piece, so that it keeps a quarter of the queries and of the accumulator, no
product is computed twice, and only the scores are exchanged. Scores are kept in units of log2:
``exp2`` is enough.
"""

import triton
import triton.language as tl

from . import fp8_ds_mla

LOG2_E = tl.constexpr(1.4426950408889634)

NO_SCORE = tl.constexpr(-3.0e38)
"""The running maximum before any key: finite, so that it may be subtracted from itself."""

BF16 = tl.constexpr(0)
E4M3FN = tl.constexpr(1)
E4M3FNUZ = tl.constexpr(2)
E4M3FN_BY_BITS = tl.constexpr(3)
"""e4m3fn on a card that converts e4m3fnuz only. NaN, which no writer stores, reads as 480."""

_NOPE = tl.constexpr(fp8_ds_mla.NOPE_DIM)
_DATA_BYTES = tl.constexpr(fp8_ds_mla.DATA_BYTES)
_SCALE_BYTES = tl.constexpr(fp8_ds_mla.SCALE_BYTES)
_BF16_ROW_BYTES = tl.constexpr(2 * fp8_ds_mla.HEAD_DIM)


@triton.jit
def _scale(b_exponent, FORMAT: tl.constexpr):
    """UE8M0 exponents (int32) as float32 powers of two."""
    if FORMAT == E4M3FN_BY_BITS:
        b_exponent += 8  # makes up for float16's exponent bias, see _decode_fp8
    return (b_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decode_fp8(b_bytes, b_scale, FORMAT: tl.constexpr):
    """Bytes times powers of two, as bf16.

    The product has the three mantissa bits of fp8, so dropping float32's low half is exact.
    """
    if FORMAT == E4M3FNUZ:
        b_value = b_bytes.to(tl.float8e4b8, bitcast=True).to(tl.float32)
    elif FORMAT == E4M3FN:
        b_value = b_bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The bits, moved to float16's places, are the value over 256, subnormal or not.
        b_wide = b_bytes.to(tl.int16)
        b_half = ((b_wide & 0x7F) << 7) | ((b_wide & 0x80) << 8)
        b_value = b_half.to(tl.float16, bitcast=True).to(tl.float32)
    b_bits = (b_value * b_scale).to(tl.int32, bitcast=True)
    return (b_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_rows(p_row):
    """Rows of 512 values at ``p_row [N]`` (bf16 pointers): ``[4, N, 128]``."""
    o_piece = tl.arange(0, 4)[:, None, None]
    o_dim = tl.arange(0, 128)[None, None, :]
    return tl.load(p_row[None, :, None] + 128 * o_piece + o_dim)


@triton.jit
def load_tile(p_slot, i_row, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """Rows ``i_row [K]`` of the slots at ``p_slot`` (one pointer or ``[K]``), ``[4, K, 128]`` bf16.

    Every row is read, without a mask: callers pass rows that may be read.
    """
    i_row = i_row.to(tl.int64)
    if FORMAT == BF16:
        return load_rows((p_slot + i_row * _BF16_ROW_BYTES).to(tl.pointer_type(tl.bfloat16)))

    o_piece = tl.arange(0, 4)[:, None, None]
    o_dim = tl.arange(0, 128)[None, None, :]
    o_value = 128 * o_piece + o_dim
    p_data = p_slot + i_row * _DATA_BYTES
    p_scale = p_slot + ROWS * _DATA_BYTES + i_row * _SCALE_BYTES
    # The eight exponents of a row are one word: [1, K, 1], and two of them for each piece.
    b_scales = tl.load(p_scale.to(tl.pointer_type(tl.int64)))[None, :, None]
    b_pair = (b_scales >> (16 * o_piece)).to(tl.int32)
    b_low = _scale(b_pair & 0xFF, FORMAT)
    b_high = _scale((b_pair >> 8) & 0xFF, FORMAT)
    # The upper half of piece 3 reads bytes of rotated values; they are replaced below.
    b_bytes = tl.load(p_data[None, :, None] + o_value)
    b_nope = _decode_fp8(b_bytes, tl.where(o_dim < 64, b_low, b_high), FORMAT)
    p_rope = (p_data + _NOPE).to(tl.pointer_type(tl.bfloat16))
    m_rope = o_value >= _NOPE
    b_rope = tl.load(p_rope[None, :, None] + (o_value - _NOPE), mask=m_rope, other=0.0)
    return tl.where(m_rope, b_rope, b_nope)


@triton.jit
def attend(b_q, b_k, m_key, qk_scale, b_m, b_l, b_a):
    """One step of the running softmax over a tile of keys, of which ``m_key [K]`` count.

    ``b_q [4, H, 128]`` and ``b_k [4, K, 128]`` bf16; running maximum ``b_m`` and sum ``b_l``
    ``[H]``, accumulator ``b_a [4, H, 128]``, float32, which are returned anew. Rows outside
    ``m_key`` must be finite.
    """
    # [4, H, K], then [H, K]
    b_s = tl.sum(tl.dot(b_q, tl.permute(b_k, (0, 2, 1))), axis=0)
    b_s = tl.where(m_key[None, :], b_s * qk_scale, NO_SCORE)
    b_m_new = tl.maximum(b_m, tl.max(b_s, axis=1))
    b_p = tl.where(m_key[None, :], tl.exp2(b_s - b_m_new[:, None]), 0.0)
    b_decay = tl.exp2(b_m - b_m_new)
    b_l = b_l * b_decay + tl.sum(b_p, axis=1)
    b_p = tl.broadcast_to(b_p.to(tl.bfloat16)[None, :, :], (4, b_p.shape[0], b_p.shape[1]))
    b_a = tl.dot(b_p, b_k, b_a * b_decay[None, :, None])
    return b_m_new, b_l, b_a


@triton.jit
def attend_compressed(
    b_q,
    p_indices,
    n_indices,
    i_tile,
    cache_ptr,
    cache_stride,
    qk_scale,
    b_m,
    b_l,
    b_a,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``attend`` over the compressed rows whose indices are tile ``i_tile`` at ``p_indices``."""
    o_index = i_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    # Past the last index: read its row again, and let it not count.
    i_key = tl.load(p_indices + tl.minimum(o_index, n_indices - 1))
    m_key = (o_index < n_indices) & (i_key >= 0)
    i_key = tl.maximum(i_key, 0)
    p_block = cache_ptr + (i_key // ROWS).to(tl.int64) * cache_stride
    b_k = load_tile(p_block, i_key % ROWS, ROWS, FORMAT)
    # Row 0 stands in for a negative index, whatever it holds, and a zero weight times NaN is NaN.
    b_k = tl.where(m_key[None, :, None], b_k, 0.0)
    return attend(b_q, b_k, m_key, qk_scale, b_m, b_l, b_a)


@triton.jit
def attend_ring(
    b_q,
    p_slot,
    first_row,
    n_keys,
    i_tile,
    qk_scale,
    b_m,
    b_l,
    b_a,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``attend`` over tile ``i_tile`` of ``n_keys`` ring rows from ``first_row`` on."""
    o_key = i_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    # Past the last key: read it again, and let it not count.
    i_row = first_row + tl.minimum(o_key, n_keys - 1)
    i_row = tl.where(i_row >= ROWS, i_row - ROWS, i_row)
    b_k = load_tile(p_slot, i_row, ROWS, FORMAT)
    return attend(b_q, b_k, o_key < n_keys, qk_scale, b_m, b_l, b_a)


@triton.jit
def fold_sink(b_m, b_l, sink_ptr, i_head, HAS_SINK: tl.constexpr):
    """What the accumulator is multiplied by at the end, ``[H]``: the sink counted in, once.

    Zero where there is no key at all. ``sink_ptr`` points to float32 logits in natural units.
    """
    if HAS_SINK:
        b_sink = tl.load(sink_ptr + i_head) * LOG2_E
        b_top = tl.maximum(b_m, b_sink)
        b_decay = tl.exp2(b_m - b_top)
        b_total = b_l * b_decay + tl.exp2(b_sink - b_top)
    else:
        b_decay = tl.full(b_l.shape, 1.0, tl.float32)
        b_total = b_l
    return tl.where(b_l > 0.0, b_decay / tl.where(b_l > 0.0, b_total, 1.0), 0.0)


@triton.jit
def rotate_back(b_a, p_cos):
    """Inverse of the interleaved RoPE on the last 64 values of rows ``[4, H, 128]``.

    ``p_cos`` points to the position's row of the table: 32 cosines, then 32 sines, float32.
    """
    o_pair = 64 * tl.arange(0, 4)[:, None, None] + tl.arange(0, 64)[None, None, :] - _NOPE // 2
    m_rope = o_pair >= 0
    b_cos = tl.load(p_cos + o_pair, mask=m_rope, other=1.0)
    b_sin = tl.load(p_cos + 32 + o_pair, mask=m_rope, other=0.0)
    b_even, b_odd = tl.split(tl.reshape(b_a, (4, b_a.shape[1], 64, 2)))
    b_back = tl.join(b_even * b_cos + b_odd * b_sin, b_odd * b_cos - b_even * b_sin)
    return tl.reshape(b_back, (4, b_a.shape[1], 128))


@triton.jit
def store_rows(p_out, m_head, b_a):
    """Stores rows ``[4, H, 128]`` at ``p_out [H]`` where ``m_head [H]``."""
    o_piece = tl.arange(0, 4)[:, None, None]
    o_dim = tl.arange(0, 128)[None, None, :]
    p_value = p_out[None, :, None] + 128 * o_piece + o_dim
    tl.store(p_value, b_a.to(p_out.dtype.element_ty), mask=m_head[None, :, None])
