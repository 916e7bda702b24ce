"""Decode on a card: bytes a second against a plain copy, and time against vLLM's kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_dsv4.commands.verify.device import Card
from vllm_dsv4.commands.verify.inputs import WINDOW, Inputs
from vllm_dsv4.kernels.caches import CompressedKeys, KeyCache
from vllm_dsv4.kernels.decode import decode
from vllm_dsv4.kernels.fp8_ds_mla import HEAD_DIM, NOPE_DIM, ROPE_DIM, ROW_BYTES
from vllm_dsv4.kernels.traffic import decode_bytes

COPY_BYTES = 1 << 30
REPEATS = 20
BATCHES = (1, 16, 128, 512)
HEADS = (16, 64, 128)
COMPRESSED = (0, 512)
"""Compressed rows of a token: a window layer, and a C4 layer of V4-Flash."""
POSITION = 4096


@dataclass(frozen=True)
class Speed:
    """One shape of decode.

    Attributes:
        ours_us: microseconds of our kernel; its shares of the keys chosen as in serving.
        gb_per_s: bytes that the tokens must move, over that time.
        vllm_us: microseconds of vLLM's kernel; None where it could not run.
    """

    batch: int
    heads: int
    compressed: int
    ours_us: float
    gb_per_s: float
    vllm_us: float | None


def copy_gb_per_s(card: Card) -> float:
    """Bytes read and written in a second by a copy of 1 GiB."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (1e3 * microseconds(lambda: target.copy_(source)))


def measure_decode(card: Card) -> Iterator[Speed]:
    """Every batch and number of heads; windows in the card's fp8 type."""
    for heads in HEADS:
        for most in COMPRESSED:
            for batch in BATCHES:
                yield _measure(card, batch, heads, most)


def _measure(card: Card, batch: int, heads: int, most: int) -> Speed:
    inputs = Inputs(card.device, seed=batch)
    ring = inputs.cache(batch + 1, WINDOW, card.fp8)
    ring.buffer.fill_(0x38)
    compressed = None
    if most:
        blocks = batch * most // 64 + 1
        cache = inputs.cache(blocks, 64, torch.float8_e4m3fn)
        cache.buffer.fill_(0x38)
        rows = torch.randperm(batch * most, device=card.device).view(batch, most)
        compressed = CompressedKeys(cache, rows.int(), inputs.integers([most] * batch))
    queries = inputs.normal(batch, heads, HEAD_DIM).bfloat16()
    slots = inputs.integers(range(1, batch + 1))
    positions = inputs.integers([POSITION] * batch, torch.int64)
    sink, out = inputs.normal(heads), torch.empty_like(queries)
    scale = HEAD_DIM**-0.5

    def ours() -> None:
        decode(
            queries, ring, slots, positions, scale=scale, sink=sink, compressed=compressed, out=out
        )

    theirs = vllm_decode(queries, ring, slots, compressed, sink, scale, out)
    ours_us = microseconds(ours)
    moved = decode_bytes(
        POSITION,
        most,
        num_heads=heads,
        ring_dtype=card.fp8,
        compressed_dtype=torch.float8_e4m3fn,
    ).moved
    return Speed(
        batch=batch,
        heads=heads,
        compressed=most,
        ours_us=ours_us,
        gb_per_s=batch * moved / (1e3 * ours_us),
        vllm_us=None if theirs is None else microseconds(theirs),
    )


def vllm_decode(
    queries: torch.Tensor,
    ring: KeyCache,
    slots: torch.Tensor,
    compressed: CompressedKeys | None,
    sink: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> Callable[[], object] | None:
    """vLLM's launcher over the same rows, its lists of rows made beforehand as in serving.

    None where vLLM is not installed, or is a build without these kernels.
    """
    try:
        from vllm.v1.attention.ops import rocm_aiter_mla_sparse as rocm_ops
    except ImportError:
        return None
    batch = len(queries)
    rows = slots[:, None] * ring.rows + torch.arange(WINDOW, device=queries.device)
    window = rows.flatten().int()
    starts = torch.arange(batch + 1, dtype=torch.int32, device=queries.device)
    history = None
    if compressed is not None:
        cache = compressed.cache
        history = cache.buffer[:, : cache.slot_bytes].unflatten(1, (cache.rows, ROW_BYTES))
    most = 0 if compressed is None else compressed.indices.shape[1]

    def launch() -> object:
        return rocm_ops.rocm_sparse_attn_decode(
            q=queries,
            kv_cache=history,
            swa_k_cache=ring.buffer[:, : ring.slot_bytes].unflatten(1, (ring.rows, ROW_BYTES)),
            swa_only=compressed is None,
            topk_indices=None,
            topk_lens=None,
            swa_indices=rows,
            swa_lens=None,
            swa_ragged_indices=window,
            swa_ragged_indptr=starts * WINDOW,
            topk_ragged_indices=None if compressed is None else compressed.indices.flatten(),
            topk_ragged_indptr=None if compressed is None else starts * most,
            attn_sink=sink,
            scale=scale,
            head_dim=HEAD_DIM,
            nope_head_dim=NOPE_DIM,
            rope_head_dim=ROPE_DIM,
            output=out,
        )

    return launch


def microseconds(run: Callable[[], object]) -> float:
    """Median time of a call on the card, after two to warm it up."""
    for _ in range(2):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]
