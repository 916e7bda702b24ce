"""Keeping the raw keys and scores of groups that are still open, in state rings."""

import torch
import triton
import triton.language as tl

from .compressor import MODEL_SHAPES, CompressorShape, CompressorWeights, StateRing
from .launch import WAVE_SIZES, warps
from .ring_tail import resolve_targets, tail_row, tail_tokens
from .step_tokens import INDEX_TYPES, StepTokens, check_rows
from .variants import KernelVariant

VALUES_PER_LANE = 4
"""Keys (and scores) that a lane moves: one 16-byte load and store each."""


@triton.jit
def save_state_kernel(
    keys_ptr,  # float32 [tokens, WIDTH]
    scores_ptr,  # float32 [tokens, WIDTH]
    bias_ptr,  # float32 [RATIO, WIDTH]
    state_ptr,  # float32, slots slot_stride apart
    positions_ptr,
    request_ptr,
    query_start_ptr,
    slots_ptr,
    ends_ptr,
    key_stride,
    score_stride,
    slot_stride,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot, row, position = tail_row(
        token, positions_ptr, request_ptr, query_start_ptr, slots_ptr, ends_ptr, ROWS, HAS_ENDS
    )
    if slot == 0:
        return
    column = tl.arange(0, WIDTH)
    row_ptr = state_ptr + slot * slot_stride + row * (2 * WIDTH)
    score = tl.load(scores_ptr + token * score_stride + column)
    bias = tl.load(bias_ptr + (position % RATIO) * WIDTH + column)
    tl.store(row_ptr + column, tl.load(keys_ptr + token * key_stride + column))
    tl.store(row_ptr + WIDTH + column, score + bias)


def save_state(
    keys: torch.Tensor,
    scores: torch.Tensor,
    weights: CompressorWeights,
    ring: StateRing,
    step: StepTokens,
    *,
    targets: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Keeps the last ``min(ring.rows, chunk length)`` tokens' keys and scores of every chunk.

    ``keys`` and ``scores`` are float32 ``[tokens, width]`` with unit stride. Run it after
    :func:`.compress.compress`, which reads the rows that this overwrites. ``targets`` and ``ends``
    write a snapshot, as in :func:`.ring_write.write_ring`.

    Raises ValueError for tensors of another dtype, shape or alignment.
    """
    check_step_values(keys, scores, ring.shape, step)
    slots, ends = resolve_targets(step, targets, ends)
    tokens = len(keys)
    if tokens == 0:
        return
    save_state_kernel[(tokens,)](
        keys,
        scores,
        weights.bias,
        ring.buffer,
        step.positions,
        step.token_to_request,
        step.query_start,
        slots,
        ends,
        keys.stride(0),
        scores.stride(0),
        ring.stride,
        ROWS=ring.rows,
        RATIO=ring.shape.ratio,
        WIDTH=ring.shape.width,
        HAS_ENDS=ends is not None,
        num_warps=warps(keys.device, ring.shape.width // VALUES_PER_LANE),
    )


def save_state_reference(
    keys: torch.Tensor,
    scores: torch.Tensor,
    weights: CompressorWeights,
    ring: StateRing,
    step: StepTokens,
    *,
    targets: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """PyTorch twin of :func:`save_state`, request by request."""
    check_step_values(keys, scores, ring.shape, step)
    slots, ends = resolve_targets(step, targets, ends)
    for token, slot, row in tail_tokens(step, ring.rows, slots, ends):
        biased = scores[token] + weights.bias[step.positions[token] % ring.shape.ratio]
        ring.rows_view()[slot, row, 0] = keys[token]
        ring.rows_view()[slot, row, 1] = biased


def check_step_values(
    keys: torch.Tensor, scores: torch.Tensor, shape: CompressorShape, step: StepTokens
) -> None:
    """Raises ValueError unless both are float32 ``[tokens, width]`` for tokens of the step."""
    check_rows("keys", keys, torch.float32, shape.width)
    check_rows("scores", scores, torch.float32, shape.width)
    if len(keys) != len(scores):
        raise ValueError(f"{len(keys)} tokens have keys, {len(scores)} have scores")
    step.check_tokens(len(keys))


def isa_variants() -> list[KernelVariant]:
    """The three compressors of the model; with end positions where a snapshot is written."""
    return [
        KernelVariant(
            kernel=save_state_kernel,
            name=f"{shape}, {'snapshot' if ends else 'ring'}",
            types={
                **dict.fromkeys(("keys_ptr", "scores_ptr", "bias_ptr", "state_ptr"), "*fp32:16"),
                **INDEX_TYPES,
                **({"ends_ptr": "*i64:16"} if ends else {}),
                **dict.fromkeys(("key_stride", "score_stride", "slot_stride"), "i32:16"),
            },
            constants={
                **({} if ends else {"ends_ptr": None}),
                "ROWS": shape.window,
                "RATIO": shape.ratio,
                "WIDTH": shape.width,
                "HAS_ENDS": ends,
            },
            num_warps=shape.width // VALUES_PER_LANE // wave_size,
            archs=(arch,),
            refreshed_by_host=True,
        )
        for shape in MODEL_SHAPES
        for arch, wave_size in WAVE_SIZES.items()
        for ends in (False, True)
    ]
