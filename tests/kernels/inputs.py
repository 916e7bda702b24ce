"""Inputs for the attention kernels' tests, in which every byte that may not be read is NaN."""

import torch
from vllm_dsv4.kernels.caches import CompressedKeys, KeyCache
from vllm_dsv4.kernels.fp8_ds_mla import HEAD_DIM, NAN_BYTE, ROW_BYTES

SCALE = HEAD_DIM**-0.5
WINDOW = 128
BF16, E4M3FN, E4M3FNUZ = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rows(n: int, seed: int) -> torch.Tensor:
    """``[n, 512]`` bf16 whose scores differ by a few units, as real keys' do."""
    return (2.0 * torch.randn(n, HEAD_DIM, generator=generator(seed))).to(BF16)


def random_queries(tokens: int, heads: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, heads, HEAD_DIM, generator=generator(seed)).to(BF16)


def poisoned_cache(slots: int, rows: int, dtype: torch.dtype, padding: int = 16) -> KeyCache:
    """A cache of NaN, its slots padded apart by at least ``padding`` bytes of NaN."""
    row_bytes = 2 * HEAD_DIM if dtype == BF16 else ROW_BYTES
    stride = -(-(rows * row_bytes + padding) // 16) * 16
    byte = 0xFF if dtype == BF16 else NAN_BYTE[dtype]
    return KeyCache(torch.full((slots, stride), byte, dtype=torch.uint8), rows, dtype)


def fill_window(ring: KeyCache, slot: int, first: int, last: int, seed: int) -> None:
    """Writes keys of positions ``first .. last`` and no other, where a ring keeps them."""
    seen = torch.arange(max(0, first), last + 1)
    keys = random_rows(len(seen), seed)
    ring.store_rows(torch.full_like(seen, slot), seen % ring.rows, keys)


def random_compressed(
    lengths: list[int], most: int, dtype: torch.dtype, seed: int, block_rows: int = 64
) -> CompressedKeys:
    """Scattered compressed rows; indices past a length point to NaN, and every fifth is -1."""
    blocks = 2 + sum(lengths) // block_rows + 1
    cache = poisoned_cache(blocks, block_rows, dtype)
    order = torch.randperm((blocks - 1) * block_rows, generator=generator(seed)) + block_rows
    poisoned = int(order[-1])
    indices = torch.full((len(lengths), most), poisoned, dtype=torch.int32)
    used = 0
    for token, length in enumerate(lengths):
        chosen = order[used : used + length]
        used += length
        indices[token, :length] = chosen.int()
        cache.store_rows(
            chosen // block_rows, chosen % block_rows, random_rows(length, seed + token)
        )
        indices[token, 4:length:5] = -1
    return CompressedKeys(cache, indices, torch.tensor(lengths, dtype=torch.int32))


def random_sink(heads: int, seed: int = 3) -> torch.Tensor:
    return 2.0 * torch.randn(heads, generator=generator(seed))


def cos_sin_table(positions: int) -> torch.Tensor:
    """``[positions, 64]`` float32: 32 cosines, then 32 sines."""
    frequencies = 10000.0 ** (-torch.arange(32) / 32)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def assert_near(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Fails where ``got`` is further from float64 than rounding to bf16 explains.

    Rounding the exact output to bf16 is 0.165% of its norm; weights are rounded to bf16 as well. No
    value may be off by a step of the largest.
    """
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} values are NaN"
    difference = (got.double() - expected).abs()
    norm = float(expected.norm())
    if norm == 0.0:
        assert not got.any(), f"{name}: not zero"
        return
    relative = float(difference.norm()) / norm
    worst = float(difference.max() / expected.abs().max())
    assert relative < 0.002, f"{name}: {relative:.5f} of its norm off"
    assert worst < 2.0**-8, f"{name}: one value {worst:.5f} of the largest off"
