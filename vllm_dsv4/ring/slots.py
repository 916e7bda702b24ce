"""The slot pool: who owns which slot. Lives in the scheduler's process; pure Python."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vllm_dsv4.ring.addressing import NULL_SLOT


@dataclass(frozen=True)
class SlotCounts:
    """A reading of the pool. ``free + held == total`` at all times."""

    total: int
    free: int
    held: int


class SlotIntegrityError(AssertionError):
    """The pool's books do not add up."""


class SlotPool:
    """Slots ``1..num_slots``, each lent to one owner at a time, oldest returned slot first.

    First-in-first-out reuse leaves the longest possible time between a slot's return and its
    next use. Correctness does not rest on it (a row is read only if its owner wrote it); it
    makes a violation of that rule visible as stale data rather than as a coincidence.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a slot pool needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self._free: deque[int] = deque(range(NULL_SLOT + 1, num_slots + 1))
        self._slot_of: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def slot_of(self, owner: str) -> int | None:
        """The owner's slot, or None."""
        return self._slot_of.get(owner)

    def lend(self, owner: str) -> int:
        """Give ``owner`` the slot that has been free for longest.

        Raises:
            SlotIntegrityError: the owner holds one already, or none is free. Ask first.
        """
        if owner in self._slot_of:
            raise SlotIntegrityError(f"{owner!r} already holds slot {self._slot_of[owner]}")
        if not self._free:
            raise SlotIntegrityError(f"no free slot for {owner!r}: ask num_free before lending")
        slot = self._free.popleft()
        self._slot_of[owner] = slot
        return slot

    def give_back(self, owner: str) -> int | None:
        """Return the owner's slot and forget the owner. Unknown owners change nothing."""
        slot = self._slot_of.pop(owner, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def counts(self) -> SlotCounts:
        return SlotCounts(total=self.num_slots, free=len(self._free), held=len(self._slot_of))

    def owners(self) -> dict[str, int]:
        """A copy of the table: owner to slot."""
        return dict(self._slot_of)

    def check_integrity(self) -> SlotCounts:
        """Count everything: no slot lost, lent twice, or outside ``1..num_slots``.

        Raises:
            SlotIntegrityError: naming the slots at fault.
        """
        seen = sorted([*self._free, *self._slot_of.values()])
        expected = list(range(NULL_SLOT + 1, self.num_slots + 1))
        if seen != expected:
            twice = sorted({s for s in seen if seen.count(s) > 1})
            lost = sorted(set(expected) - set(seen))
            alien = sorted(set(seen) - set(expected))
            raise SlotIntegrityError(f"slots twice {twice}, lost {lost}, unknown {alien}")
        return self.counts()
