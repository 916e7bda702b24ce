"""A compressor with its rings and history, driven step by step as a serving engine would."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm_dsv4.kernels.caches import KeyCache
from vllm_dsv4.kernels.compress import compress
from vllm_dsv4.kernels.compress_state import save_state
from vllm_dsv4.kernels.compressor import CompressorShape, CompressorWeights, StateRing
from vllm_dsv4.kernels.fp8_ds_mla import ROW_BYTES
from vllm_dsv4.kernels.indexer_cache import IndexerCache

from tests.kernels.steps import Chunk, cos_sin_table, make_step

BLOCK_ROWS = 8
HISTORY_POISON = 0xFF
"""As bytes a NaN in bf16, in fp8 e4m3fn and in float32."""

SHAPES = {
    "c4": CompressorShape(4, 512),
    "c4-indexer": CompressorShape(4, 128),
    "c128": CompressorShape(128, 512),
}


def random_weights(shape: CompressorShape, positions: int = 1024) -> CompressorWeights:
    return CompressorWeights(
        shape,
        bias=torch.randn(shape.ratio, shape.width),
        norm=(1 + 0.1 * torch.randn(shape.head)).bfloat16(),
        eps=1e-6,
        cos_sin=cos_sin_table(positions),
    )


@dataclass(frozen=True)
class Values:
    """Raw keys and scores ``[tokens, width]`` of one sequence."""

    keys: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def random(cls, tokens: int, shape: CompressorShape) -> "Values":
        size = (tokens, shape.width)
        return cls(torch.randn(size), 3 * torch.randn(size))

    def part(self, start: int, stop: int) -> "Values":
        return Values(self.keys[start:stop], self.scores[start:stop])


def make_history(
    shape: CompressorShape, blocks: int, dtype: torch.dtype
) -> KeyCache | IndexerCache:
    if shape.head == 128:
        width, kind = BLOCK_ROWS * 132, IndexerCache
    else:
        width, kind = BLOCK_ROWS * (1024 if dtype == torch.bfloat16 else ROW_BYTES), KeyCache
    buffer = torch.full((blocks, width + 64), HISTORY_POISON, dtype=torch.uint8)
    return kind(buffer, BLOCK_ROWS, dtype)


class Bench:
    """State rings of ``slots`` slots, filled with ``poison``, and histories of ``blocks`` blocks.

    Sequence ``i``'s compressed rows lie in its own blocks, in descending order; block 0 is where
    padding tokens point.
    """

    def __init__(
        self,
        weights: CompressorWeights,
        *,
        slots: int,
        dtype: torch.dtype,
        lookahead: int = 0,
        poison: float = float("nan"),
        blocks_per_sequence: int = 16,
    ) -> None:
        shape = weights.shape
        rows = shape.window + lookahead
        self.weights = weights
        self.blocks_per_sequence = blocks_per_sequence
        self.ring = StateRing(torch.full((slots, rows * 2 * shape.width + 16), poison), rows, shape)
        self.history = make_history(shape, 1 + slots * blocks_per_sequence, dtype)

    def block_rows(self, sequence: int, groups: torch.Tensor) -> torch.Tensor:
        """Where compressed rows ``groups`` of a sequence lie: ``block * BLOCK_ROWS + row``."""
        block = (sequence + 1) * self.blocks_per_sequence - groups // BLOCK_ROWS
        return block * BLOCK_ROWS + groups % BLOCK_ROWS

    def step(self, chunks: Sequence[Chunk], values: Sequence[Values], padding: int = 2) -> None:
        """Compresses, then saves, a chunk of each sequence; sequence ``i`` has slot ``i + 1``."""
        step = make_step(chunks, padding_tokens=padding)
        shape = self.ring.shape
        history_rows = torch.cat(
            [self._history_rows(chunk) for chunk in chunks]
            + [torch.zeros(padding, dtype=torch.int64)]
        )
        filler = Values.random(padding, shape)
        keys = torch.cat([*(v.keys for v in values), filler.keys])
        scores = torch.cat([*(v.scores for v in values), filler.scores])
        compress(
            keys,
            scores,
            self.weights,
            self.ring,
            step,
            history=self.history,
            history_rows=history_rows,
        )
        save_state(keys, scores, self.weights, self.ring, step)

    def run(self, sequence: int, values: Values, splits: Sequence[tuple[int, int]]) -> None:
        """Feeds one sequence in chunks ``[start, stop)``, each a step of its own."""
        for start, stop in splits:
            chunk = Chunk(sequence + 1, start, stop - start)
            self.step([chunk], [values.part(start, stop)])

    def stored(self, sequence: int, groups: int) -> torch.Tensor:
        """A sequence's first ``groups`` compressed rows, float32 ``[groups, head]``."""
        rows = self.block_rows(sequence, torch.arange(groups))
        return self.history.load_rows(rows // BLOCK_ROWS, rows % BLOCK_ROWS)

    def _history_rows(self, chunk: Chunk) -> torch.Tensor:
        groups = torch.arange(chunk.start, chunk.start + chunk.length) // self.ring.shape.ratio
        return self.block_rows(chunk.slot - 1, groups)
