"""Compressing groups of 128 tokens whose older tokens are a running softmax (``online_state``).

As ``compress``: where a token closes a group its row is normalised, rotated and stored. The tokens
of this step are read from the step's keys and scores, older ones from what is folded and raw.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .caches import KeyCache
from .compress import check_history, store_mean
from .compress_reference import rotate_pairs
from .compress_state import check_step_values
from .compressor import CompressorWeights
from .fp8_ds_mla import HEAD_DIM, ROPE_DIM
from .launch import KV_DTYPES, WAVE_SIZES, warps
from .online_state import (
    FOLDED_ROWS,
    RATIO,
    SHAPE,
    TILE,
    OnlineState,
    fold_fresh,
    fold_raw,
    load_folded,
)
from .step_tokens import INDEX_TYPES, StepTokens, chunk_of, load_index
from .variants import KernelVariant

GROUP_LANES = TILE * HEAD_DIM // 16
"""Lanes of a workgroup: 16 keys of a tile a lane."""


@triton.jit
def compress_online_kernel(
    keys_ptr,  # float32 [tokens, HEAD]
    scores_ptr,  # float32 [tokens, HEAD]
    bias_ptr,  # float32 [RATIO, HEAD]
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
    LOOKAHEAD: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD: tl.constexpr,
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
    request, begin, stop = chunk_of(token, request_ptr, query_start_ptr)
    if stop == begin:
        return
    slot = load_index(slots_ptr + request, True).to(tl.int64)
    history_row = load_index(history_rows_ptr + token, True)
    if (slot <= 0) | (history_row < 0):
        return
    column = tl.arange(0, HEAD)
    slot_ptr = state_ptr + slot * slot_stride
    group_start = position + 1 - RATIO
    first = position - (token - begin)

    largest = tl.full([HEAD], float("-inf"), tl.float32)
    weight_sum = tl.zeros([HEAD], tl.float32)
    key_sum = tl.zeros([HEAD], tl.float32)
    if first > group_start:
        largest, weight_sum, key_sum, folded = load_folded(
            slot_ptr, group_start, first, column, HEAD
        )
        largest, weight_sum, key_sum = fold_raw(
            slot_ptr, largest, weight_sum, key_sum, folded, first, column, LOOKAHEAD, HEAD
        )
    start = tl.maximum(group_start, first)
    while start <= position:
        largest, weight_sum, key_sum = fold_fresh(
            keys_ptr,
            scores_ptr,
            bias_ptr,
            largest,
            weight_sum,
            key_sum,
            token - (position - start),
            start,
            position + 1,
            column,
            key_stride,
            score_stride,
            RATIO,
            HEAD,
            TILE,
        )
        start += TILE
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


def compress_online(
    keys: torch.Tensor,
    scores: torch.Tensor,
    weights: CompressorWeights,
    state: OnlineState,
    step: StepTokens,
    *,
    history: KeyCache,
    history_rows: torch.Tensor,
) -> None:
    """Stores a compressed row for every group that a token of this step closes.

    Arguments as of :func:`.compress.compress`, for ratio 128.

    Raises ValueError for tensors of another dtype, shape or alignment, and for another cache.
    """
    check_step_values(keys, scores, SHAPE, step)
    check_history(SHAPE, history, history_rows, len(keys))
    tokens = len(keys)
    if tokens == 0:
        return
    compress_online_kernel[(tokens,)](
        keys,
        scores,
        weights.bias,
        state.buffer,
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
        state.stride,
        weights.cos_sin.stride(0),
        history.stride,
        weights.eps,
        LOOKAHEAD=state.lookahead,
        RATIO=RATIO,
        HEAD=HEAD_DIM,
        ROPE=ROPE_DIM,
        TILE=TILE,
        BLOCK_ROWS=history.rows,
        FP8=history.dtype != torch.bfloat16,
        FNUZ=False,
        num_warps=warps(keys.device, GROUP_LANES),
    )


def online_reference(
    keys: torch.Tensor,
    scores: torch.Tensor,
    weights: CompressorWeights,
    state: OnlineState,
    step: StepTokens,
    *,
    history: KeyCache,
    history_rows: torch.Tensor,
) -> None:
    """PyTorch twin of :func:`compress_online` and then :func:`.online_state.fold_state`."""
    check_step_values(keys, scores, SHAPE, step)
    rows = state.rows_view()
    for request, slot in enumerate(step.slots.tolist()):
        begin, stop = step.query_start[request : request + 2].tolist()
        if slot <= 0 or stop <= begin:
            continue
        first = int(step.positions[begin])
        end, group_start = first + stop - begin, first // RATIO * RATIO
        biased = scores[begin:stop] + weights.bias[step.positions[begin:stop] % RATIO]
        sequence = _Sequence(
            first, keys[begin:stop], biased, _kept(rows[slot], group_start, first, state.lookahead)
        )

        for close in range((first // RATIO + 1) * RATIO, end + 1, RATIO):
            place = int(history_rows[begin + close - 1 - first])
            if place < 0:
                continue
            _, weight_sum, key_sum = sequence.folded(close - RATIO, close)
            mean = key_sum / weight_sum
            normed = mean * torch.rsqrt(mean.square().mean() + weights.eps) * weights.norm.float()
            row = rotate_pairs(normed[None], weights.cos_sin[[close - RATIO]]).bfloat16()
            at = torch.tensor([place], device=keys.device)
            history.store_rows(at // history.rows, at % history.rows, row)
        final = max(end - state.lookahead, first)
        last_start = final // RATIO * RATIO
        folded = sequence.folded(last_start, final)
        rows[slot, 0, 0], rows[slot, 0, 1], rows[slot, 1, 0] = folded
        rows[slot, 1, 1] = final
        for position in range(final, end):
            raw = rows[slot, FOLDED_ROWS + position % state.lookahead]
            raw[0], raw[1] = keys[begin + position - first], biased[position - first]


@dataclass(frozen=True)
class _Sequence:
    """A chunk from position ``first``, and what is kept of its open group before it."""

    first: int
    keys: torch.Tensor
    scores: torch.Tensor
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def folded(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions ``[start, stop)`` of one group."""
        taken = slice(max(start, self.first) - self.first, stop - self.first)
        before = self.kept if start < self.first else _nothing(self.keys)
        return _merge(before, self.keys[taken], self.scores[taken])


