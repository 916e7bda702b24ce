"""Compressing groups of tokens into rows of the paged history.

Where a token closes a group (``(position + 1) % ratio == 0``) the keys of the group's window are
averaged with the softmax of their scores as weights, channel by channel; the mean is normalised by
its root mean square, its last 64 values are rotated at the group's first position, and the row is
stored. Tokens of this step are read from the step's own keys and scores, older ones from the state
ring, so a group may lie in any number of chunks and gives the same bits.
"""

import torch
import triton
import triton.language as tl

from .caches import KeyCache
from .compress_state import check_step_values
from .compressor import MODEL_SHAPES, CompressorShape, CompressorWeights, StateRing
from .fp8_ds_mla import ROPE_DIM
from .indexer_cache import INDEXER_DIM, IndexerCache
from .launch import KV_DTYPES, WAVE_SIZES, warps
from .quantize import power_of_two, rotate_tail, scale_exponent, store_fp8_row, to_fp8
from .step_tokens import INDEX_TYPES, StepTokens, chunk_of, load_index
from .variants import KernelVariant

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _window_rows(
    keys_ptr,
    scores_ptr,
    bias_ptr,
    slot_ptr,
    token,
    position,
    first,
    key_stride,
    score_stride,
    index,  # int [TILE]: rows of the window, oldest first
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys and biased scores ``[TILE, HEAD]`` of rows of a window; -inf before position 0."""
    age = WINDOW - 1 - index
    row_token = token - age
    row_position = position - age
    is_fresh = (row_token >= first)[:, None]
    is_kept = ((row_token < first) & (row_position >= 0))[:, None]
    half = index // RATIO  # of two where windows overlap
    column = (half * HEAD)[:, None] + tl.arange(0, HEAD)[None, :]

    fresh_key = tl.load(keys_ptr + row_token[:, None] * key_stride + column, is_fresh, 0.0)
    fresh_score = tl.load(scores_ptr + row_token[:, None] * score_stride + column, is_fresh, 0.0)
    bias = tl.load(bias_ptr + (index % RATIO)[:, None] * WIDTH + column, is_fresh, 0.0)

    row_ptr = slot_ptr + (row_position % ROWS)[:, None] * (2 * WIDTH) + column
    kept_key = tl.load(row_ptr, is_kept, 0.0)
    kept_score = tl.load(row_ptr + WIDTH, is_kept, float("-inf"))
    key = tl.where(is_fresh, fresh_key, kept_key)
    return key, tl.where(is_fresh, fresh_score + bias, kept_score)


@triton.jit
def merge_rows(largest, weight_sum, key_sum, key, score):
    """The softmax mean so far, per channel, with rows ``[n, HEAD]`` taken in."""
    new_largest = tl.maximum(largest, tl.max(score, axis=0))
    # Without a finite score yet there is nothing to weigh, and no difference of infinities.
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    decay = tl.exp2((largest - shift) * _LOG2_E)
    weight = tl.exp2((score - shift[None, :]) * _LOG2_E)
    return (
        new_largest,
        weight_sum * decay + tl.sum(weight, axis=0),
        key_sum * decay + tl.sum(weight * key, axis=0),
    )


@triton.jit
def store_mean(
    mean,  # float32 [HEAD]
    norm_ptr,
    cos_sin_ptr,
    history_ptr,
    position,
    history_row,
    cos_sin_stride,
    block_stride,
    eps,
    RATIO: tl.constexpr,
    HEAD: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FP8: tl.constexpr,
    FNUZ: tl.constexpr,
):
    """Normalise and rotate the mean of the group that ends at ``position``, and store its row."""
    column = tl.arange(0, HEAD)
    norm = tl.load(norm_ptr + column).to(tl.float32)
    normed = mean * tl.rsqrt(tl.sum(mean * mean, axis=0) / HEAD + eps) * norm
    group_start = position - (RATIO - 1)
    row = rotate_tail(normed, cos_sin_ptr + group_start * cos_sin_stride, HEAD, ROPE)
    rounded = row.to(tl.bfloat16)

    block_ptr = history_ptr + (history_row // BLOCK_ROWS) * block_stride
    row_in_block = history_row % BLOCK_ROWS
    if not FP8:
        bf16_ptr = block_ptr.to(tl.pointer_type(tl.bfloat16))
        tl.store(bf16_ptr + row_in_block * HEAD + column, rounded)
    elif HEAD == 512:
        store_fp8_row(block_ptr, row_in_block, BLOCK_ROWS, rounded.to(tl.float32), FNUZ)
    else:
        value = rounded.to(tl.float32)
        exponent = scale_exponent(tl.max(tl.abs(value), axis=0), FNUZ)
        fp8 = to_fp8(value * power_of_two(-exponent), FNUZ)
        tl.store(block_ptr + row_in_block * HEAD + column, fp8.to(tl.uint8, bitcast=True))
        scale_ptr = (block_ptr + BLOCK_ROWS * HEAD).to(tl.pointer_type(tl.float32))
        tl.store(scale_ptr + row_in_block, power_of_two(exponent))


@triton.jit
def compress_kernel(
    keys_ptr,  # float32 [tokens, WIDTH]
    scores_ptr,  # float32 [tokens, WIDTH]
    bias_ptr,  # float32 [RATIO, WIDTH]
    state_ptr,  # float32, slots slot_stride apart
    norm_ptr,  # [HEAD]
    cos_sin_ptr,  # float32 [positions, ROPE]
    history_ptr,  # uint8, blocks block_stride apart
    history_rows_ptr,  # int64 [tokens]
    positions_ptr,
    request_ptr,
    query_start_ptr,
    slots_ptr,
    key_stride,
    score_stride,
    slot_stride,
    cos_sin_stride,
    block_stride,
    eps,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FP8: tl.constexpr,
    FNUZ: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = load_index(positions_ptr + token, True)
    if (position < 0) | ((position + 1) % RATIO != 0):
        return
    request, first, stop = chunk_of(token, request_ptr, query_start_ptr)
    if stop == first:
        return
    slot = load_index(slots_ptr + request, True).to(tl.int64)
    history_row = load_index(history_rows_ptr + token, True)
    if (slot <= 0) | (history_row < 0):
        return
    slot_ptr = state_ptr + slot * slot_stride

    largest = tl.full([HEAD], float("-inf"), tl.float32)
    weight_sum = tl.zeros([HEAD], tl.float32)
    key_sum = tl.zeros([HEAD], tl.float32)
    for tile in range(0, WINDOW, TILE):
        key, score = _window_rows(
            keys_ptr,
            scores_ptr,
            bias_ptr,
            slot_ptr,
            token,
            position,
            first,
            key_stride,
            score_stride,
            tile + tl.arange(0, TILE),
            ROWS,
            RATIO,
            WINDOW,
            HEAD,
            WIDTH,
        )
        largest, weight_sum, key_sum = merge_rows(largest, weight_sum, key_sum, key, score)
    store_mean(
        key_sum / weight_sum,
        norm_ptr,
        cos_sin_ptr,
        history_ptr,
        position,
        history_row,
        cos_sin_stride,
        block_stride,
        eps,
        RATIO,
        HEAD,
        ROPE,
        BLOCK_ROWS,
        FP8,
        FNUZ,
    )


def compress(
    keys: torch.Tensor,
    scores: torch.Tensor,
    weights: CompressorWeights,
    ring: StateRing,
    step: StepTokens,
    *,
    history: KeyCache | IndexerCache,
    history_rows: torch.Tensor,
) -> None:
    """Stores a compressed row for every group that a token of this step closes.

    ``keys`` and ``scores`` are float32 ``[tokens, width]`` with unit stride. ``history`` is a
    :class:`KeyCache` of bf16 or e4m3fn for rows of 512 values, an :class:`IndexerCache` for 128.
    ``history_rows`` int64 ``[>= tokens]`` is ``block * history.rows + row`` of the row that a token
    closes, negative where it is not to be stored; it is read at closing tokens only.

    Raises ValueError for tensors of another dtype, shape or alignment, and for another cache.
    """
    check_step_values(keys, scores, ring.shape, step)
    check_history(ring.shape, history, history_rows, len(keys))
    tokens = len(keys)
    if tokens == 0:
        return
    shape = ring.shape
    tile, lanes = _tile_and_lanes(shape)
    compress_kernel[(tokens,)](
        keys,
        scores,
        weights.bias,
        ring.buffer,
        weights.norm,
        weights.cos_sin,
        history.buffer,
        history_rows,
        step.positions,
        step.token_to_request,
        step.query_start,
        step.slots,
        keys.stride(0),
        scores.stride(0),
        ring.stride,
        weights.cos_sin.stride(0),
        history.stride,
        weights.eps,
        ROWS=ring.rows,
        RATIO=shape.ratio,
        WINDOW=shape.window,
        HEAD=shape.head,
        WIDTH=shape.width,
        ROPE=ROPE_DIM,
        TILE=tile,
        BLOCK_ROWS=history.rows,
        FP8=history.dtype != torch.bfloat16,
        FNUZ=history.dtype == torch.float8_e4m3fnuz,
        num_warps=warps(keys.device, lanes),
    )


def _tile_and_lanes(shape: CompressorShape) -> tuple[int, int]:
    """Window rows that a workgroup holds at a time, and its lanes: 16 keys a lane."""
    tile = 8 if shape.overlaps else 16
    return tile, tile * shape.head // 16


def check_history(
    shape: CompressorShape,
    history: KeyCache | IndexerCache,
    history_rows: torch.Tensor,
    tokens: int,
) -> None:
    """Raises ValueError unless ``history`` holds such rows, and each token has a number of one."""
    if isinstance(history, IndexerCache) != (shape.head == INDEXER_DIM):
        raise ValueError(f"{type(history).__name__} does not hold rows of {shape.head} values")
    if isinstance(history, KeyCache) and history.dtype == torch.float8_e4m3fnuz:
        raise ValueError("compressed rows are bfloat16 or float8_e4m3fn on every card")
    if history_rows.dtype != torch.int64 or history_rows.dim() != 1 or len(history_rows) < tokens:
        raise ValueError(
            f"history_rows is int64 [>= {tokens}], not {history_rows.dtype} of shape "
            f"{tuple(history_rows.shape)}"
        )


def isa_variants() -> list[KernelVariant]:
    """The three compressors of the model, by the type of the rows that they store on each card."""
    variants = []
    for shape in MODEL_SHAPES:
        tile, lanes = _tile_and_lanes(shape)
        for arch, ring_dtype in KV_DTYPES:
            is_indexer = shape.head == INDEXER_DIM
            is_fp8 = ring_dtype != torch.bfloat16
            if is_indexer and not is_fp8:
                continue
            pointers = ("keys_ptr", "scores_ptr", "bias_ptr", "state_ptr", "cos_sin_ptr")
            strides = [name for name in compress_kernel.arg_names if name.endswith("_stride")]
            variants.append(
                KernelVariant(
                    kernel=compress_kernel,
                    name=f"{shape}, {'fp8' if is_fp8 else 'bf16'}",
                    types={
                        **dict.fromkeys(pointers, "*fp32:16"),
                        "norm_ptr": "*bf16:16",
                        "history_ptr": "*u8:16",
                        "history_rows_ptr": "*i64:16",
                        **INDEX_TYPES,
                        **dict.fromkeys(strides, "i32:16"),
                        "eps": "fp32",
                    },
                    constants={
                        "ROWS": shape.window,
                        "RATIO": shape.ratio,
                        "WINDOW": shape.window,
                        "HEAD": shape.head,
                        "WIDTH": shape.width,
                        "ROPE": ROPE_DIM,
                        "TILE": tile,
                        "BLOCK_ROWS": 256 // shape.ratio,
                        "FP8": is_fp8,
                        "FNUZ": is_indexer and ring_dtype == torch.float8_e4m3fnuz,
                    },
                    num_warps=lanes // WAVE_SIZES[arch],
                    archs=(arch,),
                    refreshed_by_host=True,
                )
            )
    return variants
