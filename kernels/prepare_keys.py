"""Rotating a step's keys, and rounding them to what the ring will hold.

A token attends to some keys of its window through the ring and to others straight from the step
that made them; which, depends on how the prompt was cut into chunks. Results do not, if the step's
keys carry the rounding of the ring from the start. Writing a prepared key into a ring is exact.
"""

import torch
import triton
import triton.language as tl

from .caches import ROW_DTYPES
from .compress_reference import rotate_pairs
from .fp8_ds_mla import HEAD_DIM, ROPE_DIM, dequantize_rows, quantize_rows
from .launch import KV_DTYPES, WAVE_SIZES, warps
from .quantize import power_of_two, quantize_groups, rotate_tail
from .step_tokens import INDEX_TYPES, StepTokens, check_rows, chunk_of, load_index
from .variants import KernelVariant

ROW_LANES = 64
"""Lanes of a workgroup: eight values of a row a lane."""


@triton.jit
def prepare_keys_kernel(
    keys_ptr,  # bf16 [tokens, HEAD]
    out_ptr,  # bf16 [tokens, HEAD]
    cos_sin_ptr,  # float32 [positions, ROPE]
    positions_ptr,
    request_ptr,
    query_start_ptr,
    slots_ptr,
    key_stride,
    out_stride,
    cos_sin_stride,
    HEAD: tl.constexpr,
    ROPE: tl.constexpr,
    FP8: tl.constexpr,
    FNUZ: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HEAD)
    row_ptr = out_ptr + token * out_stride + column
    request, first, stop = chunk_of(token, request_ptr, query_start_ptr)
    live = stop > first
    if load_index(slots_ptr + request, live) <= 0:
        tl.store(row_ptr, tl.zeros([HEAD], tl.bfloat16))
        return
    position = load_index(positions_ptr + token, True)
    key = tl.load(keys_ptr + token * key_stride + column).to(tl.float32)
    rotated = rotate_tail(key, cos_sin_ptr + position * cos_sin_stride, HEAD, ROPE)
    rounded = rotated.to(tl.bfloat16)
    if FP8:
        fp8, exponents = quantize_groups(rounded.to(tl.float32), FNUZ)
        restored = tl.reshape(fp8.to(tl.float32) * power_of_two(exponents)[:, None], (HEAD,))
        rounded = tl.where(column < HEAD - ROPE, restored.to(tl.bfloat16), rounded)
    tl.store(row_ptr, rounded)


def prepare_keys(
    keys: torch.Tensor,
    cos_sin: torch.Tensor,
    ring_dtype: torch.dtype,
    step: StepTokens,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys ``[tokens, 512]`` bf16, the last 64 values rotated, all rounded as ``ring_dtype`` does.

    ``keys`` is bf16 ``[tokens, 512]``; ``cos_sin`` float32 ``[positions, 64]``: 32 cosines, then 32
    sines. ``out``, which may be ``keys``, takes the result. Padding tokens come out as zeros.

    Raises ValueError for tensors of another dtype, shape or alignment.
    """
    _check(keys, cos_sin, ring_dtype, step)
    out = torch.empty_like(keys) if out is None else out
    check_rows("out", out, torch.bfloat16, HEAD_DIM)
    if out.shape != keys.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, keys {tuple(keys.shape)}")
    tokens = len(keys)
    if tokens == 0:
        return out
    prepare_keys_kernel[(tokens,)](
        keys,
        out,
        cos_sin,
        step.positions,
        step.token_to_request,
        step.query_start,
        step.slots,
        keys.stride(0),
        out.stride(0),
        cos_sin.stride(0),
        HEAD=HEAD_DIM,
        ROPE=ROPE_DIM,
        FP8=ring_dtype != torch.bfloat16,
        FNUZ=ring_dtype == torch.float8_e4m3fnuz,
        num_warps=warps(keys.device, ROW_LANES),
    )
    return out


def prepare_keys_reference(
    keys: torch.Tensor, cos_sin: torch.Tensor, ring_dtype: torch.dtype, step: StepTokens
) -> torch.Tensor:
    """PyTorch twin of :func:`prepare_keys`."""
    _check(keys, cos_sin, ring_dtype, step)
    out = torch.zeros_like(keys)
    for request, slot in enumerate(step.slots.tolist()):
        tokens = slice(*step.query_start[request : request + 2].tolist())
        if slot <= 0:
            continue
        rotated = rotate_pairs(keys[tokens].float(), cos_sin[step.positions[tokens]]).bfloat16()
        if ring_dtype != torch.bfloat16:
            rotated = dequantize_rows(*quantize_rows(rotated, ring_dtype), ring_dtype).bfloat16()
        out[tokens] = rotated
    return out


def _check(
    keys: torch.Tensor, cos_sin: torch.Tensor, ring_dtype: torch.dtype, step: StepTokens
) -> None:
    check_rows("keys", keys, torch.bfloat16, HEAD_DIM)
    check_rows("cos_sin", cos_sin, torch.float32, ROPE_DIM)
    step.check_tokens(len(keys))
    if ring_dtype not in ROW_DTYPES:
        raise ValueError(f"ring rows are one of {ROW_DTYPES}, not {ring_dtype}")


def isa_variants() -> list[KernelVariant]:
    """Row types by card."""
    strides = ("key_stride", "out_stride", "cos_sin_stride")
    return [
        KernelVariant(
            kernel=prepare_keys_kernel,
            name="bf16" if dtype == torch.bfloat16 else "fp8",
            types={
                "keys_ptr": "*bf16:16",
                "out_ptr": "*bf16:16",
                "cos_sin_ptr": "*fp32:16",
                **INDEX_TYPES,
                **dict.fromkeys(strides, "i32:16"),
            },
            constants={
                "HEAD": HEAD_DIM,
                "ROPE": ROPE_DIM,
                "FP8": dtype != torch.bfloat16,
                "FNUZ": dtype == torch.float8_e4m3fnuz,
            },
            num_warps=ROW_LANES // WAVE_SIZES[arch],
            archs=(arch,),
            refreshed_by_host=True,
        )
        for arch, dtype in KV_DTYPES
    ]
