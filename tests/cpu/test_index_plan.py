"""The CPU path's index plans, checked by content: every row read holds the position it should.

Rings and staging are arrays of integers here. A row holds ``sequence * 10_000 + position`` of the
token that wrote it, or a poison value; a plan is right if what it reads is what the window needs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from vllm_dsv4.cpu.index_plan import StagingPlan, staging_rows_needed
from vllm_dsv4.ring import row
from vllm_dsv4.ring.addressing import oldest_readable
from vllm_dsv4.ring.geometry import RingKind, ring_rows
from vllm_dsv4.ring.step import make_step, restores

BLOCK = 256
MAX_LEN = 4096
SLOTS, SNAPSHOTS = 3, 4
NUMBERS = row.SlotNumbers(SLOTS, SNAPSHOTS)
POISON = -7
KINDS = {0: RingKind.SWA, 4: RingKind.C4_ATTENTION, 128: RingKind.C128}


@dataclass
class Sequence:
    """One sequence in a slot. ``done`` tokens are final; ``row`` is its block-table row."""

    name: int
    slot: int
    done: int
    row: list[int]


class Rings:
    """One ring per ratio, of integers, moved by the plans under test."""

    def __init__(self, ratio: int, lookahead: int) -> None:
        self.ratio, self.lookahead = ratio, lookahead
        self.window = KINDS[ratio].window
        self.rows = ring_rows(self.window, lookahead, MAX_LEN)
        self.ring = torch.full(((SLOTS + 1 + SNAPSHOTS) * self.rows,), POISON)

    def slot(self, number: int) -> torch.Tensor:
        return self.ring[number * self.rows : (number + 1) * self.rows]

    def step(self, batch: list[tuple[Sequence, int]]) -> None:
        """Run one step: ``(sequence, tokens)``, decodes first. Every read is checked."""
        rows = torch.zeros((len(batch), row.row_columns(MAX_LEN, BLOCK)), dtype=torch.int32)
        for i, (sequence, _) in enumerate(batch):
            rows[i, : len(sequence.row)] = torch.tensor(sequence.row)
        lens = torch.tensor([0] + [n for _, n in batch])
        first = torch.tensor([sequence.done for sequence, _ in batch])
        for source, slot in zip(*restores(rows, first, BLOCK, NUMBERS), strict=True):
            self.slot(int(slot))[:] = self.slot(int(source))
        decodes = [n for _, n in batch if n <= 1 + self.lookahead]
        assert decodes == [n for _, n in batch][: len(decodes)], "decodes come first"
        step = make_step(
            rows=rows,
            query_start_loc=lens.cumsum(0).to(torch.int32),
            seq_lens=(first + lens[1:]).to(torch.int32),
            num_tokens=int(lens.sum()),
            num_decodes=len(decodes),
            num_decode_tokens=sum(decodes),
            block_size=BLOCK,
            numbers=NUMBERS,
        )
        plan = StagingPlan(step, self.ratio, self.window, self.rows, self.lookahead)
        names = torch.tensor([sequence.name for sequence, _ in batch])[step.token_to_req]
        values = names * 10_000 + step.positions
        split = step.num_decode_tokens
        if split:
            self.ring[plan.decode_write] = values[:split]
            self._check(plan.decode_read, self.ring, step, slice(0, split), names)
            if self.ratio != 128:
                copy = plan.decode_snapshots
                self.ring[copy.target] = self.ring[copy.source].clone()
        if split < step.num_tokens:
            # As large as the arena's staging is: a row beyond it is an index error.
            capacity = staging_rows_needed(self.window, step.num_tokens, len(batch))
            staging = torch.full((capacity,), POISON)
            staging[plan.ring_to_staging.target] = self.ring[plan.ring_to_staging.source]
            staging[plan.prefill_write] = values[split:]
            self._check(plan.prefill_read, staging, step, slice(split, None), names)
            for copy in [plan.staging_to_ring] + [plan.prefill_snapshots] * (self.ratio != 128):
                assert len(copy.target.unique()) == len(copy.target), "two writes in one row"
                self.ring[copy.target] = staging[copy.source]

    def _check(self, read, cache, step, tokens: slice, names) -> None:
        """What each token reads is exactly the positions its window (or closing group) needs."""
        for listed, position, name in zip(
            read, step.positions[tokens].tolist(), names[tokens].tolist(), strict=True
        ):
            if self.ratio and (position + 1) % self.ratio:
                continue  # closes no group: nobody looks at what it lists
            found = cache[listed[listed >= 0]].tolist()
            first, last = max(0, position - self.window + 1), position
            assert found == list(range(name * 10_000 + first, name * 10_000 + last + 1))


def serve(rings: Rings, rng: random.Random, steps: int) -> int:
    """A random life of up to SLOTS sequences at once; returns the snapshots that were hit."""
    live: dict[int, Sequence] = {}
    snapshots: dict[int, tuple[int, int]] = {}  # snapshot slot -> (sequence, boundary)
    name, hits = 0, 0
    for _ in range(steps):
        for slot in range(1, SLOTS + 1):
            if slot in live and rng.random() < 0.05:
                del live[slot]
            if slot not in live and rng.random() < 0.5:
                name += 1
                rings.slot(slot)[:] = POISON
                live[slot] = Sequence(name, slot, 0, [slot, 0, 0])
                if snapshots and rng.random() < 0.5:
                    source, (owner, boundary) = rng.choice(list(snapshots.items()))
                    live[slot] = Sequence(owner, slot, boundary * BLOCK, [slot, source, boundary])
                    hits += 1
        batch = []
        for sequence in live.values():
            decode = sequence.done > 0 and rng.random() < 0.6
            most = 1 + rings.lookahead if decode else 300
            batch.append((sequence, min(rng.randint(1, most), MAX_LEN - sequence.done)))
        batch = [item for item in batch if item[1] > 0]
        batch.sort(key=lambda item: item[1] > 1 + rings.lookahead)
        sources = {s.row[row.SOURCE] for s, _ in batch}
        # A rejection may have left a boundary, and its order, for a later step.
        sources |= {target for s in live.values() for target in s.row[row.HEAD :]}
        for sequence, tokens in batch:
            boundary = (sequence.done + tokens) // BLOCK
            free = [s for s in range(SLOTS + 1, SLOTS + 1 + SNAPSHOTS) if s not in sources]
            column = row.target_column(boundary)
            if boundary * BLOCK > sequence.done and free and column >= len(sequence.row):
                target = rng.choice(free)
                sources.add(target)
                snapshots.pop(target, None)
                sequence.row += [0] * (column - len(sequence.row)) + [target]
        rings.step(batch)
        for sequence, tokens in batch:
            # A step may reject all of its drafts, however many real tokens come before them.
            accepted = tokens - rng.randint(0, min(rings.lookahead, tokens - 1))
            sequence.done += accepted
            boundary = sequence.done // BLOCK
            column = row.target_column(boundary)
            crossed = sequence.done - accepted < boundary * BLOCK
            if boundary and crossed and column < len(sequence.row) and sequence.row[column]:
                snapshots[sequence.row[column]] = (sequence.name, boundary)
            # An order is carried out once; a target that others may now hit is not written again.
            for written in range(row.HEAD, len(sequence.row)):
                if (written - row.HEAD + 1) * BLOCK <= sequence.done:
                    sequence.row[written] = 0
    return hits


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("lookahead", [0, 1, 3, 8])
def test_every_read_finds_the_positions_it_needs(ratio: int, lookahead: int) -> None:
    """Random chunks, decodes, rejected drafts, slot reuse, snapshots and hits."""
    rings = Rings(ratio, lookahead)
    hits = serve(rings, random.Random(100 * ratio + lookahead), steps=90)
    assert hits > 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 620])
@pytest.mark.parametrize("chunk", [1, 64, 100, 700])
def test_any_chunks_of_a_prompt(length: int, chunk: int) -> None:
    for ratio in KINDS:
        rings = Rings(ratio, lookahead=0)
        sequence = Sequence(1, 2, 0, [2, 0, 0])
        while sequence.done < length:
            tokens = min(chunk, length - sequence.done)
            rings.step([(sequence, tokens)])
            sequence.done += tokens
        rings.step([(sequence, 1)])


def test_what_later_steps_may_read() -> None:
    assert oldest_readable(0, 300) == 300 - 127
    assert oldest_readable(4, 256) == 252
    assert oldest_readable(4, 258) == 252
    assert oldest_readable(128, 256) == 256
    assert oldest_readable(128, 300) == 256
