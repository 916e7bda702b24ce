"""A worker's rings, simulated with content: every row knows which tokens it was computed from.

The content of a row is a number that stands for the whole sequence up to the row's position, so a
row of another request, of an older position, or of rejected drafts is told from the right one,
and a row of another request with the same prefix is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_dsv4.ring import row
from vllm_dsv4.ring.addressing import flat_row, oldest_readable

WINDOW = 12
"""Positions that a token reads in the window ring. Short, so that it wraps often."""
STATE_RATIO, STATE_WINDOW = 4, 8


class ContentError(AssertionError):
    """A row was read that its owner neither wrote nor restored, or an order makes no sense."""


@dataclass(frozen=True)
class RingKind:
    """``oldest(next)``: the oldest position that a token at ``next`` or later may read."""

    name: str
    rows: int
    oldest: Callable[[int], int]
    ahead: bool = False
    """A draft layer's: its rows are computed from the token after theirs too."""


def ring_kinds(lookahead: int, draft_model: bool = False) -> tuple[RingKind, ...]:
    """A window of keys, and the state of a compressor of ratio 4; a draft layer's window."""
    kinds = (
        RingKind("window", WINDOW + lookahead, lambda following: following - (WINDOW - 1)),
        RingKind(
            "state",
            STATE_WINDOW + lookahead,
            lambda following: int(oldest_readable(STATE_RATIO, following)),
        ),
    )
    window = kinds[0]
    return (*kinds, RingKind("draft", window.rows, window.oldest, True)) if draft_model else kinds


@dataclass(frozen=True)
class Chunk:
    """What a step computes for one request.

    Attributes:
        index: its line in the worker's block table.
        first: position of its first token.
        content: of every position before the chunk's end; the chunk's own last.
        ahead: the same for a draft layer, which reads a token ahead.
        decode: write first and read in place; else read first, then write the last rows.
    """

    request: str
    index: int
    first: int
    content: Sequence[int]
    ahead: Sequence[int]
    decode: bool

    @property
    def end(self) -> int:
        return len(self.content)

    def of(self, kind: RingKind) -> Sequence[int]:
        return self.ahead if kind.ahead else self.content


@dataclass
class SimulatedWorker:
    """Rings and the block table of one rank.

    Attributes:
        garbage: what stands in the table behind a row's end: vLLM's second model runner leaves
            another request's numbers there.
        rings: of each kind, row number to content. A row that was never written is not there.
    """

    num_slots: int
    num_snapshots: int
    block_size: int
    lookahead: int
    columns: int
    lines: int
    garbage: int
    draft_model: bool = False
    kinds: tuple[RingKind, ...] = ()
    table: list[list[int]] = field(default_factory=list)
    rings: dict[str, dict[int, int]] = field(default_factory=dict)
    restored: int = 0
    snapshots: int = 0

    def __post_init__(self) -> None:
        self.kinds = ring_kinds(self.lookahead, self.draft_model)
        self.rings = {kind.name: {} for kind in self.kinds}
        self.table = [[self.garbage] * self.columns for _ in range(self.lines)]

    def begin_row(self, index: int, numbers: Sequence[int]) -> None:
        """A new or resumed request. What an earlier one left behind the row's end stays."""
        self.table[index][: len(numbers)] = numbers

    def extend_row(self, index: int, length: int, numbers: Sequence[int]) -> None:
        self.table[index][length : length + len(numbers)] = numbers

    def run(self, chunks: Sequence[Chunk]) -> None:
        """One step. Restores come before anything is read, as in the metadata builder.

        Raises:
            ContentError: a read finds what it must not find.
        """
        for chunk in chunks:
            self._begin(chunk)
        for chunk in chunks:
            self._compute(chunk)

    def _begin(self, chunk: Chunk) -> None:
        numbers = self.table[chunk.index]
        slot = numbers[row.SLOT]
        if not 1 <= slot <= self.num_slots:
            raise ContentError(f"{chunk.request} runs in slot {slot} of {self.num_slots}")
        source = numbers[row.SOURCE] if self.num_snapshots else 0
        hit = source != 0 and numbers[row.HIT_BLOCKS] * self.block_size == chunk.first
        if chunk.first == 0 or hit:
            self.poison(slot)
        if hit:
            self._check_snapshot_slot(chunk, source)
            self._copy(source, slot, chunk.first)
            self.restored += 1

    def _compute(self, chunk: Chunk) -> None:
        slot = self.table[chunk.index][row.SLOT]
        for kind in self.kinds:
            ring = self.rings[kind.name]
            if chunk.decode:
                self._write(ring, kind, slot, chunk, chunk.first)
                self._read(ring, kind, slot, chunk, kind.oldest(chunk.first), chunk.end)
            else:
                self._read(ring, kind, slot, chunk, kind.oldest(chunk.first), chunk.first)
                self._write(ring, kind, slot, chunk, kind.oldest(chunk.end - self.lookahead))
            self._write_snapshots(ring, kind, chunk)

    def _read(
        self,
        ring: dict[int, int],
        kind: RingKind,
        slot: int,
        chunk: Chunk,
        first: int,
        end: int,
    ) -> None:
        for position in range(max(0, first), end):
            found = ring.get(flat_row(slot, position, kind.rows))
            if found != chunk.of(kind)[position]:
                raise ContentError(
                    f"{chunk.request} at {chunk.first}..{chunk.end} reads position {position} of "
                    f"the {kind.name} ring in slot {slot} and finds {found}"
                )

    @staticmethod
    def _write(ring: dict[int, int], kind: RingKind, slot: int, chunk: Chunk, first: int) -> None:
        for position in range(max(chunk.first, first), chunk.end):
            ring[flat_row(slot, position, kind.rows)] = chunk.of(kind)[position]

    def _write_snapshots(self, ring: dict[int, int], kind: RingKind, chunk: Chunk) -> None:
        if not self.num_snapshots:
            return
        block_size = self.block_size
        for boundary in range(chunk.first // block_size + 1, chunk.end // block_size + 1):
            target = self.table[chunk.index][row.target_column(boundary)]
            if target == 0:
                continue
            self._check_snapshot_slot(chunk, target)
            end = boundary * block_size
            for position in range(max(0, kind.oldest(end)), end):
                ring[flat_row(target, position, kind.rows)] = chunk.of(kind)[position]
            self.snapshots += 1

    def _check_snapshot_slot(self, chunk: Chunk, slot: int) -> None:
        if not self.num_slots < slot <= self.num_slots + self.num_snapshots:
            raise ContentError(f"{chunk.request} is to use slot {slot} as a snapshot")

    def _copy(self, source: int, target: int, end: int) -> None:
        for kind in self.kinds:
            ring = self.rings[kind.name]
            for position in range(max(0, end - kind.rows), end):
                found = ring.get(flat_row(source, position, kind.rows))
                if found is not None:
                    ring[flat_row(target, position, kind.rows)] = found

    def poison(self, slot: int) -> None:
        """Nothing that was written there can be read any more."""
        for kind in self.kinds:
            ring = self.rings[kind.name]
            for numbered in range(slot * kind.rows, (slot + 1) * kind.rows):
                ring.pop(numbered, None)
