"""C128 state kept as a running softmax in place of 128 raw rows.

A compressed row is a softmax mean over the 128 tokens of its group, channel by channel. A softmax
can be kept as its maximum, denominator and numerator, into which tokens are folded as they come
(Milakov and Gimelshein, "Online normalizer calculation for softmax"). A token that may still be
rejected cannot be folded; it stays as a raw row until a later step knows.

A slot is float32 ``[2 + lookahead, 2, 512]``::

    row 0        maximum            denominator
    row 1        numerator          position up to which tokens are folded, in every value
    row 2 + i    keys               biased scores       of the token at p with p % lookahead == i

What is folded belongs to the group of the last folded token. A step whose chunk starts at
``first`` uses it only if it belongs to the open group; the raw rows from where it ends to ``first``
were accepted. A chunk that starts a group starts from nothing, so a new owner reads nothing of the
last one's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .compress import merge_rows
from .compress_state import check_step_values
from .compressor import CompressorShape, CompressorWeights
from .fp8_ds_mla import HEAD_DIM
from .launch import LANES, WAVE_SIZES, warps
from .step_tokens import INDEX_TYPES, StepTokens, load_index
from .variants import KernelVariant

RATIO = 128
SHAPE = CompressorShape(RATIO, HEAD_DIM)
FOLDED_ROWS = 2
"""Rows of a slot before the raw ones."""
_FOLDED_ROWS = tl.constexpr(FOLDED_ROWS)
TILE = 16
"""Tokens folded at a time."""
CHANNELS = 128
"""Channels of one workgroup."""


def online_rows(lookahead: int) -> int:
    """Rows of a slot, each of ``2 * 512`` float32 values."""
    return FOLDED_ROWS + lookahead


@dataclass(frozen=True)
class OnlineState:
    """``buffer`` is float32 ``[slots, >= rows * 1024]`` with unit stride, of any slot stride.

    Raises ValueError for another buffer, a slot stride that is no multiple of 16 values, or a base
    that is none of 16 bytes.
    """

    buffer: torch.Tensor
    lookahead: int

    def __post_init__(self) -> None:
        fits = self.buffer.dim() == 2 and self.buffer.stride(1) == 1
        if self.buffer.dtype != torch.float32 or not fits or self.buffer.shape[1] < self.slot_width:
            raise ValueError(
                f"online state with {self.lookahead} drafts is float32 [slots, >= "
                f"{self.slot_width}] with unit stride, not {self.buffer.dtype} of shape "
                f"{tuple(self.buffer.shape)} and strides {self.buffer.stride()}"
            )
        if self.stride % 16 or self.buffer.data_ptr() % 16:
            raise ValueError(
                "slots must lie a multiple of 16 values apart, from a multiple of 16 bytes, not "
                f"{self.stride} apart from {self.buffer.data_ptr():#x}"
            )

    @property
    def shape(self) -> CompressorShape:
        return SHAPE

    @property
    def stride(self) -> int:
        """float32 values from a slot to the next."""
        return self.buffer.stride(0)

    @property
    def slot_width(self) -> int:
        """float32 values of a slot, without padding."""
        return online_rows(self.lookahead) * 2 * HEAD_DIM

    def rows_view(self) -> torch.Tensor:
        """``[slots, rows, 2, 512]``, sharing the buffer's memory."""
        rows = self.buffer[:, : self.slot_width]
        return rows.unflatten(1, (online_rows(self.lookahead), 2, HEAD_DIM))


@triton.jit
def load_folded(slot_ptr, group_start, first, column, HEAD: tl.constexpr):
    """Maximum, denominator and numerator of the open group, and the position up to which they go.

    Nothing, up to the group's start, where the slot holds another group's or a former owner's.
    """
    # A chunk that starts its group must not look: the slot may hold anything, NaN too.
    is_open = first + column * 0 > group_start
    folded = tl.load(slot_ptr + 3 * HEAD + column, is_open, 0.0).to(tl.int64)
    usable = folded > group_start
    largest = tl.load(slot_ptr + column, usable, float("-inf"))
    weight_sum = tl.load(slot_ptr + HEAD + column, usable, 0.0)
    key_sum = tl.load(slot_ptr + 2 * HEAD + column, usable, 0.0)
    return largest, weight_sum, key_sum, tl.where(usable, folded, group_start)


