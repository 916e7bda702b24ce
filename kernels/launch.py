"""What a launcher must know of the card, without reading anything from it that a step computed."""

from functools import cache

import torch
import triton

WAVE_SIZES = {"gfx942": 64, "gfx950": 64, "gfx1250": 32}

KV_DTYPES = (
    ("gfx942", torch.float8_e4m3fnuz),
    ("gfx942", torch.bfloat16),
    ("gfx950", torch.float8_e4m3fn),
    ("gfx950", torch.bfloat16),
    ("gfx1250", torch.float8_e4m3fn),
    ("gfx1250", torch.bfloat16),
)
"""Architectures and the types of ring rows on each. fp8 compressed rows are e4m3fn on all."""

NUM_WARPS = 4
"""Waves of an attention workgroup, of whatever size: one for each piece of a row."""

LANES = 256
"""Lanes of a workgroup of the other kernels, whatever the wave's size."""

MAX_SPLITS = 16


@cache
def _wave_size(device_type: str) -> int:
    if device_type != "cuda":
        return 64
    return triton.runtime.driver.active.get_current_target().warp_size


def warps(device: torch.device, lanes: int = LANES) -> int:
    """How many waves (or warps) of ``device`` make ``lanes`` lanes."""
    return lanes // _wave_size(device.type)


@cache
def compute_units(device: torch.device) -> int:
    """Compute units of ``device``; 1 for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def block_k(ring_dtype: torch.dtype) -> int:
    """Keys of a tile: 16 KiB of fp8 rows or of bf16 rows."""
    return 16 if ring_dtype == torch.bfloat16 else 32


def choose_num_splits(workgroups: int, most_tiles: int, units: int) -> int:
    """How many shares to cut each token's keys in, from numbers known when a graph is captured.

    As many as give every compute unit two workgroups, but none with fewer than two tiles at the
    longest: a share costs a partial result of ``heads * 512`` float32 values, written and read.
    Always one of ``share_counts``: the number is compiled into the kernels.
    """
    wanted = triton.next_power_of_2(triton.cdiv(2 * units, max(1, workgroups)))
    return min(wanted, share_counts(most_tiles)[-1])


def share_counts(most_tiles: int) -> tuple[int, ...]:
    """Every number of shares that is chosen for lists of at most ``most_tiles`` tiles: powers of
    two, from 1."""
    most = max(1, min(triton.cdiv(most_tiles, 2), MAX_SPLITS))
    return tuple(1 << power for power in range(most.bit_length()))
