"""Snapshot orders of a step at fixed addresses: what to restore, and what to write in rounds.

The kernels write one snapshot a request at a time, so a chunk that covers several boundaries takes
several rounds. How many a captured graph launches must not depend on the step; a round without
orders finds zeros and stores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_dsv4.kernels.ring_copy import copy_slots
from vllm_dsv4.ring import row
from vllm_dsv4.ring.arena import RingArena
from vllm_dsv4.ring.geometry import SNAPSHOT_KINDS
from vllm_dsv4.rocm.step import DeviceStep

ORDERS_OF_ANY_CHUNK = 5
"""Orders that a chunk may carry whatever the interval (``ring.snapshots``): at the prompt's last
boundary before its last token and its last boundary, where a shared prefix ends, where a resumed
request's tokens end, and at one boundary beyond the prompt."""


@dataclass(frozen=True)
class SnapshotRound:
    """At most one snapshot a request. All ``[max_requests]``; zeros where there is none.

    Attributes:
        targets: int32, the snapshot slot to fill.
        prefill_targets: the same, for prefill requests only.
        ends: int64, position one past the snapshot's last row.
    """

    targets: torch.Tensor
    prefill_targets: torch.Tensor
    ends: torch.Tensor


def most_rounds(max_tokens: int, block_size: int, interval: int) -> int:
    """Snapshots that one chunk of ``max_tokens`` can be ordered to write."""
    wanted = ORDERS_OF_ANY_CHUNK + (max_tokens // interval + 1 if interval else 0)
    return min(wanted, -(-max_tokens // block_size))


class DeviceSnapshots:
    """The orders of the current step, valid as ``DeviceStep`` is.

    Args:
        arenas: the rings to restore.
        rounds: see ``most_rounds``.
    """

    def __init__(
        self,
        step: DeviceStep,
        arenas: Sequence[RingArena],
        block_size: int,
        max_tokens: int,
        rounds: int,
    ) -> None:
        self._step = step
        self._block_size = block_size
        device = step.slots.device
        self._boundaries = torch.arange(1, -(-max_tokens // block_size) + 1, device=device)
        # Each round's on a multiple of 16 bytes, as the kernels are compiled for.
        shape, requests = (rounds + 1, -(-step.max_requests // 4) * 4), step.max_requests
        self._targets = torch.zeros(shape, dtype=torch.int32, device=device)[:, :requests]
        self._prefill_targets = torch.zeros(shape, dtype=torch.int32, device=device)[:, :requests]
        self._ends = torch.zeros(shape, dtype=torch.int64, device=device)[:, :requests]
        self.rounds = tuple(
            SnapshotRound(self._targets[i], self._prefill_targets[i], self._ends[i])
            for i in range(rounds)
        )
        buffers = [
            buffer
            for arena in arenas
            for kind, buffer in arena.buffers.items()
            if kind in SNAPSHOT_KINDS
        ]
        self._rings = [buffer.flatten(0, 1) for buffer in buffers]
        self._layer_starts = [
            torch.arange(len(buffer), dtype=torch.int32, device=device)[:, None] * buffer.shape[1]
            for buffer in buffers
        ]

    def rounds_within(self, max_query_len: int) -> int:
        """Rounds that chunks of at most this many tokens can need."""
        return min(len(self.rounds), -(-max_query_len // self._block_size))

    def restore(self, rows: torch.Tensor) -> None:
        """Copy the snapshots that were hit into their requests' slots, in all layers.

        Due in one step of a request only, whose chunk starts where the hit ends.
        """
        requests = rows.shape[0]
        first, slots = self._step.first[:requests], self._step.slots[:requests]
        sources = rows[:, row.SOURCE]
        due = self._step.numbers.are_snapshots(sources) & (slots != 0)
        due &= rows[:, row.HIT_BLOCKS] * self._block_size == first
        for ring, starts in zip(self._rings, self._layer_starts, strict=True):
            copy_slots(
                ring,
                ((starts + sources) * due).flatten(),
                ((starts + slots) * due).flatten(),
            )

    def refresh(self, rows: torch.Tensor, num_decodes: int) -> None:
        """Find the orders whose boundary lies in a request's chunk, its last row included."""
        requests, columns = rows.shape
        first, end = self._step.first[:requests], self._step.end[:requests]
        boundaries = first[:, None] // self._block_size + self._boundaries
        ends = boundaries * self._block_size
        # A dummy batch may have chunks that are longer than their sequences.
        column = (boundaries + (row.HEAD - 1)).clamp(row.HEAD, columns - 1)
        slots = rows.gather(1, column)
        ordered = self._step.numbers.are_snapshots(slots) & (ends <= end[:, None])
        ordered &= self._step.slots[:requests, None] != 0
        last = len(self.rounds)
        place = torch.where(ordered, ordered.cumsum(1) - 1, last).clamp(max=last)
        for buffer, values in (
            (self._targets, slots),
            (self._ends, ends),
        ):
            buffer.zero_()
            buffer[:, :requests].scatter_(0, place.T, torch.where(ordered, values, 0).T)
        self._prefill_targets.copy_(self._targets)
        self._prefill_targets[:, :num_decodes].zero_()
