"""Steps for kernel tests: chunks of several sequences, with padding behind them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from triton.runtime.interpreter import interpreter_builder
from vllm_dsv4.kernels.step_tokens import StepTokens


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``start + length - 1`` of the sequence in a slot."""

    slot: int
    start: int
    length: int


def make_step(chunks: Sequence[Chunk], *, padding_tokens: int = 0) -> StepTokens:
    """The index tensors of a step.

    Padding tokens carry request 0, a position that would be written and would close a group, and
    lie past the last query start, as stale entries of a captured graph do.
    """
    lengths = torch.tensor([chunk.length for chunk in chunks], dtype=torch.int64)
    positions = [torch.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks]
    positions.append(torch.full((padding_tokens,), 127))
    requests = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
    return StepTokens(
        positions=torch.cat(positions),
        token_to_request=torch.nn.functional.pad(requests, (0, padding_tokens)).int(),
        query_start=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        slots=torch.tensor([chunk.slot for chunk in chunks], dtype=torch.int32),
    )


def split_evenly(length: int, size: int) -> list[tuple[int, int]]:
    """Half-open intervals of at most ``size`` that cover ``[0, length)`` in order."""
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def cos_sin_table(positions: int) -> torch.Tensor:
    """Cosines and sines of 32 pairs, float32 ``[positions, 64]``."""
    angle = torch.arange(positions)[:, None] / 10000.0 ** (torch.arange(32)[None, :] / 32)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


@contextmanager
def last_program_first() -> Iterator[None]:
    """Within it, the interpreter runs the programs of a one-dimensional grid in reverse.

    A card runs them in any order: what two of them write to one place, this shows.
    """
    set_index = interpreter_builder.set_grid_idx

    def set_reversed(x: int, y: int, z: int) -> None:
        set_index(interpreter_builder.grid_dim[0] - 1 - x, y, z)

    with patch.object(interpreter_builder, "set_grid_idx", set_reversed):
        yield
