"""A step's chunks, request by request, for state that is kept as running softmaxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_dsv4.ring.step import RingStep

RATIO = 128


@dataclass(frozen=True)
class Chunk:
    """A request's tokens of a step: ``[begin, stop)`` of the batch, from position ``first``."""

    slot: int
    begin: int
    stop: int
    first: int

    @property
    def end(self) -> int:
        return self.first + self.stop - self.begin

    def closing(self) -> Iterator[int]:
        """Positions after each group's last token in the chunk."""
        yield from range((self.first // RATIO + 1) * RATIO, self.end + 1, RATIO)


def chunks_of(step: RingStep) -> list[Chunk]:
    """Of the requests that have a slot."""
    bounds, ends = step.query_start_loc.tolist(), step.seq_lens.tolist()
    return [
        Chunk(slot, begin, stop, end - (stop - begin))
        for slot, begin, stop, end in zip(
            step.slots.tolist(), bounds[:-1], bounds[1:], ends, strict=True
        )
        if slot > 0 and stop > begin
    ]
