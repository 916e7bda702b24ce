"""Writing a step's key rows into the rings of their sequences.

Token at position ``p`` of the sequence in slot ``s`` goes to row ``p % rows`` of slot ``s``. Of a
chunk longer than the ring only the last ``rows`` tokens are written, so that no row is written
twice in a step; a decode or verify step of at most ``rows`` tokens is written whole.
"""

import torch
import triton
import triton.language as tl

from .caches import KeyCache
from .compress_reference import rotate_pairs
from .fp8_ds_mla import HEAD_DIM, ROPE_DIM
from .launch import KV_DTYPES, WAVE_SIZES, warps
from .quantize import rotate_tail, store_fp8_row
from .ring_tail import resolve_targets, tail_row, tail_tokens
from .step_tokens import INDEX_TYPES, StepTokens, check_rows
from .variants import KernelVariant

ROW_LANES = 64
"""Lanes of a workgroup: eight values of a row a lane, and no wave waits for another."""


@triton.jit
def write_ring_kernel(
    keys_ptr,  # bf16 [tokens, 512], rows key_stride apart
    ring_ptr,  # uint8, slots slot_stride apart
    cos_sin_ptr,  # float32 [positions, ROPE]
    positions_ptr,
    request_ptr,
    query_start_ptr,
    slots_ptr,
    ends_ptr,
    key_stride,
    slot_stride,
    cos_sin_stride,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROTATE: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    FP8: tl.constexpr,
    FNUZ: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot, row, position = tail_row(
        token, positions_ptr, request_ptr, query_start_ptr, slots_ptr, ends_ptr, ROWS, HAS_ENDS
    )
    if slot == 0:
        return
    column = tl.arange(0, HEAD)
    key = tl.load(keys_ptr + token * key_stride + column)
    if ROTATE:
        cos_sin_row_ptr = cos_sin_ptr + position * cos_sin_stride
        key = rotate_tail(key.to(tl.float32), cos_sin_row_ptr, HEAD, ROPE).to(tl.bfloat16)
    slot_ptr = ring_ptr + slot * slot_stride
    if FP8:
        store_fp8_row(slot_ptr, row, ROWS, key.to(tl.float32), FNUZ)
    else:
        tl.store(slot_ptr.to(tl.pointer_type(tl.bfloat16)) + row * HEAD + column, key)


def write_ring(
    keys: torch.Tensor,
    ring: KeyCache,
    step: StepTokens,
    *,
    cos_sin: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Writes the last ``min(rows, chunk length)`` keys of every chunk into its slot's ring.

    ``keys`` is bf16 ``[tokens, 512]``: rotated, or to be rotated here by ``cos_sin``, float32
    ``[positions, 64]``: 32 cosines, then 32 sines. Run it before attention reads the ring in a
    decode step, after it in a prefill.

    A snapshot is written with ``targets`` (int32 ``[requests]``: the slot to write in place of the
    request's own, 0 for none) and ``ends`` (int64 ``[requests]``): only positions below a request's
    end are written, and only in the step whose chunk holds the last of them.

    Raises ValueError for tensors of another dtype, shape or alignment.
    """
    _check(keys, step, cos_sin)
    slots, ends = resolve_targets(step, targets, ends)
    tokens = len(keys)
    if tokens == 0:
        return
    write_ring_kernel[(tokens,)](
        keys,
        ring.buffer,
        cos_sin,
        step.positions,
        step.token_to_request,
        step.query_start,
        slots,
        ends,
        keys.stride(0),
        ring.stride,
        0 if cos_sin is None else cos_sin.stride(0),
        ROWS=ring.rows,
        HEAD=HEAD_DIM,
        ROPE=ROPE_DIM,
        ROTATE=cos_sin is not None,
        HAS_ENDS=ends is not None,
        FP8=ring.is_fp8,
        FNUZ=ring.dtype == torch.float8_e4m3fnuz,
        num_warps=warps(keys.device, ROW_LANES),
    )


def write_ring_reference(
    keys: torch.Tensor,
    ring: KeyCache,
    step: StepTokens,
    *,
    cos_sin: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """PyTorch twin of :func:`write_ring`, request by request."""
    _check(keys, step, cos_sin)
    slots, ends = resolve_targets(step, targets, ends)
    for token, slot, row in tail_tokens(step, ring.rows, slots, ends):
        key = keys[token]
        if cos_sin is not None:
            key = rotate_pairs(key.float(), cos_sin[step.positions[token]]).bfloat16()
        ring.store_rows(slot.expand_as(row), row, key)


def _check(keys: torch.Tensor, step: StepTokens, cos_sin: torch.Tensor | None) -> None:
    check_rows("keys", keys, torch.bfloat16, HEAD_DIM)
    if cos_sin is not None:
        check_rows("cos_sin", cos_sin, torch.float32, ROPE_DIM)
    step.check_tokens(len(keys))


def isa_variants() -> list[KernelVariant]:
    """Row types by card: a step's rows, rotated on the way or before, and a snapshot's."""
    variants = []
    for arch, dtype in KV_DTYPES:
        rows = "bf16" if dtype == torch.bfloat16 else "fp8"
        for kind, rotate, ends in (
            ("rotating", True, False),
            ("rotated", False, False),
            ("snapshot", False, True),
        ):
            optional = {"cos_sin_ptr": "*fp32:16"} if rotate else {}
            optional |= {"ends_ptr": "*i64:16"} if ends else {}
            absent = {"cos_sin_ptr", "ends_ptr"} - set(optional)
            variants.append(
                KernelVariant(
                    kernel=write_ring_kernel,
                    name=f"{rows}, {kind}",
                    types={
                        "keys_ptr": "*bf16:16",
                        "ring_ptr": "*u8:16",
                        **INDEX_TYPES,
                        **optional,
                        **dict.fromkeys(("key_stride", "slot_stride", "cos_sin_stride"), "i32:16"),
                    },
                    constants={
                        **dict.fromkeys(absent),
                        "ROWS": 128,
                        "HEAD": HEAD_DIM,
                        "ROPE": ROPE_DIM,
                        "ROTATE": rotate,
                        "HAS_ENDS": ends,
                        "FP8": rows == "fp8",
                        "FNUZ": dtype == torch.float8_e4m3fnuz,
                    },
                    num_warps=ROW_LANES // WAVE_SIZES[arch],
                    archs=(arch,),
                    refreshed_by_host=True,
                )
            )
    return variants
