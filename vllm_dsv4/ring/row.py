"""The ring group's block-table row: how a slot and its snapshot orders reach every worker.

vLLM carries block ids to all ranks, so a row of small numbers needs no channel of its own:

    column 0        slot of the request
    column 1        snapshot slot to restore from, 0 for none
    column 2        paged blocks that the prefix-cache hit covers
    column 2 + b    snapshot slot to fill at boundary ``b`` (after ``b`` paged blocks), 0 for none

Rows only grow while a request runs, so a later order is appended with zeros up to its column.

A row is what a block table says, and vLLM writes block tables that no scheduler made: its warm-ups
number all groups' blocks with one counter, and what an earlier request left stands behind a shorter
row. So no number of a row addresses a ring unless ``SlotNumbers`` says that it is one of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SLOT = 0
SOURCE = 1
HIT_BLOCKS = 2
HEAD = 3
"""Columns before the first boundary's."""


@dataclass(frozen=True)
class SlotNumbers:
    """The numbers that name slots: 0 the null slot, then the lendable slots, then the snapshots'.

    Two device operations a question, so that a builder can ask in every step.
    """

    num_slots: int
    num_snapshots: int = 0

    def are_lendable(self, numbers: Tensor) -> Tensor:
        """Which of some integers are in ``1..num_slots``; bool of the same shape."""
        return numbers.clamp(1, self.num_slots) == numbers

    def are_snapshots(self, numbers: Tensor) -> Tensor:
        """Which of some integers name snapshot slots, ``num_slots + 1 ..``; bool."""
        first, last = self.num_slots + 1, self.num_slots + self.num_snapshots
        if last < first:
            return numbers != numbers
        return numbers.clamp(first, last) == numbers


def target_column(boundary: int) -> int:
    """Column of the snapshot taken after ``boundary`` paged blocks (1 or more)."""
    return HEAD + boundary - 1


def row_columns(max_model_len: int, block_size: int) -> int:
    """Columns of a row: the head, and one for every block boundary a sequence can reach."""
    return HEAD + -(-max_model_len // block_size)
