"""The row format ``fp8_ds_mla`` of a key cache, and its PyTorch reference.

A key row holds 512 values: 448 without position (fp8, one power-of-two scale for each 64) and 64
rotated ones (bf16). A *slot* is whatever the cache strides over: a ring of one sequence, or a block
of a paged cache. A slot of ``rows`` rows is laid out as ::

    [0, rows * 576)                   data of row 0, row 1, ...: 448 fp8, then 64 bf16
    [rows * 576, rows * 584)          scales of row 0, row 1, ...: 7 UE8M0 bytes, then one 0
    [rows * 584, slot stride)         padding, never read

so a row is not contiguous: its scales lie apart. A UE8M0 byte ``b`` stands for ``2 ** (b - 127)``.
"""

import torch

NOPE_DIM = 448
ROPE_DIM = 64
HEAD_DIM = NOPE_DIM + ROPE_DIM
GROUP_SIZE = 64
NUM_GROUPS = NOPE_DIM // GROUP_SIZE

DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = 8
ROW_BYTES = DATA_BYTES + SCALE_BYTES

SCALE_BIAS = 127
SMALLEST_GROUP_MAX = 1e-4
"""A group's largest magnitude is taken to be at least this: a zero group has a finite scale."""

FP8_MAX: dict[torch.dtype, float] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 224.0,
}
"""Largest magnitude written. The fnuz type reaches 240; vLLM stops at 224 on these cards."""

NAN_BYTE: dict[torch.dtype, int] = {torch.float8_e4m3fn: 0xFF, torch.float8_e4m3fnuz: 0x80}
"""A byte that is NaN as a value of the type, to poison rows that nobody may read."""


def slot_bytes(rows: int) -> int:
    """Bytes that ``rows`` rows take in a slot, without padding."""
    return rows * ROW_BYTES


def check_fp8_dtype(fp8_dtype: torch.dtype) -> None:
    """Raises ValueError unless rows can be stored as ``fp8_dtype``."""
    if fp8_dtype not in FP8_MAX:
        known = ", ".join(str(dtype) for dtype in FP8_MAX)
        raise ValueError(f"fp8_ds_mla rows are stored as one of {known}, not as {fp8_dtype}")


def data_view(cache: torch.Tensor, rows: int) -> torch.Tensor:
    """The data bytes of every row, ``[slots, rows, 576]`` uint8, sharing memory with ``cache``.

    ``cache`` is ``[slots, >= rows * 584]`` uint8 with any slot stride and unit byte stride.
    """
    _check_cache(cache, rows)
    return cache[:, : rows * DATA_BYTES].unflatten(1, (rows, DATA_BYTES))


def scale_view(cache: torch.Tensor, rows: int) -> torch.Tensor:
    """The scale bytes of every row, ``[slots, rows, 8]`` uint8, sharing memory with ``cache``."""
    _check_cache(cache, rows)
    return cache[:, rows * DATA_BYTES : slot_bytes(rows)].unflatten(1, (rows, SCALE_BYTES))


def quantize_rows(keys: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[n, 512]`` (any float dtype) as data ``[n, 576]`` and scales ``[n, 8]``, both uint8.

    A group's scale is the least power of two that brings its largest magnitude within the type, so
    that dividing by it is exact and one rounding to fp8 is all the error.
    """
    check_fp8_dtype(fp8_dtype)
    limit = FP8_MAX[fp8_dtype]
    groups = keys[:, :NOPE_DIM].float().unflatten(1, (NUM_GROUPS, GROUP_SIZE))
    largest = groups.abs().amax(dim=2).clamp_min(SMALLEST_GROUP_MAX)
    # frexp gives mantissas in [0.5, 1): 0.5 is itself a power of two, all others round up to it.
    mantissa, exponent = torch.frexp(largest / limit)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(2)).clamp(-limit, limit)
    nope = scaled.to(fp8_dtype).flatten(1).view(torch.uint8)
    rope = keys[:, NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
    scales = torch.zeros(len(keys), SCALE_BYTES, dtype=torch.uint8, device=keys.device)
    scales[:, :NUM_GROUPS] = (exponent + SCALE_BIAS).to(torch.uint8)
    return torch.cat([nope, rope], dim=1), scales


def dequantize_rows(
    data: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype
) -> torch.Tensor:
    """Data ``[n, 576]`` and scales ``[n, 8]``, both uint8, as exact keys ``[n, 512]`` float32."""
    check_fp8_dtype(fp8_dtype)
    nope = data[:, :NOPE_DIM].contiguous().view(fp8_dtype).float()
    exponent = scales[:, :NUM_GROUPS].int() - SCALE_BIAS
    nope = torch.ldexp(nope.unflatten(1, (NUM_GROUPS, GROUP_SIZE)), exponent.unsqueeze(2))
    rope = data[:, NOPE_DIM:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope.flatten(1), rope], dim=1)


def round_rows(keys: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """Keys ``[n, 512]`` as a cache of ``fp8_dtype`` gives them back, in bf16, which is exact."""
    return dequantize_rows(*quantize_rows(keys, fp8_dtype), fp8_dtype).to(torch.bfloat16)


def store_rows(
    cache: torch.Tensor,
    rows: int,
    slot: torch.Tensor,
    row: torch.Tensor,
    keys: torch.Tensor,
    fp8_dtype: torch.dtype,
) -> None:
    """Writes key ``i`` of ``keys [n, 512]`` to row ``row[i]`` of slot ``slot[i]``, quantised.

    ``cache`` is ``[slots, >= rows * 584]`` uint8; ``slot`` and ``row`` are ``[n]`` integers. Where
    two keys go to one row, which of them stays is not defined.
    """
    data, scales = quantize_rows(keys, fp8_dtype)
    data_view(cache, rows)[slot.long(), row.long()] = data
    scale_view(cache, rows)[slot.long(), row.long()] = scales


def load_rows(
    cache: torch.Tensor,
    rows: int,
    slot: torch.Tensor,
    row: torch.Tensor,
    fp8_dtype: torch.dtype,
) -> torch.Tensor:
    """Reads row ``row[i]`` of slot ``slot[i]`` as ``[n, 512]`` float32."""
    data = data_view(cache, rows)[slot.long(), row.long()]
    scales = scale_view(cache, rows)[slot.long(), row.long()]
    return dequantize_rows(data, scales, fp8_dtype)


def _check_cache(cache: torch.Tensor, rows: int) -> None:
    if cache.dtype != torch.uint8 or cache.dim() != 2 or cache.stride(1) != 1:
        raise ValueError(
            "an fp8_ds_mla cache is a uint8 tensor [slots, bytes] with unit byte stride, not "
            f"{cache.dtype} of shape {tuple(cache.shape)} and strides {cache.stride()}"
        )
    if cache.shape[1] < slot_bytes(rows):
        raise ValueError(
            f"a slot of {rows} rows takes {slot_bytes(rows)} bytes, the cache has {cache.shape[1]}"
        )
