"""What is written to rings and to the paged history, against the PyTorch twins of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from vllm_dsv4.commands.verify.device import Card
from vllm_dsv4.commands.verify.inputs import WINDOW, Inputs, on_the_cpu
from vllm_dsv4.commands.verify.result import Result, relative, share_unequal
from vllm_dsv4.kernels.caches import KeyCache
from vllm_dsv4.kernels.compress import compress
from vllm_dsv4.kernels.compress_reference import compress_reference
from vllm_dsv4.kernels.compress_state import save_state, save_state_reference
from vllm_dsv4.kernels.compressor import MODEL_SHAPES, CompressorShape, StateRing
from vllm_dsv4.kernels.prepare_keys import prepare_keys, prepare_keys_reference
from vllm_dsv4.kernels.ring_copy import copy_slots
from vllm_dsv4.kernels.ring_write import write_ring, write_ring_reference

CHUNKS = ((0, 1), (0, 63), (100, 129), (127, 3), (5, 300))
TIES = 1e-3
"""Share of bytes that may differ: a sum that ends near a tie rounds one way or the other."""
FP8_ROUNDING = 0.04
"""Of a row's norm: e4m3 keeps three bits of each value."""
BLOCK_ROWS = 8


def check_keys(card: Card) -> Iterator[Result]:
    """Keys rotated, rounded and put in rings; slots copied."""
    tokens = sum(length for _, length in CHUNKS) + 2
    for window_type, _ in card.row_types:
        inputs = Inputs(card.device, seed=1)
        keys, cos_sin, step = inputs.keys(tokens), inputs.cos_sin(400), inputs.step(CHUNKS)
        on_cpu = Inputs(torch.device("cpu"), seed=1).step(CHUNKS)
        prepared = prepare_keys(keys, cos_sin, window_type, step)
        expected = prepare_keys_reference(keys.cpu(), cos_sin.cpu(), window_type, on_cpu)
        share = share_unequal(prepared, expected)
        yield Result("prepare_keys", str(window_type), share, TIES, "of the values differ")
        for rotate in (True, False):
            ring = inputs.cache(len(CHUNKS) + 1, WINDOW + 2, window_type)
            twin = on_the_cpu(ring)
            table = cos_sin if rotate else None
            write_ring(keys, ring, step, cos_sin=table)
            cpu_table = cos_sin.cpu() if rotate else None
            write_ring_reference(keys.cpu(), twin, on_cpu, cos_sin=cpu_table)
            share = share_unequal(ring.buffer, twin.buffer)
            case = f"{window_type}, {'rotated on the way' if rotate else 'rotated before'}"
            yield Result("write_ring", case, share, TIES, "of the bytes differ")
        yield _check_copy(inputs, ring)


def _check_copy(inputs: Inputs, ring: KeyCache) -> Result:
    expected = ring.buffer.clone()
    expected[4], expected[1] = expected[2], expected[3]
    copy_slots(ring.buffer, inputs.integers([2, 0, 3]), inputs.integers([4, 5, 1]))
    share = share_unequal(ring.buffer, expected)
    return Result("copy_slots", str(ring.dtype), share, 0.0, "of the bytes differ")


def check_compressors(card: Card) -> Iterator[Result]:
    """Each of the model's compressors over a sequence in chunks, and in one."""
    tokens = 261
    for shape in MODEL_SHAPES:
        inputs = Inputs(card.device, seed=shape.ratio + shape.head)
        keys, scores = inputs.normal(tokens, shape.width), 3 * inputs.normal(tokens, shape.width)
        compressor = _Compressor(inputs, shape, card, keys, scores)
        stored = compressor.run([(0, 130), (130, 131), (131, tokens)])
        whole = compressor.run([(0, tokens)])
        cpu_weights = replace(
            compressor.weights,
            bias=compressor.weights.bias.cpu(),
            norm=compressor.weights.norm.cpu(),
            cos_sin=compressor.weights.cos_sin.cpu(),
        )
        expected = compress_reference(keys.cpu(), scores.cpu(), cpu_weights)
        error = relative(stored, expected)
        yield Result("compress", str(shape), error, FP8_ROUNDING, "of the norm, from float64")
        share = share_unequal(stored, whole)
        yield Result(
            "compress", f"{shape}, in chunks and in one", share, 0.0, "of the values differ"
        )
        yield compressor.check_state()


class _Compressor:
    """One compressor with a ring of two slots, of which the sequence has the second."""

    def __init__(
        self,
        inputs: Inputs,
        shape: CompressorShape,
        card: Card,
        keys: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        self.inputs, self.shape, self.fp8 = inputs, shape, card.fp8
        self.keys, self.scores = keys, scores
        self.weights = inputs.compressor(shape, len(keys))

    def run(self, splits: list[tuple[int, int]]) -> torch.Tensor:
        """Feeds the sequence in steps; returns its compressed rows, float32."""
        groups = len(self.keys) // self.shape.ratio
        blocks = groups // BLOCK_ROWS + 1
        history = self.inputs.history(self.shape, blocks, BLOCK_ROWS, self.fp8)
        self.ring = self._ring()
        for start, stop in splits:
            step = self.inputs.step([(start, stop - start)], padding=0)
            part = self.keys[start:stop], self.scores[start:stop]
            compress(
                *part,
                self.weights,
                self.ring,
                step,
                history=history,
                history_rows=step.positions // self.shape.ratio,
            )
            save_state(*part, self.weights, self.ring, step)
        rows = torch.arange(groups, device=self.keys.device)
        return history.load_rows(rows // BLOCK_ROWS, rows % BLOCK_ROWS)

    def check_state(self) -> Result:
        """The state that the last run left, were it written in one step."""
        twin = self._ring()
        step = self.inputs.step([(0, len(self.keys))], padding=0)
        save_state_reference(self.keys, self.scores, self.weights, twin, step)
        got, expected = self.ring.rows_view()[1], twin.rows_view()[1]
        share = share_unequal(got, expected)
        return Result("save_state", str(self.shape), share, 0.0, "of the values differ")

    def _ring(self) -> StateRing:
        rows = self.shape.window + 2
        width = rows * 2 * self.shape.width
        buffer = torch.full((2, width), torch.nan, device=self.keys.device)
        return StateRing(buffer, rows, self.shape)
