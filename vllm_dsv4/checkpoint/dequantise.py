"""The released number formats back to bf16, one weight at a time."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm_dsv4.checkpoint.quantise import BLOCK, FP4_MAGNITUDES, GROUP

_WEIGHT = ".weight"
_SCALE = ".scale"
_QUANTISED = (torch.float8_e4m3fn, torch.int8, torch.uint8)


def dequantised(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Turn the quantised tensors of a released checkpoint into bf16 as they stream past.

    ``X.weight`` in fp8 or packed fp4 and ``X.scale`` come out as one bf16 ``X.weight`` once both
    were seen, in either order; all other tensors pass unchanged. Only tensors whose partner is
    still to come are held.

    Raises:
        ValueError: at the end, if a weight or scale never met its partner; or on a pair whose
            shapes do not belong together.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        partner = _partner(name, tensor)
        if partner is None:
            yield name, tensor
        elif partner not in waiting:
            waiting[name] = tensor
        elif name.endswith(_SCALE):
            yield partner, dequantise(waiting.pop(partner), tensor)
        else:
            yield name, dequantise(tensor, waiting.pop(partner))
    if waiting:
        name = next(iter(waiting))
        raise ValueError(
            f"{len(waiting)} quantised tensors without their weight or scale, first {name}: "
            "the checkpoint is incomplete or not in DeepSeek-V4's released form"
        )


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """bf16 [rows, columns] of one quantised weight.

    Args:
        weight: float8_e4m3fn [rows, columns], or int8 (uint8) [rows, columns / 2] of two e2m1
            codes a byte.
        scale: float8_e8m0fnu or float32; [ceil(rows / 128), ceil(columns / 128)] for fp8,
            [rows, columns / 32] for e2m1.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if weight.dtype is torch.float8_e4m3fn:
        values, sides = weight.float(), (BLOCK, BLOCK)
    else:
        values, sides = _unpacked(weight), (1, GROUP)
    rows, columns = values.shape
    expected = (-(-rows // sides[0]), -(-columns // sides[1]))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"a {weight.dtype} weight of {rows} x {columns} values needs scales of "
            f"{expected[0]} x {expected[1]}, not {tuple(scale.shape)}"
        )
    factors = scale.float().repeat_interleave(sides[0], dim=0)[:rows]
    factors = factors.repeat_interleave(sides[1], dim=1)[:, :columns]
    return (values * factors).to(torch.bfloat16)


def _partner(name: str, tensor: Tensor) -> str | None:
    """Name of the tensor that ``name`` must be combined with, or None if it stands alone."""
    if name.endswith(_SCALE):
        return name.removesuffix(_SCALE) + _WEIGHT
    if name.endswith(_WEIGHT) and tensor.dtype in _QUANTISED:
        return name.removesuffix(_WEIGHT) + _SCALE
    return None


def _unpacked(packed: Tensor) -> Tensor:
    """float32 [rows, 2 * bytes] of e2m1 codes, the low half of each byte first."""
    table = torch.tensor([sign * value for sign in (1.0, -1.0) for value in FP4_MAGNITUDES])
    codes = packed.view(torch.uint8)
    pairs = torch.stack((codes & 0xF, codes >> 4), dim=-1)
    return table[pairs.int()].flatten(-2)
