"""Index plans for rings served through paged-cache operators (the CPU path).

vLLM's CPU operators address a cache as ``block * block_size + offset``. A ring with one block per
slot is such a cache, so a decode step reads and writes it in place. A prefill chunk may be longer
than the ring, so its rows go to a staging buffer, laid out per request as

    [ tail: rows the ring still holds and this chunk may read | this chunk's rows ]

which the operator reads; afterwards the chunk's last rows are copied to the ring. The plan of one
step is the same for every layer of a kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_dsv4.ring.addressing import flat_row, oldest_readable
from vllm_dsv4.ring.step import RingStep, SnapshotOrders, ranges


@dataclass(frozen=True)
class RowCopy:
    """Rows to copy between a ring and the staging buffer, the same for all layers of a kind.

    Attributes:
        source: int64 ``[copies]``, flat row numbers.
        target: the same.
        rows: rows of a block on both sides.
    """

    source: torch.Tensor
    target: torch.Tensor
    rows: int

    @cached_property
    def source_place(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block, and row within it, of each source row."""
        return self.source // self.rows, self.source % self.rows

    @cached_property
    def target_place(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block, and row within it, of each target row."""
        return self.target // self.rows, self.target % self.rows


class StagingPlan:
    """Where the tokens of one step live, for rings of one ratio.

    Args:
        step: the batch.
        ratio: 0 for SWA keys, 4 or 128 for compressor state.
        window: positions that a query reads, its own included.
        rows: rows of a ring slot.
        lookahead: tokens of a step that may still be rejected.

    All index tensors are int64; -1 marks a position before the sequence's start.
    """

    def __init__(self, step: RingStep, ratio: int, window: int, rows: int, lookahead: int) -> None:
        self.step = step
        self.ratio = ratio
        self.window = window
        self.rows = rows
        self.lookahead = lookahead
        self.num_decode_tokens = step.num_decode_tokens
        self.num_prefill_tokens = step.num_tokens - step.num_decode_tokens

    @cached_property
    def decode_write(self) -> torch.Tensor:
        """``[decode tokens]``: ring row of each decode token."""
        n = self.num_decode_tokens
        return flat_row(self.step.token_slots[:n], self.step.positions[:n], self.rows)

    @cached_property
    def decode_read(self) -> torch.Tensor:
        """``[decode tokens, window]``: ring rows of the positions that each decode token reads."""
        n = self.num_decode_tokens
        positions = self._window_positions(self.step.positions[:n])
        rows = flat_row(self.step.token_slots[:n, None], positions, self.rows)
        return torch.where(positions >= 0, rows, -1)

    @cached_property
    def prefill_write(self) -> torch.Tensor:
        """``[prefill tokens]``: staging row of each prefill token."""
        return self._staging_shift + self._prefill_positions

    @cached_property
    def prefill_read(self) -> torch.Tensor:
        """``[prefill tokens, window]``: staging rows of the positions that each token reads.

        A token's rows are neighbours in staging, so their numbers need no modulo of each.
        """
        positions = self._prefill_positions
        first = positions - (self.window - 1)
        offsets = torch.arange(self.window, device=positions.device)
        if self.ratio:
            # Positions older than the staged tail belong to closed groups, which no token reads.
            oldest = self._tail_first[self._prefill_req]
            read = offsets >= (oldest - first)[:, None]
        else:
            first = first.clamp(min=0)
            read = offsets <= (positions - first)[:, None]
        return torch.where(read, (self._staging_shift + first)[:, None] + offsets, -1)

    @cached_property
    def ring_to_staging(self) -> RowCopy:
        """The tails: rows before each chunk that its tokens may read."""
        req, positions = ranges(self._tail_first, self._first)
        slots = self._prefill_slots[req]
        return RowCopy(
            source=flat_row(slots, positions, self.rows),
            target=self._tail_base[req] + positions - self._tail_first[req],
            rows=self.rows,
        )

    @cached_property
    def staging_to_ring(self) -> RowCopy:
        """The last rows of each chunk: what a later step may read, were the last ones rejected.

        Never more than ``rows`` of one request, so no two writes of a step meet in one row.
        """
        oldest = oldest_readable(self.ratio, (self._end - self.lookahead).clamp(min=0))
        req, positions = ranges(torch.maximum(oldest, self._first), self._end)
        return self._from_staging(req, positions, self._prefill_slots[req])

    @cached_property
    def prefill_snapshots(self) -> RowCopy:
        """The same tail, ended at each boundary that this step's chunks cover, bound for the
        snapshot's slot."""
        orders = self.step.snapshots.since(self.step.num_decodes)
        request = orders.request - self.step.num_decodes
        order, positions = ranges(self._snapshot_first(orders), orders.end)
        return self._from_staging(request[order], positions, orders.slot[order])

    @cached_property
    def decode_snapshots(self) -> RowCopy:
        """Rows to copy within a ring, after a decode step wrote a boundary's last row."""
        orders = self.step.snapshots.before(self.step.num_decodes)
        order, positions = ranges(self._snapshot_first(orders), orders.end)
        slots = self.step.slots[orders.request[order]].to(torch.int64)
        return RowCopy(
            source=flat_row(slots, positions, self.rows),
            target=flat_row(orders.slot[order], positions, self.rows),
            rows=self.rows,
        )

    def _snapshot_first(self, orders: SnapshotOrders) -> torch.Tensor:
        return oldest_readable(self.ratio, orders.end).clamp(min=0)

    def _from_staging(
        self, request: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> RowCopy:
        return RowCopy(
            source=self._tail_base[request] + positions - self._tail_first[request],
            target=flat_row(slots, positions, self.rows),
            rows=self.rows,
        )

    @cached_property
    def _prefill_slots(self) -> torch.Tensor:
        return self.step.slots[self.step.num_decodes :].to(torch.int64)

    @cached_property
    def _prefill_positions(self) -> torch.Tensor:
        return self.step.positions[self.num_decode_tokens :]

    @cached_property
    def _prefill_req(self) -> torch.Tensor:
        return self.step.token_to_req[self.num_decode_tokens :] - self.step.num_decodes

    @cached_property
    def _end(self) -> torch.Tensor:
        return self.step.seq_lens[self.step.num_decodes :].to(torch.int64)

    @cached_property
    def _first(self) -> torch.Tensor:
        bounds = self.step.query_start_loc[self.step.num_decodes :].to(torch.int64)
        return self._end - bounds.diff()

    @cached_property
    def _tail_first(self) -> torch.Tensor:
        return oldest_readable(self.ratio, self._first).clamp(min=0)

    @cached_property
    def _tail_base(self) -> torch.Tensor:
        lengths = self._end - self._tail_first
        return lengths.cumsum(0) - lengths

    @cached_property
    def _staging_shift(self) -> torch.Tensor:
        """``[prefill tokens]``: staging row less position, the same for a request's tokens."""
        return (self._tail_base - self._tail_first)[self._prefill_req]

    def _window_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """``[tokens, window]``, -1 where there is no such position.

        Window keys are listed from the oldest, left-aligned, as vLLM's CPU attention lists them;
        compressor rows keep their place in the group.
        """
        offsets = torch.arange(self.window, device=positions.device)
        if self.ratio:
            return (positions[:, None] - (self.window - 1) + offsets).clamp(min=-1)
        listed = (positions - (self.window - 1)).clamp(min=0)[:, None] + offsets
        return torch.where(listed <= positions[:, None], listed, -1)


def staging_rows_needed(window: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Rows that any step can need: every token, and a tail for every prefilling request."""
    return max_num_batched_tokens + min(max_num_seqs, max_num_batched_tokens) * (window - 1)