@triton.jit
def fold_raw(
    slot_ptr,
    largest,
    weight_sum,
    key_sum,
    folded,  # int64 [columns]
    first,
    column,
    LOOKAHEAD: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Take in the raw rows of accepted tokens, ``[folded, first)``."""
    for back in tl.static_range(LOOKAHEAD):
        position = first - LOOKAHEAD + back
        kept = position >= folded
        # Before position 0 the remainder would be negative.
        row = (position + LOOKAHEAD) % LOOKAHEAD
        row_ptr = slot_ptr + (_FOLDED_ROWS + row) * (2 * HEAD) + column
        key = tl.load(row_ptr, kept, 0.0)
        score = tl.load(row_ptr + HEAD, kept, float("-inf"))
        largest, weight_sum, key_sum = merge_rows(
            largest, weight_sum, key_sum, key[None, :], score[None, :]
        )
    return largest, weight_sum, key_sum


@triton.jit
def fold_fresh(
    keys_ptr,
    scores_ptr,
    bias_ptr,
    largest,
    weight_sum,
    key_sum,
    token,  # of the first row of the tile
    position,  # the same
    stop,  # position after the last one to take in
    column,
    key_stride,
    score_stride,
    RATIO: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take in up to ``TILE`` tokens of this step."""
    offset = tl.arange(0, TILE)
    inside = (position + offset < stop)[:, None]
    rows = (token + offset)[:, None]
    key = tl.load(keys_ptr + rows * key_stride + column[None, :], inside, 0.0)
    score = tl.load(scores_ptr + rows * score_stride + column[None, :], inside, float("-inf"))
    places = ((position + offset) % RATIO)[:, None]
    bias = tl.load(bias_ptr + places * HEAD + column[None, :], inside, 0.0)
    return merge_rows(largest, weight_sum, key_sum, key, score + bias)


@triton.jit
def fold_state_kernel(
    keys_ptr,  # float32 [tokens, HEAD]
    scores_ptr,  # float32 [tokens, HEAD]
    bias_ptr,  # float32 [RATIO, HEAD]
    state_ptr,  # float32, slots slot_stride apart
    positions_ptr,
    query_start_ptr,
    slots_ptr,
    key_stride,
    score_stride,
    slot_stride,
    LOOKAHEAD: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    request = tl.program_id(0)
    begin = load_index(query_start_ptr + request, True).to(tl.int64)
    stop = load_index(query_start_ptr + request + 1, True).to(tl.int64)
    slot = load_index(slots_ptr + request, True).to(tl.int64)
    if (slot <= 0) | (stop <= begin):
        return
    first = load_index(positions_ptr + begin, True)
    if first < 0:
        return
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    slot_ptr = state_ptr + slot * slot_stride
    end = first + stop - begin
    final = tl.maximum(end - LOOKAHEAD, first)
    group_start = first // RATIO * RATIO
    last_start = final // RATIO * RATIO

    largest, weight_sum, key_sum, folded = load_folded(slot_ptr, group_start, first, column, HEAD)
    largest, weight_sum, key_sum = fold_raw(
        slot_ptr, largest, weight_sum, key_sum, folded, first, column, LOOKAHEAD, HEAD
    )
    if last_start > group_start:
        largest = tl.full([CHANNELS], float("-inf"), tl.float32)
        weight_sum = tl.zeros([CHANNELS], tl.float32)
        key_sum = tl.zeros([CHANNELS], tl.float32)
    position = tl.maximum(last_start, first)
    while position < final:
        largest, weight_sum, key_sum = fold_fresh(
            keys_ptr,
            scores_ptr,
            bias_ptr,
            largest,
            weight_sum,
            key_sum,
            begin + position - first,
            position,
            final,
            column,
            key_stride,
            score_stride,
            RATIO,
            HEAD,
            TILE,
        )
        position += TILE
    tl.store(slot_ptr + column, largest)
    tl.store(slot_ptr + HEAD + column, weight_sum)
    tl.store(slot_ptr + 2 * HEAD + column, key_sum)
    tl.store(slot_ptr + 3 * HEAD + column, tl.zeros([CHANNELS], tl.float32) + final.to(tl.float32))
    for back in tl.static_range(LOOKAHEAD):
        position = end - LOOKAHEAD + back
        kept = position + column * 0 >= final
        token = begin + position - first
        key = tl.load(keys_ptr + token * key_stride + column, kept, 0.0)
        score = tl.load(scores_ptr + token * score_stride + column, kept, 0.0)
        bias = tl.load(bias_ptr + (position + RATIO) % RATIO * HEAD + column, kept, 0.0)
        row = _FOLDED_ROWS + (position + LOOKAHEAD) % LOOKAHEAD
        row_ptr = slot_ptr + row * (2 * HEAD) + column
        tl.store(row_ptr, key, kept)
        tl.store(row_ptr + HEAD, score + bias, kept)


def fold_state(
    keys: torch.Tensor,
    scores: torch.Tensor,
    weights: CompressorWeights,
    state: OnlineState,
    step: StepTokens,
) -> None:
    """Folds what this step made certain into every slot, and keeps the rest raw.

    ``keys`` and ``scores`` are float32 ``[tokens, 512]`` with unit stride. Certain are all tokens
    before the chunk, and of the chunk all but the last ``lookahead``. Run it after
    :func:`.compress_online.compress_online`, which reads what this overwrites.

    Raises ValueError for tensors of another dtype, shape or alignment.
    """
    check_step_values(keys, scores, SHAPE, step)
    if len(keys) == 0 or len(step.slots) == 0:
        return
    fold_state_kernel[(len(step.slots), HEAD_DIM // CHANNELS)](
        keys,
        scores,
        weights.bias,
        state.buffer,
        step.positions,
        step.query_start,
        step.slots,
        keys.stride(0),
        scores.stride(0),
        state.stride,
        LOOKAHEAD=state.lookahead,
        RATIO=RATIO,
        HEAD=HEAD_DIM,
        TILE=TILE,
        CHANNELS=CHANNELS,
        num_warps=warps(keys.device, LANES),
    )


def isa_variants() -> list[KernelVariant]:
    """Without drafts and with three, by the size of a wave."""
    return [
        KernelVariant(
            kernel=fold_state_kernel,
            name=f"lookahead {lookahead}",
            types={
                **dict.fromkeys(("keys_ptr", "scores_ptr", "bias_ptr", "state_ptr"), "*fp32:16"),
                **{name: kind for name, kind in INDEX_TYPES.items() if name != "request_ptr"},
                **dict.fromkeys(("key_stride", "score_stride", "slot_stride"), "i32:16"),
            },
            constants={
                "LOOKAHEAD": lookahead,
                "RATIO": RATIO,
                "HEAD": HEAD_DIM,
                "TILE": TILE,
                "CHANNELS": CHANNELS,
            },
            num_warps=LANES // wave_size,
            archs=(arch,),
            refreshed_by_host=True,
        )
        for lookahead in (0, 3)
        for arch, wave_size in WAVE_SIZES.items()
    ]
