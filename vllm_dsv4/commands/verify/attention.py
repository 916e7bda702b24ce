"""Decode and prefill against float64, at the sizes where such kernels break."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_dsv4.commands.verify.device import Card
from vllm_dsv4.commands.verify.inputs import WINDOW, Inputs, on_the_cpu
from vllm_dsv4.commands.verify.result import Result, relative
from vllm_dsv4.kernels.caches import CompressedKeys
from vllm_dsv4.kernels.decode import decode
from vllm_dsv4.kernels.decode_reference import decode_reference
from vllm_dsv4.kernels.fp8_ds_mla import HEAD_DIM, round_rows
from vllm_dsv4.kernels.prefill import prefill
from vllm_dsv4.kernels.prefill_reference import prefill_reference

SCALE = HEAD_DIM**-0.5
LIMIT = 0.002
"""Rounding the exact output to bf16 is 0.00165 already."""
MEASURE = "of the norm, from float64"

POSITIONS = (0, 1, 62, 63, 127, 128, 129, 255, 500)
LENGTHS = (0, 1, 31, 32, 33, 63, 128, 129, 500)
CHUNKS = ((0, 1), (0, 63), (100, 129), (127, 3), (300, 20))
"""Start and length of each sequence's chunk."""


def check_decode(card: Card, heads: tuple[int, ...]) -> Iterator[Result]:
    """Windows at every wrap, compressed rows of awkward lengths, one share and several."""
    for window_type, compressed_type in card.row_types:
        for num_heads in heads:
            for lookahead in (0, 3):
                for num_splits in (1, 5):
                    inputs = Inputs(card.device, seed=num_heads + lookahead)
                    ring = inputs.rings_at(POSITIONS, WINDOW + lookahead, window_type)
                    compressed = inputs.compressed(LENGTHS, 512, compressed_type)
                    queries = inputs.normal(len(POSITIONS), num_heads, HEAD_DIM).bfloat16()
                    sink, cos_sin = 2 * inputs.normal(num_heads), inputs.cos_sin(501)
                    slots = inputs.integers(range(1, len(POSITIONS) + 1))
                    positions = inputs.integers(POSITIONS, torch.int64)
                    out = torch.full_like(queries, torch.nan)
                    decode(
                        queries,
                        ring,
                        slots,
                        positions,
                        scale=SCALE,
                        sink=sink,
                        compressed=compressed,
                        inverse_rope=cos_sin,
                        out=out,
                        num_splits=num_splits,
                    )
                    expected = decode_reference(
                        queries.cpu(),
                        on_the_cpu(ring),
                        slots.cpu(),
                        positions.cpu(),
                        scale=SCALE,
                        sink=sink.cpu(),
                        compressed=_on_the_cpu(compressed),
                        inverse_rope=cos_sin.cpu(),
                    )
                    case = (
                        f"{window_type} window of {ring.rows} rows, {num_heads} heads, "
                        f"{num_splits} shares"
                    )
                    yield Result("decode", case, relative(out, expected), LIMIT, MEASURE)


def check_prefill(card: Card, heads: tuple[int, ...]) -> Iterator[Result]:
    """A ragged batch of chunks over full, part-filled and empty rings."""
    tokens = sum(length for _, length in CHUNKS)
    for window_type, compressed_type in card.row_types:
        for num_heads in heads:
            inputs = Inputs(card.device, seed=num_heads)
            before = [start - 1 for start, _ in CHUNKS]
            ring = inputs.rings_at(before, WINDOW + 2, window_type)
            keys = inputs.keys(tokens)
            if window_type != torch.bfloat16:
                keys = round_rows(keys, window_type)
            queries = inputs.normal(tokens, num_heads, HEAD_DIM).bfloat16()
            compressed = inputs.compressed(
                [(start + i + 1) // 4 for start, length in CHUNKS for i in range(length)],
                96,
                compressed_type,
            )
            step = inputs.step(CHUNKS, padding=0)
            sink = 2 * inputs.normal(num_heads)
            out = torch.full_like(queries, torch.nan)
            prefill(
                queries,
                keys,
                ring,
                step.slots,
                step.query_start,
                step.token_to_request,
                step.positions,
                scale=SCALE,
                sink=sink,
                compressed=compressed,
                out=out,
            )
            expected = prefill_reference(
                queries.cpu(),
                keys.cpu(),
                on_the_cpu(ring),
                step.slots.cpu(),
                step.query_start.cpu(),
                step.positions.cpu(),
                scale=SCALE,
                sink=sink.cpu(),
                compressed=_on_the_cpu(compressed),
            )
            case = f"{window_type} window, {num_heads} heads, {len(CHUNKS)} chunks"
            yield Result("prefill", case, relative(out, expected), LIMIT, MEASURE)


def _on_the_cpu(compressed: CompressedKeys) -> CompressedKeys:
    return CompressedKeys(
        on_the_cpu(compressed.cache), compressed.indices.cpu(), compressed.lengths.cpu()
    )
