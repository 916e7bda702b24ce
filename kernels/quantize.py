"""On-chip quantisation and rotation of key rows, shared by the kernels that store them.

Every function works on float32 values and computes a scale's exponent from the bits of the largest
magnitude, so that rows are the same to the bit on every card.
"""

import triton
import triton.language as tl

from .fp8_ds_mla import (
    DATA_BYTES,
    GROUP_SIZE,
    HEAD_DIM,
    NOPE_DIM,
    NUM_GROUPS,
    SCALE_BIAS,
    SCALE_BYTES,
    SMALLEST_GROUP_MAX,
)

_DATA_BYTES = tl.constexpr(DATA_BYTES)
_GROUP_SIZE = tl.constexpr(GROUP_SIZE)
_HEAD_DIM = tl.constexpr(HEAD_DIM)
_NOPE_DIM = tl.constexpr(NOPE_DIM)
_NUM_GROUPS = tl.constexpr(NUM_GROUPS)
_SCALE_BIAS = tl.constexpr(SCALE_BIAS)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_SMALLEST = tl.constexpr(SMALLEST_GROUP_MAX)

_MANTISSA_BITS = tl.constexpr(23)
_ROUND_UP = tl.constexpr(0x1FFFFF)  # carries into the exponent where the mantissa is above 1.75


@triton.jit
def scale_exponent(largest, FNUZ: tl.constexpr):
    """Least ``e`` (int32) with ``largest <= limit * 2**e``; the limit is 448, or 224 with FNUZ."""
    LIMIT_EXPONENT: tl.constexpr = 7 if FNUZ else 8  # both limits are 1.75 * 2**LIMIT_EXPONENT
    bits = tl.maximum(largest, _SMALLEST).to(tl.int32, bitcast=True)
    return ((bits + _ROUND_UP) >> _MANTISSA_BITS) - _SCALE_BIAS - LIMIT_EXPONENT


@triton.jit
def power_of_two(exponent):
    """``2.0 ** exponent`` for int32 exponents from -126 to 127, exact."""
    return ((exponent + _SCALE_BIAS) << _MANTISSA_BITS).to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(scaled, FNUZ: tl.constexpr):
    """float32 rounded to fp8 e4m3, saturating at the limit."""
    LIMIT: tl.constexpr = 224.0 if FNUZ else 448.0
    clamped = tl.clamp(scaled, -LIMIT, LIMIT)
    return clamped.to(tl.float8e4b8 if FNUZ else tl.float8e4nv)


@triton.jit
def quantize_groups(values, FNUZ: tl.constexpr):
    """Values ``[512]`` as fp8 ``[8, 64]`` and exponents ``[8]``; the last group is the rope's."""
    groups = tl.reshape(values, (_NUM_GROUPS + 1, _GROUP_SIZE))
    exponents = scale_exponent(tl.max(tl.abs(groups), axis=1), FNUZ)
    return to_fp8(groups * power_of_two(-exponents)[:, None], FNUZ), exponents


@triton.jit
def store_fp8_row(slot_ptr, row, rows, values, FNUZ: tl.constexpr):
    """Stores values ``[512]`` as one ``fp8_ds_mla`` row of the slot at ``slot_ptr`` (uint8)."""
    fp8, exponents = quantize_groups(values, FNUZ)
    column = tl.arange(0, _HEAD_DIM)
    data_ptr = slot_ptr + row * _DATA_BYTES
    data = tl.reshape(fp8.to(tl.uint8, bitcast=True), (_HEAD_DIM,))
    tl.store(data_ptr + column, data, mask=column < _NOPE_DIM)
    rope_ptr = (data_ptr + _NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
    tl.store(rope_ptr + column - _NOPE_DIM, values.to(tl.bfloat16), mask=column >= _NOPE_DIM)
    group = tl.arange(0, _SCALE_BYTES)
    scales = tl.where(group < _NUM_GROUPS, exponents + _SCALE_BIAS, 0)
    scale_ptr = slot_ptr + rows * _DATA_BYTES + row * _SCALE_BYTES
    tl.store(scale_ptr + group, scales.to(tl.uint8))


@triton.jit
def rotate_tail(values, cos_sin_ptr, HEAD: tl.constexpr, ROPE: tl.constexpr):
    """Rotates the last ``ROPE`` of values ``[HEAD]`` by adjacent pairs.

    ``cos_sin_ptr`` is one row of the table: ``ROPE / 2`` cosines, then as many sines, float32.
    """
    HALF: tl.constexpr = ROPE // 2
    even, odd = tl.split(tl.reshape(values, (HEAD // 2, 2)))
    pair = tl.arange(0, HEAD // 2) - (HEAD - ROPE) // 2
    is_rope = pair >= 0
    cos = tl.load(cos_sin_ptr + pair, mask=is_rope, other=1.0)
    sin = tl.load(cos_sin_ptr + HALF + pair, mask=is_rope, other=0.0)
    new_even = tl.where(is_rope, even * cos - odd * sin, even)
    return tl.interleave(new_even, tl.where(is_rope, odd * cos + even * sin, odd))
