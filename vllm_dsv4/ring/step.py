"""What a forward pass needs to know about its rings, built once a step for all layers.

Pure torch on whatever device the inputs are; no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_dsv4.ring import row


@dataclass(frozen=True)
class SnapshotOrders:
    """Snapshots to write in this step, ordered by request. All int64 ``[orders]``.

    Attributes:
        request: index in the batch.
        end: position one past the last row, a multiple of the block size, within the chunk.
        slot: snapshot slot to fill.
    """

    request: torch.Tensor
    end: torch.Tensor
    slot: torch.Tensor

    @classmethod
    def none(cls, device: torch.device) -> SnapshotOrders:
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return cls(empty, empty, empty)

    def before(self, request: int) -> SnapshotOrders:
        return self._where(self.request < request)

    def since(self, request: int) -> SnapshotOrders:
        return self._where(self.request >= request)

    def _where(self, mask: torch.Tensor) -> SnapshotOrders:
        return SnapshotOrders(self.request[mask], self.end[mask], self.slot[mask])


@dataclass
class RingStep:
    """One step's batch, seen from the rings. Requests are ordered decodes first.

    Attributes:
        slots: int32 ``[num_reqs]``, the slot of each request (0 for padding, and where its row
            names no lendable slot).
        query_start_loc: int32 ``[num_reqs + 1]``, first token of each request.
        seq_lens: int32 ``[num_reqs]``, tokens of each request after this step.
        token_to_req: int64 ``[num_tokens]``, request of each token.
        positions: int64 ``[num_tokens]``, position of each token in its sequence.
        num_decodes: requests that write first and read their ring in place.
        num_decode_tokens: their tokens; they come first in the batch.
        snapshots: snapshots to write.
    """

    slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    positions: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    snapshots: SnapshotOrders

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @cached_property
    def token_slots(self) -> torch.Tensor:
        """int64 ``[num_tokens]``, the slot of each token."""
        return self.slots[self.token_to_req].to(torch.int64)


def make_step(
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    num_decodes: int,
    num_decode_tokens: int,
    block_size: int,
    numbers: row.SlotNumbers,
) -> RingStep:
    """Derive the per-token columns.

    Args:
        rows: int32 ``[num_reqs, columns]``, the ring group's block table (see ``ring.row``).
        block_size: tokens of a paged block.
        numbers: what may be named; without snapshots the rows carry no orders.

    A chunk starts at ``seq_len - query_len`` read from the device. vLLM's host-side upper bound of
    ``seq_lens`` runs ahead under asynchronous speculation and must not be used for it.
    """
    device = query_start_loc.device
    starts = query_start_loc[:-1].to(torch.int64)
    lens = query_start_loc[1:].to(torch.int64) - starts
    token_to_req = torch.repeat_interleave(
        torch.arange(lens.shape[0], device=device), lens, output_size=num_tokens
    )
    first_positions = seq_lens.to(torch.int64) - lens
    tokens = torch.arange(num_tokens, device=device)
    positions = tokens + (first_positions - starts)[token_to_req]
    orders = (
        snapshot_orders(rows, first_positions, seq_lens.to(torch.int64), block_size, numbers)
        if numbers.num_snapshots
        else SnapshotOrders.none(device)
    )
    return RingStep(
        slots=lendable_slots(rows, numbers),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        token_to_req=token_to_req,
        positions=positions,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        snapshots=orders,
    )


def lendable_slots(rows: torch.Tensor, numbers: row.SlotNumbers) -> torch.Tensor:
    """int32 ``[num_reqs]``: the slots that rows name, 0 where that is none that can be lent."""
    named = rows[:, row.SLOT]
    return named * numbers.are_lendable(named)


def snapshot_orders(
    rows: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    block_size: int,
    numbers: row.SlotNumbers,
) -> SnapshotOrders:
    """The orders whose boundary lies in a request's chunk ``[first, end)``, its last row included.

    A verify step may cover a boundary with drafts that are rejected afterwards: the step that
    computes the real tokens covers it again and writes the snapshot again.
    """
    # A dummy batch may have chunks that are longer than their sequences.
    request, boundary = ranges(first.clamp(min=0) // block_size + 1, end // block_size + 1)
    columns = (boundary + (row.HEAD - 1)).clamp(max=rows.shape[1] - 1)
    slot = rows[request, columns].to(torch.int64)
    wanted = numbers.are_snapshots(slot) & (lendable_slots(rows, numbers)[request] != 0)
    return SnapshotOrders(request[wanted], boundary[wanted] * block_size, slot[wanted])


def restores(
    rows: torch.Tensor, first: torch.Tensor, block_size: int, numbers: row.SlotNumbers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies that must run before this step reads: int64 snapshot slots, and the slots to fill.

    True for a request in one step only, the one whose chunk starts where its hit ends.
    """
    sources, slots = rows[:, row.SOURCE], lendable_slots(rows, numbers)
    due = numbers.are_snapshots(sources) & (slots != 0)
    due &= rows[:, row.HIT_BLOCKS] * block_size == first
    return sources[due].to(torch.int64), slots[due].to(torch.int64)


def ranges(first: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All integers of the half-open ranges ``[first[i], end[i])``, each with its ``i``."""
    lengths = (end - first).clamp(min=0)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=first.device), lengths)
    before = (lengths.cumsum(0) - lengths)[owner]
    return owner, first[owner] + torch.arange(len(owner), device=first.device) - before