def _nothing(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zero = keys.new_zeros(HEAD_DIM)
    return torch.full_like(zero, float("-inf")), zero, zero


def _kept(
    slot: torch.Tensor, group_start: int, first: int, lookahead: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the slot holds of positions ``[group_start, first)``."""
    if first == group_start:
        return _nothing(slot)
    folded = int(slot[1, 1, 0])
    usable = folded > group_start
    kept = (slot[0, 0], slot[0, 1], slot[1, 0]) if usable else _nothing(slot)
    raw = [slot[FOLDED_ROWS + p % lookahead] for p in range(max(folded, group_start), first)]
    if not raw:
        return kept
    return _merge(kept, torch.stack([r[0] for r in raw]), torch.stack([r[1] for r in raw]))


def _merge(
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor], keys: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    largest, weight_sum, key_sum = kept
    if len(keys) == 0:
        return kept
    new_largest = torch.maximum(largest, scores.amax(dim=0))
    shift = torch.where(new_largest == -torch.inf, 0.0, new_largest)
    decay, weight = torch.exp(largest - shift), torch.exp(scores - shift)
    return (
        new_largest,
        weight_sum * decay + weight.sum(dim=0),
        key_sum * decay + (weight * keys).sum(dim=0),
    )


def isa_variants() -> list[KernelVariant]:
    """By the type of the rows that it stores on each card, without drafts and with three."""
    variants = []
    pointers = ("keys_ptr", "scores_ptr", "bias_ptr", "state_ptr", "cos_sin_ptr")
    strides = [name for name in compress_online_kernel.arg_names if name.endswith("_stride")]
    for lookahead in (0, 3):
        for arch, ring_dtype in KV_DTYPES:
            is_fp8 = ring_dtype != torch.bfloat16
            variants.append(
                KernelVariant(
                    kernel=compress_online_kernel,
                    name=f"{'fp8' if is_fp8 else 'bf16'}, lookahead {lookahead}",
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
                        "LOOKAHEAD": lookahead,
                        "RATIO": RATIO,
                        "HEAD": HEAD_DIM,
                        "ROPE": ROPE_DIM,
                        "TILE": TILE,
                        "BLOCK_ROWS": 256 // RATIO,
                        "FP8": is_fp8,
                        "FNUZ": False,
                    },
                    num_warps=GROUP_LANES // WAVE_SIZES[arch],
                    archs=(arch,),
                    refreshed_by_host=True,
                )
            )
    return variants
