"""bf16 weights to the released number formats.

Both formats share one power of two among the values of a block (UE8M0: one byte, the exponent
plus 127), the least that keeps the block's largest value in range. ``dequantise`` is the way
back, and is exact: either format's values fit in bf16.
"""

import torch
from torch import Tensor

BLOCK = 128
"""Side of the square block of a block-fp8 weight that shares a scale."""

GROUP = 32
"""Neighbours along a row of an fp4 weight that share a scale."""

FP8_LIMIT = 448.0
FP4_LIMIT = 6.0
SCALE_BIAS = 127

FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three low bits of an e2m1 code; the fourth bit is the sign."""


def block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``weight`` [rows, columns] to fp8 e4m3 with a scale for each block.

    Returns:
        float8_e4m3fn [rows, columns], and float8_e8m0fnu
        [ceil(rows / BLOCK), ceil(columns / BLOCK)]. The last blocks may be partly filled.
    """
    rows, columns = weight.shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    padded = torch.zeros(blocks[0] * BLOCK, blocks[1] * BLOCK)
    padded[:rows, :columns] = weight
    tiles = padded.view(blocks[0], BLOCK, blocks[1], BLOCK)
    exponent = _exponent(tiles.abs().amax(dim=(1, 3)), FP8_LIMIT)
    scaled = torch.ldexp(tiles, -exponent[:, None, :, None])
    quantised = scaled.view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn)
    return quantised.contiguous(), _scale(exponent)


def fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``weight`` [rows, columns] to fp4 e2m1, two values a byte, the first one low.

    Returns:
        int8 [rows, columns / 2], and float8_e8m0fnu [rows, columns / GROUP].

    Raises:
        ValueError: ``columns`` is not a multiple of ``GROUP``.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"fp4 needs rows of a multiple of {GROUP} values, not {columns}")
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    exponent = _exponent(groups.abs().amax(dim=2), FP4_LIMIT)
    codes = _e2m1(torch.ldexp(groups, -exponent[:, :, None])).view(rows, columns // 2, 2)
    packed = codes[..., 0] | (codes[..., 1] << 4)
    return packed.view(torch.int8), _scale(exponent)


def _exponent(largest: Tensor, limit: float) -> Tensor:
    """Least int32 ``e`` with ``largest <= limit * 2**e``; 0 where the block is all zeros."""
    mantissa, exponent = torch.frexp(largest / limit)
    exponent = exponent - (mantissa == 0.5).int()
    lowest = torch.full_like(exponent, -SCALE_BIAS)
    return torch.where(largest == 0, 0, torch.maximum(exponent, lowest))


def _scale(exponent: Tensor) -> Tensor:
    return (exponent + SCALE_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _e2m1(values: Tensor) -> Tensor:
    """uint8 codes of the nearest e2m1 values; of two equally near ones, the even code."""
    magnitudes = torch.tensor(FP4_MAGNITUDES)
    halfway = (magnitudes[1:] + magnitudes[:-1]) / 2
    # bucketize gives the lower code on a tie, which is odd for every second boundary.
    halfway[1::2] = torch.nextafter(halfway[1::2], torch.tensor(0.0))
    codes = torch.bucketize(values.abs(), halfway).to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)
