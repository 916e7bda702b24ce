"""Random steps and caches for the checks, on any device; what may not be read is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_dsv4.kernels.caches import CompressedKeys, KeyCache, row_bytes
from vllm_dsv4.kernels.compressor import CompressorShape, CompressorWeights
from vllm_dsv4.kernels.fp8_ds_mla import HEAD_DIM
from vllm_dsv4.kernels.indexer_cache import IndexerCache
from vllm_dsv4.kernels.step_tokens import StepTokens

WINDOW = 128
NAN_BYTES = {torch.float8_e4m3fnuz: 0x80}
"""A byte that is NaN in the type; in all others, bf16 and float32 included, 0xFF is."""


class Inputs:
    """Draws everything on the CPU, from one seed, and moves it to the device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def keys(self, tokens: int) -> torch.Tensor:
        """bf16 ``[tokens, 512]`` whose scores differ by a few units."""
        return self.normal(tokens, HEAD_DIM).mul(2).bfloat16()

    def cache(self, slots: int, rows: int, dtype: torch.dtype) -> KeyCache:
        """A cache of NaN whose slots lie a little apart."""
        stride = -(-(rows * row_bytes(dtype) + 16) // 16) * 16
        byte = NAN_BYTES.get(dtype, 0xFF)
        buffer = torch.full((slots, stride), byte, dtype=torch.uint8, device=self.device)
        return KeyCache(buffer, rows, dtype)

    def rings_at(self, positions: Sequence[int], rows: int, dtype: torch.dtype) -> KeyCache:
        """Slot ``i + 1`` holds the window that ends at ``positions[i]``, and NaN elsewhere."""
        ring = self.cache(len(positions) + 1, rows, dtype)
        for slot, position in enumerate(positions, start=1):
            seen = torch.arange(max(0, position - WINDOW + 1), position + 1, device=self.device)
            ring.store_rows(torch.full_like(seen, slot), seen % rows, self.keys(len(seen)))
        return ring

    def compressed(self, lengths: Sequence[int], most: int, dtype: torch.dtype) -> CompressedKeys:
        """Scattered rows; every fifth index is -1, and indices past a length point to NaN."""
        rows = 64
        cache = self.cache(2 + sum(lengths) // rows + 1, rows, dtype)
        order = torch.randperm((len(cache.buffer) - 1) * rows, generator=self._generator)
        order = (order + rows).to(self.device)
        indices = torch.full((len(lengths), most), int(order[-1]), device=self.device)
        used = 0
        for token, length in enumerate(lengths):
            chosen = order[used : used + length]
            used += length
            indices[token, :length] = chosen
            cache.store_rows(chosen // rows, chosen % rows, self.keys(length))
            indices[token, 4:length:5] = -1
        return CompressedKeys(cache, indices.int(), self.integers(lengths))

    def integers(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def cos_sin(self, positions: int) -> torch.Tensor:
        """float32 ``[positions, 64]``: 32 cosines, then 32 sines."""
        angle = torch.arange(positions)[:, None] / 10000.0 ** (torch.arange(32)[None, :] / 32)
        return torch.cat([angle.cos(), angle.sin()], dim=1).to(self.device)

    def step(self, chunks: Sequence[tuple[int, int]], padding: int = 2) -> StepTokens:
        """A step of chunks ``(start, length)``, of which chunk ``i`` is in slot ``i + 1``."""
        lengths = [length for _, length in chunks]
        positions = [p for start, length in chunks for p in range(start, start + length)]
        requests = [i for i, length in enumerate(lengths) for _ in range(length)]
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        return StepTokens(
            positions=self.integers([*positions, *[127] * padding], torch.int64),
            token_to_request=self.integers([*requests, *[-1] * padding]),
            query_start=self.integers(starts),
            slots=self.integers(range(1, len(chunks) + 1)),
        )

    def compressor(self, shape: CompressorShape, positions: int) -> CompressorWeights:
        return CompressorWeights(
            shape,
            bias=self.normal(shape.ratio, shape.width),
            norm=(1 + 0.1 * self.normal(shape.head)).bfloat16(),
            eps=1e-6,
            cos_sin=self.cos_sin(positions),
        )

    def history(
        self, shape: CompressorShape, blocks: int, rows: int, fp8: torch.dtype
    ) -> KeyCache | IndexerCache:
        """Where a compressor stores rows: e4m3fn for attention, ``fp8`` for an indexer."""
        if shape.head == HEAD_DIM:
            return self.cache(blocks, rows, torch.float8_e4m3fn)
        width = rows * (shape.head + 4)
        buffer = torch.full((blocks, width), 0xFF, dtype=torch.uint8, device=self.device)
        return IndexerCache(buffer, rows, fp8)


def on_the_cpu(cache: KeyCache) -> KeyCache:
    """A copy that PyTorch references read."""
    return KeyCache(cache.buffer.cpu(), cache.rows, cache.dtype)
