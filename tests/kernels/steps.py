"""Steps for kernel tests: chunks of several sequences, with padding behind them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
